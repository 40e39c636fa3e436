//! The partitions in use across all daemons, and their backlog. Each daemon records its partitions in MySQL before an
//! event can arrive in them.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use anyhow::Result;

use crate::config::{Config, ConfigError, Map};
use tallyd_core::fence::Depth;
use tallyd_core::partition::Partitions;
use tallyd_mysql::Store;
use tallyd_mysql::maps::NotedMap;
use tallyd_mysql::partitions::Noted;
use tallyd_rabbitmq::{Broker, BrokerError, MapQueue, Publisher};

pub struct InUse {
    pub partitions: Partitions,
    pub maps: Vec<NotedMap>,
    /// `None` if no daemon has ever run.
    pub noted: Option<Noted>,
}

impl InUse {
    pub async fn read(store: &Store, broker: &Broker) -> Result<Self> {
        let noted = store.noted_partitions().await?;
        let count = noted.as_ref().map_or(0, |noted| noted.partitions).max(broker.partitions());
        let maps = store.noted_maps().await?;
        let of_maps = maps.iter().map(|map| (map.partition(), map.queue.clone()));
        let numbered = broker.numbered(count);
        let partitions = numbered.queues().map(|(number, queue)| (number, queue.to_owned())).chain(of_maps).collect();
        Ok(Self { partitions, maps, noted })
    }
}

pub fn queue_of(map: &Map, broker: &Broker) -> MapQueue {
    let (exchange, binding_keys) = (map.exchange.clone(), map.binding_keys.clone());
    MapQueue { queue: broker.map_queue(&map.name), exchange, binding_keys }
}

/// Written to MySQL before the map's queue is bound.
pub fn noted(map: &Map, broker: &Broker, owner: &str) -> NotedMap {
    NotedMap {
        number: map.number,
        name: map.name.clone(),
        queue: broker.map_queue(&map.name),
        bindings: map.binding_keys.iter().map(|key| (map.exchange.clone(), key.clone())).collect(),
        noted_by: owner.to_owned(),
    }
}

/// # Errors
/// [`ConfigError`] has a sentence for each map with the name, number or queue of a different map in use.
pub async fn check_maps(config: &Config, store: &Store, broker: &Broker) -> Result<()> {
    let in_use = store.noted_maps().await?;
    let conflict = |map: &Map| noted(map, broker, "").conflict(&in_use);
    let problems: Vec<String> = config.maps.iter().filter_map(conflict).collect();
    if problems.is_empty() { Ok(()) } else { Err(ConfigError(problems).into()) }
}

const STAYS: Duration = Duration::from_secs(30);

/// RabbitMQ does not always know the numbers. Then the last known ones stay in force for `STAYS`. After that the queue
/// counts as empty and without a consumer, because a job must not wait forever while all daemons are stopped. These
/// numbers only decide how fast a job works. No decision about events depends on them.
#[derive(Default)]
pub struct Backlog(HashMap<String, ((u64, u64), Instant)>);

impl Backlog {
    pub async fn of(&mut self, publisher: &Publisher, queue: &str) -> Result<(u64, u64), BrokerError> {
        let depth = publisher.depth(queue).await?;
        Ok(self.note(queue, depth, Instant::now()))
    }

    fn note(&mut self, queue: &str, depth: Depth, now: Instant) -> (u64, u64) {
        if let Depth::Known { messages, consumers } = depth {
            self.0.insert(queue.to_owned(), ((messages.into(), consumers.into()), now));
        }
        let known = self.0.get(queue).filter(|(_, at)| now.duration_since(*at) < STAYS);
        known.map_or((0, 0), |(numbers, _)| *numbers)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unknown_depth_keeps_the_last_numbers_for_a_while() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let full = Depth::Known { messages: 7, consumers: 0 };
        let mut backlog = Backlog::default();
        assert_eq!(backlog.note("a", Depth::Unknown, at(0)), (0, 0), "nothing is known yet");
        assert_eq!((backlog.note("a", full, at(1)), backlog.note("a", Depth::Unknown, at(30))), ((7, 0), (7, 0)));
        assert_eq!(backlog.note("b", Depth::Unknown, at(30)), (0, 0), "each queue has its own numbers");
        assert_eq!(backlog.note("a", Depth::Unknown, at(31)), (0, 0));
        assert_eq!(backlog.note("a", Depth::Known { messages: 0, consumers: 1 }, at(32)), (0, 1));
    }
}
