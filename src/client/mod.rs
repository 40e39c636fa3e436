//! The API servers' side, for Rust: counts a like in Redis at once and publishes its event.
//!
//! A thin layer over lua/like.lua and lua/board.lua, which any language can call: docs/events.md has the contract. The
//! event carries the `at` that the script returned; made up anywhere else it could lose against an older one.

pub mod boards;

use std::sync::Arc;

use anyhow::{Context, Result};
use redis::Value;
use tokio::sync::Mutex;
use tracing::{debug, warn};

use crate::broker::{Broker, Publisher};
use crate::cache::keys::KindNames;
use crate::cache::missing::Number;
use crate::cache::{Cache, Call, LIKE as LIKE_SCRIPT, text};
use crate::config::{Board, Config, Kinds, LIKE};
use crate::event::{LikeEvent, encode_like};
use crate::model::{Metric, Micros, Target, UserId};
use crate::store::Store;

/// Connections to MySQL at most.
const CONNECTIONS: u32 = 4;

/// Counts and publishes likes. Cheap to share: one connection to Redis, one to RabbitMQ, many likes on the way at once.
pub struct Client {
    cache: Cache,
    broker: Broker,
    publisher: Mutex<Option<Arc<Publisher>>>,
    kinds: Kinds,
    names: KindNames,
    metric: Metric,
    boards: Vec<Board>,
    /// For archived boards alone: connects when one is read.
    store: Store,
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

/// Why a like was not counted, or not published.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// Redis didn't count it, or the answer was lost on the way. Nothing was published.
    #[error("count the like")]
    NotCounted(#[source] anyhow::Error),
    /// It counts in Redis, but the broker didn't confirm the event: [`Client::publish`] it again, or leave the drift to
    /// the next full reconcile.
    #[error("publish the like")]
    NotPublished {
        /// What was counted.
        counted: Counted,
        /// Why the broker didn't take it.
        #[source]
        source: anyhow::Error,
    },
}

impl Client {
    /// A client of the servers that `config` names. Connects when first used.
    ///
    /// # Errors
    /// An address can't be used.
    pub fn new(config: &Config) -> Result<Self> {
        Ok(Self {
            cache: Cache::new(&config.redis)?,
            broker: Broker::new(&config.amqp)?,
            publisher: Mutex::default(),
            kinds: config.kinds.clone(),
            names: KindNames::new(&config.kinds),
            metric: config.metrics.like(),
            boards: config.boards.clone(),
            store: Store::new(&config.mysql, CONNECTIONS)?,
        })
    }

    /// The user likes the target: counts it in Redis and on `boards`, and publishes the event.
    ///
    /// # Errors
    /// [`ClientError`] says how far it came.
    pub async fn like(&self, target: Target, user: UserId, boards: &[OnBoard<'_>]) -> Result<Counted, ClientError> {
        self.set(target, user, true, boards).await
    }

    /// The user likes the target no longer.
    ///
    /// # Errors
    /// [`ClientError`] says how far it came.
    pub async fn unlike(&self, target: Target, user: UserId, boards: &[OnBoard<'_>]) -> Result<Counted, ClientError> {
        self.set(target, user, false, boards).await
    }

    /// The numbers of `targets` in Redis, in their order. None is unknown, never zero: ask MySQL, as docs/events.md says.
    /// What is missing is noted, so that a daemon loads it within seconds.
    ///
    /// # Errors
    /// Redis is away.
    pub async fn read(&self, targets: &[Target]) -> Result<Vec<Option<i64>>> {
        let numbers = self.cache.read(&self.names, self.metric, targets).await?;
        let missing = targets.iter().zip(&numbers).filter(|(_, number)| **number == Number::Missing);
        // A hint: who reads must not fail for it, for instance on a replica.
        if let Err(error) = self.cache.note_missing(&self.names, missing.map(|(target, _)| *target)).await {
            debug!(event = "missing-unnoted", "{:#}", anyhow::Error::from(error));
        }
        Ok(numbers.into_iter().map(Number::known).collect())
    }

    async fn set(
        &self,
        target: Target,
        user: UserId,
        liked: bool,
        boards: &[OnBoard<'_>],
    ) -> Result<Counted, ClientError> {
        let counted = self.count(target, user, liked, boards).await.map_err(ClientError::NotCounted)?;
        self.publish(&counted).await.map_err(|source| ClientError::NotPublished { counted, source })?;
        Ok(counted)
    }

    /// Counts in Redis alone, in one round trip. The event must be published next.
    ///
    /// # Errors
    /// Redis is away, or a name is not in the configuration.
    pub async fn count(&self, target: Target, user: UserId, liked: bool, boards: &[OnBoard<'_>]) -> Result<Counted> {
        let known = self.kinds.0.values().any(|code| *code == target.kind.0);
        anyhow::ensure!(known, "kind {} is not in [kinds]", target.kind);
        let kind = self.kinds.name(target.kind);
        let keys = &self.cache.keys;
        let like = Call::new(&LIKE_SCRIPT, keys.counters(&kind, keys.bucket(target)))
            .arg(target.id.to_string())
            .arg(self.metric.0.to_string())
            .arg(if liked { "like" } else { "unlike" });
        let mut calls = vec![like];
        for on in boards {
            calls.push(self.add_call(on, LIKE, if liked { 1 } else { -1 })?);
        }
        let mut answers = self.cache.eval_each("count a like", &calls).await?.into_iter();
        let answer = answers.next().context("like.lua was not called")??;
        let (at, count) = read_counted(&answer).context("like.lua returned something else")?;
        // The like counts and must be published, whatever became of the boards.
        let mut boards_failed = 0;
        for (on, error) in boards.iter().zip(answers).filter_map(|(on, answer)| Some((on, answer.err()?))) {
            boards_failed += 1;
            let (board, error) = (on.board, format!("{:#}", anyhow::Error::from(error)));
            warn!(event = "board-failed", board, error, "a like counts, but not on the board {board}: {error}");
        }
        Ok(Counted { event: LikeEvent { target, user, at, liked }, count, boards_failed })
    }

    /// Publishes the event of something counted, and waits until the broker has it on disk. Publishing again is
    /// harmless: applying an event twice changes nothing.
    ///
    /// # Errors
    /// The broker is away or didn't confirm.
    pub async fn publish(&self, counted: &Counted) -> Result<()> {
        let Counted { event, count, .. } = counted;
        let body = encode_like(event, &self.kinds.name(event.target.kind), *count);
        let publisher = self.publisher().await?;
        let published = publisher.publish(&self.broker.exchange(), &event.user.to_string(), &body).await;
        if published.is_err() {
            let mut shared = self.publisher.lock().await;
            // Another like may have made a new one already.
            if shared.as_ref().is_some_and(|known| Arc::ptr_eq(known, &publisher)) {
                *shared = None;
            }
        }
        published
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

fn read_counted(answer: &Value) -> Option<(Micros, Option<i64>)> {
    let Value::Array(parts) = answer else { return None };
    let [at, count] = parts.as_slice() else { return None };
    let count = match count {
        Value::Int(count) => Some(*count),
        Value::Nil => None,
        _ => return None,
    };
    Some((Micros(text(at)?.parse().ok()?), count))
}
