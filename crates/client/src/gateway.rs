//! Contains the client's additional calls for gateways. A gateway publishes lists of events that other programs made.

use std::time::Duration;

use redis::Value;
use tokio::time::timeout;

use super::{BrokerError, Client, ClientError, Result, traced};
use tallyd_connect::fate::Fate;
use tallyd_core::event::LikeEvent;
use tallyd_redis::{Call, LIMIT};

/// A message: its routing key and its body.
pub type Message = (String, Vec<u8>);

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
        let (known, traceparent) = (self.sites.current().await, traced::current());
        let results = publisher.publish_all(&known.site.exchange, messages, traceparent.as_deref()).await;
        if results.iter().any(|result| matches!(result, Err(error) if error.fate() != Fate::Item)) {
            self.drop_publisher(&publisher).await;
        }
        Ok(results)
    }

    /// Counts the clicks of users, and returns how long the user must wait for each click. The wait is `None` if the click
    /// is allowed. An equal click that was counted before is allowed, because it is a retry.
    ///
    /// # Errors
    /// [`ClientError::Redis`].
    pub async fn limits_of(&self, clicks: &[LikeEvent]) -> Result<Vec<Option<Duration>>> {
        let (max, window) = (self.limits.rate_likes_max, self.limits.rate_window.as_millis());
        if max == 0 {
            return Ok(vec![None; clicks.len()]);
        }
        let cache = &self.sites.current().await.cache;
        let call = |LikeEvent { target, user, at, liked }: &LikeEvent| {
            let click = format!("{at}:{}:{}:{}", target.kind, target.id, u8::from(*liked));
            Call::new(&LIMIT, cache.keys.limit(*user)).number(max).number(window).arg(click)
        };
        let calls: Vec<Call> = clicks.iter().map(call).collect();
        let answers = cache.eval("check a user's limit", &calls).await?;
        answers.iter().map(wait).collect()
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
        Ok(self.sites.current().await.cache.now().await.map(drop)?)
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
