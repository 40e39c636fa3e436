//! The Rust client of tallyd for API servers. A [`Client`] publishes events: a user liked a target, or another number
//! changed. The client also reads likes, numbers and boards.
//!
//! The daemon counts: a call only publishes an event, and `at` is the time of this machine's clock. If a number's rule
//! is `writer = "api"`, [`Client::like`] and [`Client::add`] refuse it. Such a site calls the scripts in lua/ itself
//! (docs/scripts.md), and then publishes the event with [`Client::publish`].
//!
//! Ids, targets and instants are types of `tallyd_core::model`. The ids of targets and users are 1 to 2^63-1: the
//! daemon rejects other events.

#![warn(missing_docs, unreachable_pub)]

pub mod boards;
mod changes;
mod error;
mod event;
mod filters;
pub mod gateway;
mod liked;
mod likes;
mod numbers;
mod settings;
mod traced;

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tokio::sync::{Mutex, Semaphore};
use tokio::time::timeout;

pub use error::{ClientError, PublishError};
pub use event::{Change, Changed, Event, NUMBER_MAX};
use filters::Filters;
pub use liked::{Liked, LikedBy, STATUS_TARGETS_MAX};
pub use likes::Clicked;
use numbers::Unasked;
pub use numbers::{Number, Numbers, READ_TARGETS_MAX, Source};
pub use settings::Settings;
use tallyd_core::board::Board;
use tallyd_core::click_limits::ClickLimits;
use tallyd_core::kinds::Kinds;
use tallyd_core::model::{Metric, Micros};
use tallyd_core::partition::PartitionBy;
use tallyd_core::rules::Rules;
use tallyd_mysql::Store;
pub use tallyd_rabbitmq::BrokerError;
use tallyd_rabbitmq::{Broker, Publisher};
use tallyd_redis::Cache;
use tallyd_redis::keys::KindNames;
pub use traced::traced;

/// The result of a call.
pub type Result<T, E = ClientError> = std::result::Result<T, E>;

/// The largest number of connections to MySQL.
const CONNECTIONS: u32 = 16;

/// The largest number of calls that read numbers from MySQL at the same time. Such a call reads numbers that Redis has
/// lost.
const READS: usize = 4;

/// Publishes likes and changes of other numbers, and reads. Share one client between all requests of a process, in an
/// [`Arc`]. The client has one connection to Redis (or to each node of a Cluster), one connection to RabbitMQ, and up to
/// 16 connections to MySQL. These connections serve many calls at the same time.
pub struct Client {
    cache: Cache,
    broker: Broker,
    publisher: Mutex<Option<Arc<Publisher>>>,
    partition_by: PartitionBy,
    kinds: Kinds,
    names: KindNames,
    metric: Metric,
    /// All metrics, by code.
    metrics: Vec<Metric>,
    boards: Vec<Board>,
    rules: Rules,
    /// MySQL, which the client asks if Redis can't answer.
    store: Store,
    /// If MySQL fails while the client reads numbers, the client does not ask MySQL for numbers until this instant. The
    /// client can still ask MySQL for the likes of users.
    unasked: Unasked,
    /// Limits how many calls can read numbers from MySQL at the same time.
    reads: Semaphore,
    limits: ClickLimits,
    /// The timeout for publishing, with one retry.
    confirm_max: Duration,
    /// `None` if there are no filters.
    filters: Option<Filters>,
}

impl Client {
    /// Makes a client for the servers in `settings`. The client connects with the first call, and connects again after
    /// each failure.
    ///
    /// # Errors
    ///
    /// An address or `counter_key` is invalid. The call does not connect to a server.
    pub fn new(settings: &Settings) -> Result<Self> {
        let Settings { amqp, mysql, redis, kinds, metrics, boards, rules, limits, has_filters } = settings;
        let cache = Cache::new(redis, metrics)?;
        Ok(Self {
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
            unasked: Unasked::default(),
            reads: Semaphore::new(READS),
            limits: limits.clone(),
            confirm_max: amqp.timeout() * 2,
            filters: has_filters.then(Filters::default),
        })
    }

    /// Publishes, and retries once after a failure, because perhaps only the connection had broken. A repeated event
    /// changes nothing. The call ends within twice `[amqp] timeout_ms`. This limit is less than `[reconcile]
    /// publish_grace`.
    async fn twice<P>(&self, publish: impl Fn() -> P) -> Result<(), BrokerError>
    where
        P: Future<Output = Result<(), BrokerError>>,
    {
        let both = async {
            let first = publish().await;
            if first.is_err() { publish().await } else { first }
        };
        let Ok(published) = timeout(self.confirm_max, both).await else {
            // The broker does not answer, so make a new connection next time. If another call holds the lock, that call
            // is already connecting.
            if let Ok(mut shared) = self.publisher.try_lock() {
                *shared = None;
            }
            return Err(BrokerError::NoAnswer { action: "publish", limit: self.confirm_max });
        };
        published
    }

    async fn publish_body(&self, routing_key: &str, body: &[u8]) -> Result<(), BrokerError> {
        let publisher = self.publisher().await?;
        let (exchange, traceparent) = (self.broker.exchange(), traced::current());
        let published = publisher.publish_traced(&exchange, routing_key, body, traceparent.as_deref()).await;
        if published.is_err() {
            self.drop_publisher(&publisher).await;
        }
        published
    }

    async fn drop_publisher(&self, publisher: &Arc<Publisher>) {
        let mut shared = self.publisher.lock().await;
        // Another call may already have made a new publisher.
        if shared.as_ref().is_some_and(|known| Arc::ptr_eq(known, publisher)) {
            *shared = None;
        }
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

/// Returns the time of this machine's clock.
fn now() -> Micros {
    Micros::from(SystemTime::now())
}
