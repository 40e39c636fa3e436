//! Which partitions are in use, over all daemons: by what they have noted in MySQL before the first event could come.

use anyhow::Result;

use tallyd_core::partition::Partitions;
use tallyd_mysql::Store;
use tallyd_mysql::partitions::Noted;
use tallyd_rabbitmq::Broker;

/// The partitions that are in use.
pub(crate) struct InUse {
    /// All of them, and those that this configuration will bring into use.
    pub partitions: Partitions,
    /// How many are noted; `None` where no daemon has ever run.
    pub noted: Option<Noted>,
}

impl InUse {
    /// Reads what is noted.
    pub(crate) async fn read(store: &Store, broker: &Broker) -> Result<Self> {
        let noted = store.noted_partitions().await?;
        let count = noted.as_ref().map_or(0, |noted| noted.partitions).max(broker.partitions());
        Ok(Self { partitions: broker.numbered(count), noted })
    }
}
