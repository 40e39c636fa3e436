//! The API servers' side of tallyd: counts a like in Redis immediately, counts it once, and publishes its event; the same for other numbers.
//!
//! [`Client`] is a thin layer over the scripts in lua/, which any language can call: docs/events.md has the contract. The
//! event carries the `at` that the script returned; made up anywhere else it could lose against an older one.
//!
//! Ids, targets and instants are types of `tallyd_core::model`. Every call can be cancelled by dropping it, like a lost connection: then it may
//! have counted, and a reconcile finds it.

#![warn(missing_docs)]

pub mod boards;
pub mod counts;
mod error;
mod filtered;
mod likes;
mod numbers;
mod settings;

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tokio::sync::{Mutex, Semaphore};

pub use error::{BrokerError, ClientError, CountError, LikeError};
pub use likes::STATUS_TARGETS_MAX;
use numbers::Unasked;
pub use numbers::{Number, Numbers, READ_TARGETS_MAX, Source};
pub use settings::Settings;
use tallyd_core::board::Board;
use tallyd_core::click_limits::ClickLimits;
use tallyd_core::event::{LikeEvent, encode_like};
use tallyd_core::kinds::Kinds;
use tallyd_core::model::{Metric, Micros};
use tallyd_core::partition::PartitionBy;
use tallyd_core::rules::Rules;
use tallyd_mysql::Store;
use tallyd_rabbitmq::{Broker, Publisher};
use tallyd_redis::Cache;
use tallyd_redis::keys::KindNames;

/// The result of a call.
pub type Result<T, E = ClientError> = std::result::Result<T, E>;

/// Connections to MySQL at most.
const CONNECTIONS: u32 = 16;

/// Of these for pages whose numbers Redis doesn't know.
const READS: usize = 4;

/// Counts and publishes likes and other numbers. Share one between all requests of a process, in an [`Arc`]: it has one connection to Redis
/// (on a Cluster one to each node), one to RabbitMQ and up to 16 to MySQL, and serves many calls at the same time.
pub struct Client {
    cache: Cache,
    /// A second layout, in which everything is counted too.
    also: Option<Cache>,
    broker: Broker,
    publisher: Mutex<Option<Arc<Publisher>>>,
    partition_by: PartitionBy,
    kinds: Kinds,
    names: KindNames,
    metric: Metric,
    /// All of them, by code.
    metrics: Vec<Metric>,
    boards: Vec<Board>,
    rules: Rules,
    /// For what Redis doesn't know.
    store: Store,
    /// Whether MySQL is asked what users like.
    clicks_unasked: Unasked,
    /// Whether it is asked for numbers: a Redis that has lost them must not keep clicks from being asked about.
    reads_unasked: Unasked,
    /// Pages that ask it at once.
    reads: Semaphore,
    limits: ClickLimits,
    /// What filters look like; none where there are no filters.
    shapes: Option<filtered::Shapes>,
}

/// A member of a board that a like counts for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OnBoard<'a> {
    /// The name of a `[[board]]`: all its current periods gain.
    pub board: &'a str,
    /// Who or what is ranked, for instance the video's id in decimal.
    pub member: &'a [u8],
}

/// A like that counts in Redis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Counted {
    /// What was counted, with the `at` that Redis gave it.
    pub event: LikeEvent,
    /// The target's number after it; none where that is unknown, because Redis has lost it.
    pub count: Option<i64>,
    /// How many of the boards that it was for refused it: the log says why.
    pub boards_failed: usize,
}

/// What became of a click.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Clicked {
    /// It changed what the user likes: it counts, and is published.
    Counted(Counted),
    /// The user liked the target already, or didn't: nothing was counted. The user's last event is published once more, because
    /// perhaps nobody has done that.
    Same {
        /// The target's number; none where that is unknown.
        count: Option<i64>,
        /// The `at` of that event.
        at: Micros,
    },
    /// The user clicks too often: nothing was counted or published.
    Limited {
        /// How long until clicks are taken again.
        wait: Duration,
    },
}

impl Clicked {
    /// What counts, where something does.
    pub fn counted(self) -> Option<Counted> {
        if let Self::Counted(counted) = self { Some(counted) } else { None }
    }
}

/// What became of what counts and could not be published.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TakenBack {
    /// It no longer counts: to call again is a new click.
    Yes,
    /// It is left to another request that has the same event (a double click), to a newer click, or to a reconcile: Redis has forgotten
    /// the click, or it was none that counted.
    Overtaken,
    /// Redis could not be asked: it may still count, until a reconcile finds it.
    Unknown,
}

impl Client {
    /// A client of the servers in `settings`. It connects when it is first used, and again after each failure.
    ///
    /// # Errors
    /// An address or a counter's key can't be read. No server is asked.
    pub fn new(settings: &Settings) -> Result<Self> {
        let Settings { amqp, mysql, redis, kinds, metrics, boards, rules, limits, has_filters } = settings;
        let cache = Cache::new(redis, metrics)?;
        Ok(Self {
            also: cache.also(redis, metrics)?,
            cache,
            broker: Broker::new(amqp)?,
            publisher: Mutex::default(),
            partition_by: amqp.partition_by,
            kinds: kinds.clone(),
            names: KindNames::new(kinds),
            metric: metrics.like(),
            metrics: metrics.codes(),
            boards: boards.clone(),
            rules: Rules::new(kinds, metrics, rules),
            store: Store::new(mysql, CONNECTIONS)?,
            clicks_unasked: Unasked::default(),
            reads_unasked: Unasked::default(),
            reads: Semaphore::new(READS),
            limits: limits.clone(),
            shapes: has_filters.then(filtered::Shapes::default),
        })
    }

    /// Publishes the event of something counted, and waits until the broker has it on disk. Publishing again is
    /// harmless: applying an event twice changes nothing.
    ///
    /// # Errors
    /// [`ClientError::Broker`]: the broker could not be reached, refused the event, or did not confirm it in time.
    pub async fn publish(&self, counted: &Counted) -> Result<()> {
        Ok(self.publish_like(counted).await?)
    }

    async fn publish_like(&self, counted: &Counted) -> Result<(), BrokerError> {
        let Counted { event, count, .. } = counted;
        let body = encode_like(event, &self.kinds.name(event.target.kind), *count);
        let routing_key = self.partition_by.routing_key(event.target, event.user);
        self.publish_body(&routing_key, &body).await
    }

    async fn publish_body(&self, routing_key: &str, body: &[u8]) -> Result<(), BrokerError> {
        let publisher = self.publisher().await?;
        let published = publisher.publish(&self.broker.exchange(), routing_key, body).await;
        if published.is_err() {
            let mut shared = self.publisher.lock().await;
            // Another like may have made a new one already.
            if shared.as_ref().is_some_and(|known| Arc::ptr_eq(known, &publisher)) {
                *shared = None;
            }
        }
        published
    }

    async fn publisher(&self) -> Result<Arc<Publisher>, BrokerError> {
        let mut shared = self.publisher.lock().await;
        if let Some(publisher) = shared.as_ref() {
            return Ok(Arc::clone(publisher));
        }
        let publisher = Arc::new(self.broker.connect_publisher("client").await?);
        *shared = Some(Arc::clone(&publisher));
        Ok(publisher)
    }
}

/// The time by this machine's clock.
fn now() -> Micros {
    Micros::from(SystemTime::now())
}
