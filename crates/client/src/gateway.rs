//! Contains the client's additional calls for gateways. A gateway publishes lists of events that other programs made,
//! and remembers clicks until they are in MySQL.

use std::time::Duration;

use redis::Value;
use tokio::time::timeout;

use super::error::require;
use super::{BrokerError, Client, ClientError, Result, STATUS_TARGETS_MAX, traced};
use tallyd_connect::fate::Fate;
use tallyd_core::event::LikeEvent;
use tallyd_core::model::{Kind, Target, TargetId, UserId};
use tallyd_core::rules::Writes;
use tallyd_redis::{Call, LIMIT};

/// A message: its routing key and its body.
pub type Message = (String, Vec<u8>);

/// The server that knows whether a user likes a target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LikedBy {
    /// Redis remembers the click, or the target's Bloom filter does not have the user.
    Redis,
    /// The answer is from the row in MySQL, or MySQL has no row.
    Mysql,
    /// A gateway has published the click within the last minute, and the row in MySQL is older.
    Gateway,
}

/// Whether a user likes a target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Liked {
    /// Whether the user likes the target.
    pub liked: bool,
    /// The server that gave the answer.
    pub by: LikedBy,
}

impl Client {
    /// Publishes all messages, and then waits until the broker has stored all of them on disk. Returns the result of
    /// each message, in the order of `messages`. If the connection breaks, the unconfirmed messages are published once
    /// more. A message that arrives a second time changes nothing.
    ///
    /// # Errors
    /// The broker was unreachable, or did not answer within twice `[amqp] timeout_ms` (once for a connection and once
    /// for the confirms). Each of the messages may have arrived.
    pub async fn publish_all(&self, messages: &[Message]) -> Result<Vec<Result<(), BrokerError>>, BrokerError> {
        let late = |_| BrokerError::NoAnswer { action: "publish", limit: self.confirm_max };
        timeout(self.confirm_max, self.publish_twice(messages)).await.unwrap_or_else(|elapsed| Err(late(elapsed)))
    }

    async fn publish_twice(&self, messages: &[Message]) -> Result<Vec<Result<(), BrokerError>>, BrokerError> {
        let mut results = self.publish_once(messages).await?;
        // If the broker did not answer, don't publish again. The time limit `confirm_max` would end before the broker
        // could answer a second time.
        let is_broken = |result: &Result<(), BrokerError>| match result {
            Err(BrokerError::NoAnswer { .. }) | Ok(()) => false,
            Err(error) => error.fate() != Fate::Item,
        };
        let (places, again): (Vec<usize>, Vec<Message>) = results
            .iter()
            .zip(messages)
            .enumerate()
            .filter(|(_, (result, _))| is_broken(result))
            .map(|(place, (_, message))| (place, message.clone()))
            .unzip();
        if again.is_empty() {
            return Ok(results);
        }
        for (place, result) in places.into_iter().zip(self.publish_once(&again).await?) {
            if let Some(slot) = results.get_mut(place) {
                *slot = result;
            }
        }
        Ok(results)
    }

    async fn publish_once(&self, messages: &[Message]) -> Result<Vec<Result<(), BrokerError>>, BrokerError> {
        let publisher = self.publisher().await?;
        let traceparent = traced::current();
        let results = publisher.publish_all(&self.broker.exchange(), messages, traceparent.as_deref()).await;
        if results.iter().any(|result| matches!(result, Err(error) if error.fate() != Fate::Item)) {
            self.drop_publisher(&publisher).await;
        }
        Ok(results)
    }

    /// Counts one click for each user in `users`, and returns how long each user must wait. The wait is `None` if the
    /// click is allowed.
    ///
    /// # Errors
    /// [`ClientError::Redis`].
    pub async fn limits_of(&self, users: &[UserId]) -> Result<Vec<Option<Duration>>> {
        let (max, window) = (self.limits.rate_likes_max, self.limits.rate_window.0.as_millis());
        if max == 0 {
            return Ok(vec![None; users.len()]);
        }
        let call = |user: &UserId| Call::new(&LIMIT, self.cache.keys.limit(*user)).number(max).number(window);
        let calls: Vec<Call> = users.iter().map(call).collect();
        let answers = self.cache.eval("check a user's limit", &calls).await?;
        answers.iter().map(wait).collect()
    }

    /// Remembers published likes and unlikes, so that [`Client::likes_of`] returns them.
    ///
    /// # Errors
    /// [`ClientError::Redis`].
    pub async fn remember_published(&self, clicks: &[LikeEvent]) -> Result<()> {
        Ok(self.cache.remember_published(&self.names, clicks).await?)
    }

    /// Returns whether the user likes each of up to [`STATUS_TARGETS_MAX`] targets of a kind, in the order of `ids`. If
    /// the daemon counts likes, the answer is MySQL's row, or a later click that a gateway published. If API servers
    /// count likes, this call returns the same answer as [`Client::liked`].
    ///
    /// # Errors
    /// [`ClientError::Invalid`] for more targets; [`ClientError::MySql`]; [`ClientError::Redis`], but only if API
    /// servers count likes.
    pub async fn likes_of(&self, user: UserId, kind: Kind, ids: &[TargetId]) -> Result<Vec<Liked>> {
        let in_range = ids.len() <= STATUS_TARGETS_MAX;
        require(in_range, || format!("a call asks for at most {STATUS_TARGETS_MAX} targets"))?;
        let targets: Vec<Target> = ids.iter().map(|id| Target { kind, id: *id }).collect();
        if self.writer(kind, self.metric).await == Writes::Api {
            return self.known_likes(user, &targets).await;
        }
        let published = async {
            // If Redis fails, use only MySQL's rows. These rows lack only clicks that the daemon has not written yet.
            let asked = timeout(HINT_MAX, self.cache.published(&self.names, user, &targets)).await;
            asked.ok().and_then(Result::ok).unwrap_or_default()
        };
        let (published, rows) = tokio::join!(published, self.store.last_clicks(user, &targets));
        let rows = rows?;
        let liked = |(place, target): (usize, &Target)| {
            let row = rows.get(target);
            match published.get(place).copied().flatten() {
                Some(click) if row.is_none_or(|row| row.at < click.at) => {
                    Liked { liked: click.liked, by: LikedBy::Gateway }
                }
                _ => Liked { liked: row.is_some_and(|row| row.liked), by: LikedBy::Mysql },
            }
        };
        Ok(targets.iter().enumerate().map(liked).collect())
    }

    /// Asks Redis first, and then asks MySQL for the likes that Redis doesn't know.
    pub(crate) async fn known_likes(&self, user: UserId, targets: &[Target]) -> Result<Vec<Liked>> {
        let known = self.known_to_redis(user, targets).await?;
        let unknown = targets.iter().zip(&known).filter(|(_, known)| known.is_none());
        let unknown: Vec<Target> = unknown.map(|(target, _)| *target).collect();
        let rows = if unknown.is_empty() { Default::default() } else { self.store.last_clicks(user, &unknown).await? };
        let liked = |(target, known): (&Target, Option<bool>)| match known {
            Some(liked) => Liked { liked, by: LikedBy::Redis },
            None => Liked { liked: rows.get(target).is_some_and(|row| row.liked), by: LikedBy::Mysql },
        };
        Ok(targets.iter().zip(known).map(liked).collect())
    }

    /// Checks that the broker answers, without changing anything.
    ///
    /// # Errors
    ///
    /// [`ClientError::Broker`]: the broker is unreachable, or fails to answer.
    pub async fn broker_answers(&self) -> Result<()> {
        let publisher = self.publisher().await?;
        let answered = publisher.answers().await;
        if answered.is_err() {
            self.drop_publisher(&publisher).await;
        }
        Ok(answered?)
    }

    /// Checks that Redis answers, without changing anything.
    ///
    /// # Errors
    ///
    /// [`ClientError::Redis`]: Redis is unreachable, or fails to answer.
    pub async fn redis_answers(&self) -> Result<()> {
        Ok(self.cache.now().await.map(drop)?)
    }
}

/// The timeout of optional requests to Redis.
pub const HINT_MAX: Duration = Duration::from_millis(500);

fn wait(answer: &Value) -> Result<Option<Duration>> {
    let parts = if let Value::Array(parts) = answer { parts.as_slice() } else { &[] };
    match parts {
        [Value::Int(1), _] => Ok(None),
        [Value::Int(0), Value::Int(wait_ms)] => Ok(Some(Duration::from_millis(wait_ms.unsigned_abs()))),
        _ => Err(ClientError::Answer("limit.lua returned an unexpected answer")),
    }
}
