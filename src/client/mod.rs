//! The API servers' side, for Rust: counts a like in Redis at once, once, and publishes its event; other numbers likewise.
//!
//! A thin layer over the scripts in lua/, which any language can call: docs/events.md has the contract. The
//! event carries the `at` that the script returned; made up anywhere else it could lose against an older one.

pub mod boards;
pub mod counts;
mod filtered;
mod likes;
mod numbers;

use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use tokio::sync::{Mutex, Semaphore};

use crate::config::{self, Board, Config, Kinds, PartitionBy, Rules};
use numbers::Unasked;
pub use numbers::{Number, Numbers, READ_TARGETS_MAX, Source};
use tallyd_core::event::{LikeEvent, encode_like};
use tallyd_core::model::{Metric, Micros};
use tallyd_mysql::Store;
use tallyd_rabbitmq::{Broker, Publisher};
use tallyd_redis::Cache;
use tallyd_redis::keys::KindNames;

/// Connections to MySQL at most.
const CONNECTIONS: u32 = 16;

/// Of these for pages whose numbers Redis doesn't know.
const READS: usize = 4;

/// Counts and publishes likes and other numbers. Cheap to share: one connection to Redis, one to RabbitMQ, many likes on the way at once.
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
    limits: config::Client,
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

/// Why a like was not counted, or not published.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// Redis didn't count it, or the answer was lost on the way. Nothing was published.
    #[error("count the like")]
    NotCounted(#[source] anyhow::Error),
    /// It counted in Redis, but the broker didn't confirm the event, twice.
    #[error("publish the like")]
    NotPublished {
        /// What was counted.
        counted: Counted,
        /// What became of it.
        taken_back: TakenBack,
        /// Why the broker didn't take it.
        #[source]
        source: anyhow::Error,
    },
}

impl Client {
    /// A client of the servers that `config` names. Connects when first used.
    pub fn new(config: &Config) -> Result<Self> {
        let cache = Cache::new(&config.redis, &config.metrics)?;
        Ok(Self {
            also: cache.also(&config.redis, &config.metrics)?,
            cache,
            broker: Broker::new(&config.amqp)?,
            publisher: Mutex::default(),
            partition_by: config.amqp.partition_by,
            kinds: config.kinds.clone(),
            names: KindNames::new(&config.kinds),
            metric: config.metrics.like(),
            metrics: config.metrics.codes(),
            boards: config.boards.clone(),
            rules: Rules::from(config),
            store: Store::new(&config.mysql, CONNECTIONS)?,
            clicks_unasked: Unasked::default(),
            reads_unasked: Unasked::default(),
            reads: Semaphore::new(READS),
            limits: config.client.clone(),
            shapes: config.filter.is_on().then(filtered::Shapes::default),
        })
    }

    /// Publishes the event of something counted, and waits until the broker has it on disk. Publishing again is
    /// harmless: applying an event twice changes nothing.
    ///
    /// # Errors
    /// The broker is away or didn't confirm.
    pub async fn publish(&self, counted: &Counted) -> Result<()> {
        let Counted { event, count, .. } = counted;
        let body = encode_like(event, &self.kinds.name(event.target.kind), *count);
        let routing_key = self.partition_by.routing_key(event.target, event.user);
        self.publish_body(&routing_key, &body).await
    }

    async fn publish_body(&self, routing_key: &str, body: &[u8]) -> Result<()> {
        let publisher = self.publisher().await?;
        let published = publisher.publish(&self.broker.exchange(), routing_key, body).await;
        if published.is_err() {
            let mut shared = self.publisher.lock().await;
            // Another like may have made a new one already.
            if shared.as_ref().is_some_and(|known| Arc::ptr_eq(known, &publisher)) {
                *shared = None;
            }
        }
        Ok(published?)
    }

    async fn publisher(&self) -> Result<Arc<Publisher>> {
        let mut shared = self.publisher.lock().await;
        if let Some(publisher) = shared.as_ref() {
            return Ok(Arc::clone(publisher));
        }
        let publisher = Arc::new(self.broker.connect_publisher("client").await?);
        *shared = Some(Arc::clone(&publisher));
        Ok(publisher)
    }
}
