//! Contains the client's additional calls for gateways. A gateway publishes lists of events that other programs made.

use std::time::Duration;

use redis::Value;

use super::groups::Message;
use super::{BrokerError, Client, ClientError, Result};
use tallyd_core::event::LikeEvent;
use tallyd_core::partition::PartitionBy;
use tallyd_redis::{Call, LIMIT};

impl Client {
    /// Publishes all events, which other programs made: the routing key and the body of each. Waits until the broker
    /// has stored all of them on disk. Returns the result of each event, in the order of `events`. An event that is not
    /// confirmed may have arrived. An event that arrives a second time changes nothing.
    pub async fn publish_all(&self, events: Vec<(String, Vec<u8>)>) -> Vec<Result<(), BrokerError>> {
        let known = self.sites.current().await;
        let message = |(routing_key, body)| {
            let exchange = known.site.exchange.clone();
            Message { exchange, routing_key, body, is_alone: known.site.terms.partition_by == PartitionBy::Target }
        };
        self.groups.publish_all(events.into_iter().map(message).collect()).await
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
        Ok(self.groups.answers().await?)
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
