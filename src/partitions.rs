//! Which partitions are in use, over all daemons: by what they have noted in MySQL before the first event could come.

use anyhow::Result;

use crate::config::{Config, ConfigError, Map};
use tallyd_core::partition::Partitions;
use tallyd_mysql::Store;
use tallyd_mysql::maps::NotedMap;
use tallyd_mysql::partitions::Noted;
use tallyd_rabbitmq::{Broker, MapQueue};

/// The partitions that are in use.
pub(crate) struct InUse {
    /// All of them, and those that this configuration will bring into use.
    pub partitions: Partitions,
    /// The maps that are noted.
    pub maps: Vec<NotedMap>,
    /// How many others are noted; `None` where no daemon has ever run.
    pub noted: Option<Noted>,
}

impl InUse {
    /// Reads what is noted.
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

/// The queue of a map, and where its messages come from.
pub(crate) fn queue_of(map: &Map, broker: &Broker) -> MapQueue {
    let (exchange, binding_keys) = (map.exchange.clone(), map.binding_keys.clone());
    MapQueue { queue: broker.map_queue(&map.name), exchange, binding_keys }
}

/// What is noted of a map before its queue is bound.
pub(crate) fn noted(map: &Map, broker: &Broker, owner: &str) -> NotedMap {
    NotedMap {
        number: map.number,
        name: map.name.clone(),
        queue: broker.map_queue(&map.name),
        bindings: map.binding_keys.iter().map(|key| (map.exchange.clone(), key.clone())).collect(),
        noted_by: owner.to_owned(),
    }
}

/// Checks that no map has a name, number or queue of another one that is in use.
///
/// # Errors
/// [`ConfigError`] with a sentence each; MySQL fails.
pub(crate) async fn check_maps(config: &Config, store: &Store, broker: &Broker) -> Result<()> {
    let in_use = store.noted_maps().await?;
    let conflict = |map: &Map| noted(map, broker, "").conflict(&in_use);
    let problems: Vec<String> = config.maps.iter().filter_map(conflict).collect();
    if problems.is_empty() { Ok(()) } else { Err(ConfigError(problems).into()) }
}
