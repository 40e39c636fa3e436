//! The partitions in use across all daemons. Each daemon records its partitions in MySQL before an event can arrive in
//! them.

use anyhow::Result;

use crate::config::{Config, ConfigError, Map};
use tallyd_core::partition::Partitions;
use tallyd_mysql::Store;
use tallyd_mysql::maps::NotedMap;
use tallyd_mysql::partitions::Noted;
use tallyd_rabbitmq::{Broker, MapQueue};

/// The partitions in use.
pub(crate) struct InUse {
    /// All partitions in use, including those that this configuration adds.
    pub partitions: Partitions,
    /// All maps that are recorded in MySQL.
    pub maps: Vec<NotedMap>,
    /// The recorded count of partitions in MySQL; `None` if no daemon has ever run.
    pub noted: Option<Noted>,
}

impl InUse {
    /// Reads the partitions and maps that are recorded in MySQL.
    pub(crate) async fn read(store: &Store, broker: &Broker) -> Result<Self> {
        let noted = store.noted_partitions().await?;
        let count = noted.as_ref().map_or(0, |noted| noted.partitions).max(broker.partitions());
        let maps = store.noted_maps().await?;
        let of_maps = maps.iter().map(|map| (map.partition(), map.queue.clone()));
        let numbered = broker.numbered(count);
        let partitions = numbered.queues().map(|(number, queue)| (number, queue.to_owned())).chain(of_maps).collect();
        Ok(Self { partitions, maps, noted })
    }
}

/// Returns the queue of a map, with its exchange and binding keys.
pub(crate) fn queue_of(map: &Map, broker: &Broker) -> MapQueue {
    let (exchange, binding_keys) = (map.exchange.clone(), map.binding_keys.clone());
    MapQueue { queue: broker.map_queue(&map.name), exchange, binding_keys }
}

/// Returns the record of a map. The record is written to MySQL before the map's queue is bound.
pub(crate) fn noted(map: &Map, broker: &Broker, owner: &str) -> NotedMap {
    NotedMap {
        number: map.number,
        name: map.name.clone(),
        queue: broker.map_queue(&map.name),
        bindings: map.binding_keys.iter().map(|key| (map.exchange.clone(), key.clone())).collect(),
        noted_by: owner.to_owned(),
    }
}

/// Checks that no map uses the name, number or queue of a different map in use.
///
/// # Errors
/// Fails with [`ConfigError`]. The error's text has a sentence for each conflict. Also fails if MySQL fails.
pub(crate) async fn check_maps(config: &Config, store: &Store, broker: &Broker) -> Result<()> {
    let in_use = store.noted_maps().await?;
    let conflict = |map: &Map| noted(map, broker, "").conflict(&in_use);
    let problems: Vec<String> = config.maps.iter().filter_map(conflict).collect();
    if problems.is_empty() { Ok(()) } else { Err(ConfigError(problems).into()) }
}
