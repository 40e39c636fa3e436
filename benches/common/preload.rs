//! Fills the queues with confirmed messages, and waits until the servers are idle.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context, Result};
use futures_util::{StreamExt, TryStreamExt, stream};
use tallyd_core::event::{LikeEvent, encode_like};
use tokio::time::Instant;

use super::cpu::Processes;
use super::world::World;

/// The maximum number of published messages that are not confirmed yet.
const IN_FLIGHT: usize = 10_000;

/// The servers are idle if together they use less than this fraction of a core.
const REST_CORES: f64 = 0.1;

/// Time limit for the wait until the servers are idle.
const REST_WAIT_MAX: Duration = Duration::from_secs(60);

/// Generates and publishes the events at the same time, one event in each message.
pub async fn preload(world: &World, events: impl Iterator<Item = LikeEvent>) -> Result<()> {
    preload_messages(world, events.map(|event| message(&event))).await
}

/// Generates and publishes the messages at the same time. Each message consists of a routing key and a body.
pub async fn preload_messages(world: &World, messages: impl Iterator<Item = (String, Vec<u8>)>) -> Result<()> {
    let publisher = world.broker.connect_publisher("bench").await?;
    let exchange = world.broker.exchange();
    stream::iter(messages)
        .map(|(key, body)| {
            let (publisher, exchange) = (&publisher, &exchange);
            async move { publisher.publish(exchange, &key, &body).await }
        })
        .buffered(IN_FLIGHT)
        .try_for_each(|()| std::future::ready(Ok(())))
        .await
        .context("preload the queues")
}

/// Returns an event as a producer publishes it: routing key and body.
pub fn message(event: &LikeEvent) -> (String, Vec<u8>) {
    (event.user.to_string(), encode_like(event, "video", None))
}

/// Collects events into messages with arrays. Each message contains `per_message` events of one group of users, and has
/// the group's number as its routing key. Therefore, all events of a user are in the same partition. With one group, the
/// routing key is the first event's user, and a user's events are in several partitions.
pub fn arrays(
    events: impl Iterator<Item = LikeEvent>,
    per_message: usize,
    groups: u64,
) -> impl Iterator<Item = (String, Vec<u8>)> {
    let mut open: BTreeMap<u64, Array> = BTreeMap::new();
    let mut events = events.fuse();
    std::iter::from_fn(move || {
        for event in events.by_ref() {
            let group = event.user.0 % groups;
            let array = open.entry(group).or_insert_with(|| Array {
                key: if groups > 1 { group.to_string() } else { event.user.to_string() },
                bodies: Vec::with_capacity(per_message),
            });
            array.bodies.push(message(&event).1);
            if array.bodies.len() == per_message {
                return open.remove(&group).map(Array::message);
            }
        }
        open.pop_first().map(|(_, array)| array.message())
    })
}

struct Array {
    key: String,
    bodies: Vec<Vec<u8>>,
}

impl Array {
    fn message(self) -> (String, Vec<u8>) {
        (self.key, [b"[", self.bodies.join(&b',').as_slice(), b"]"].concat())
    }
}

/// Waits until the servers are idle. After the last publish, the broker is still moving data from its log to its
/// segments, and the database is still writing its pages.
pub async fn rest(servers: Processes) -> Result<()> {
    let began = Instant::now();
    while began.elapsed() < REST_WAIT_MAX {
        let (before, from) = (servers.used(None)?, Instant::now());
        tokio::time::sleep(Duration::from_millis(500)).await;
        let used = servers.used(None)?.since(before);
        if used.together() as f64 / 1e6 / from.elapsed().as_secs_f64() < REST_CORES {
            return Ok(());
        }
    }
    Ok(())
}
