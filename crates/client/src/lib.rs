//! The Rust client of tallyd for API servers. A [`Client`] publishes events: a user liked a target, or another number
//! changed. The client also reads likes, numbers and boards.
//!
//! For each number, a rule says whether daemons or API servers count the number in Redis. By default the daemon counts:
//! a call only publishes an event, and `at` is the time of this machine's clock. If a number's rule is
//! `writer = "api"`, a call first changes this number in Redis, and then publishes the event. The event's `at` is the
//! time of Redis' clock. The client is a thin layer over the scripts in lua/, which any language can call.
//! docs/events.md has the contract.
//!
//! Daemons announce in Redis which side counts each number. A client reads this announcement with its first call and
//! every ten seconds, and follows it. Until the client has read an announcement, it uses the rules in [`Settings`].
//!
//! Ids, targets and instants are types of `tallyd_core::model`. The ids of targets and users are 1 to 2^63-1: the
//! daemon rejects other events. If a caller drops a call before it ends, the call may have counted without publishing
//! its event. A reconcile corrects that.

#![warn(missing_docs, unreachable_pub)]

pub mod boards;
pub mod counts;
mod error;
mod filtered;
mod followed;
pub mod gateway;
mod likes;
mod numbers;
mod settings;
mod traced;

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tokio::sync::{Mutex, Semaphore};
use tokio::time::timeout;

pub use error::{ClientError, CountError, LikeError};
use followed::Followed;
pub use likes::STATUS_TARGETS_MAX;
use numbers::Unasked;
pub use numbers::{Number, Numbers, READ_TARGETS_MAX, Source};
pub use settings::Settings;
use tallyd_core::board::Board;
use tallyd_core::click_limits::ClickLimits;
use tallyd_core::event::{LikeEvent, encode_like};
use tallyd_core::kinds::Kinds;
use tallyd_core::model::{Kind, Metric, Micros};
use tallyd_core::partition::PartitionBy;
use tallyd_core::rules::{Rules, Writes};
use tallyd_core::writers::Writers;
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

/// Counts and publishes likes and other numbers. Share one client between all requests of a process, in an [`Arc`]. The
/// client has one connection to Redis (or to each node of a Cluster), one connection to RabbitMQ, and up to 16
/// connections to MySQL. These connections serve many calls at the same time.
pub struct Client {
    cache: Cache,
    /// The second layout, in which the client also counts.
    also: Option<Cache>,
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
    followed: Followed,
    /// MySQL, which the client asks if Redis can't answer.
    store: Store,
    /// After a failure of MySQL, the client does not ask MySQL for the likes of users until this instant.
    clicks_unasked: Unasked,
    /// If MySQL fails while the client reads numbers, the client does not ask MySQL for numbers until this instant. The
    /// client can still ask MySQL for the likes of users.
    reads_unasked: Unasked,
    /// Limits how many calls can read numbers from MySQL at the same time.
    reads: Semaphore,
    limits: ClickLimits,
    /// The timeout for publishing, with one retry.
    confirm_max: Duration,
    /// The shapes of filters. `None` if there are no filters.
    shapes: Option<filtered::Shapes>,
}

/// A member of a board. A like also adds to this member's score.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OnBoard<'a> {
    /// The name of a `[[board]]`. The like is added in the current periods of all boards with that name.
    pub board: &'a str,
    /// The ranked user or object, for instance a video's id in decimal. Any bytes.
    pub member: &'a [u8],
}

/// A like that was counted in Redis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Counted {
    /// The event, with the `at` that Redis gave it.
    pub event: LikeEvent,
    /// The target's count of likes after the click. `None` if Redis has lost the number. Also `None` after
    /// [`Client::count`] in some layouts.
    pub count: Option<i64>,
    /// The number of requested boards to which the like could not be added. The log has the reasons (`board-failed`).
    pub boards_failed: usize,
}

/// The result of a click.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Clicked {
    /// The event of the click is published. The daemon counts the click if the click changes what the user likes.
    Published(LikeEvent),
    /// The click changed what the user likes. The click was counted, and its event is published.
    Counted(Counted),
    /// The click changed nothing. The user liked a target again, or unliked a target that the user did not like.
    /// Nothing was counted. The client published the user's last event again, because an earlier request may have
    /// failed to publish this event.
    Same {
        /// The target's count of likes. `None` if Redis has lost the number.
        count: Option<i64>,
        /// The `at` of the user's last event.
        at: Micros,
    },
    /// The user clicks too often: nothing was counted or published.
    Limited {
        /// How long the user must wait.
        wait: Duration,
    },
}

impl Clicked {
    /// Returns the counted like, if there is one.
    pub fn counted(self) -> Option<Counted> {
        if let Self::Counted(counted) = self { Some(counted) } else { None }
    }
}

/// Says whether Redis still counts a change that could not be published.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TakenBack {
    /// The change no longer counts. The caller can make the same call again.
    Yes,
    /// The client did not take the change back. There are three possible reasons: another request can still publish the
    /// same event (a double click), the user has clicked again, or Redis does not remember the click. A reconcile
    /// corrects the number if it is wrong.
    Overtaken,
    /// Redis failed to answer. The change may still count, until a reconcile corrects the number.
    Unknown,
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
        let rules = Rules::new(kinds, metrics, rules);
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
            followed: Followed::new(kinds, metrics, Writers::new(kinds, metrics, &rules)),
            rules,
            store: Store::new(mysql, CONNECTIONS)?,
            clicks_unasked: Unasked::default(),
            reads_unasked: Unasked::default(),
            reads: Semaphore::new(READS),
            limits: limits.clone(),
            confirm_max: amqp.timeout() * 2,
            shapes: has_filters.then(filtered::Shapes::default),
        })
    }

    /// Returns which side counts each number. While Redis answers, the announcement is at most ten seconds old.
    pub async fn writers(&self) -> Arc<Writers> {
        self.followed.writers(&self.cache).await
    }

    async fn writer(&self, kind: Kind, metric: Metric) -> Writes {
        self.writers().await.of(kind, metric)
    }

    /// Fails if the settings don't have the kind, because the daemon would reject the event.
    fn check_kind(&self, kind: Kind) -> Result<()> {
        self.names.get(kind).map(drop).ok_or(ClientError::NoKind(kind))
    }

    /// Publishes the event of a like, and waits until the broker has it on disk. Call it only after [`Client::count`],
    /// because [`Client::like`] and [`Client::unlike`] publish their events. The caller can call `publish` again,
    /// because a repeated event changes nothing.
    ///
    /// # Errors
    /// [`ClientError::Broker`]: the broker is unreachable, refused the event, or did not confirm it in time.
    pub async fn publish(&self, counted: &Counted) -> Result<()> {
        Ok(self.publish_like(&counted.event, counted.count).await?)
    }

    /// Publishes the event in [`LikeError::NotConfirmed`] again, and waits until the broker has it on disk. A repeated
    /// event changes nothing.
    ///
    /// # Errors
    /// [`ClientError::Broker`]: the broker is unreachable, refused the event, or did not confirm it in time.
    pub async fn publish_event(&self, event: &LikeEvent) -> Result<()> {
        Ok(self.publish_like(event, None).await?)
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

    async fn publish_like(&self, event: &LikeEvent, count: Option<i64>) -> Result<(), BrokerError> {
        let body = encode_like(event, &self.kinds.name(event.target.kind), count);
        let routing_key = self.partition_by.routing_key(event.target, event.user);
        self.publish_body(&routing_key, &body).await
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
