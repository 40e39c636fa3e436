//! Who writes the partition: the epoch that this session holds, checked against the partition's row in each transaction.

use sqlx::MySqlConnection;
use tracing::{debug, info};

use crate::telemetry::telemetry;
use tallyd_mysql::{Store, StoreError, partitions};

/// This session's hold on its partition.
pub(super) struct Ownership {
    partition: u16,
    /// This daemon: host and process.
    owner: String,
    /// `None` until the first batch is committed, because a standby must not take over.
    epoch: Option<u64>,
}

impl Ownership {
    pub fn new(partition: u16, owner: String) -> Self {
        Self { partition, owner, epoch: None }
    }

    /// Locks the partition's row, which a transaction does before anything else. Takes the partition with the first batch, and fails with
    /// `TakenOver` once another daemon has taken it.
    pub async fn lock(&self, tx: &mut MySqlConnection) -> Result<partitions::Ownership, StoreError> {
        let mut row = partitions::lock_owner(tx, self.partition).await?;
        if row.is_none() && self.epoch.is_none() {
            // A row that does not exist cannot be locked: two daemons would take the same epoch.
            partitions::make_owner(tx, self.partition).await?;
            row = partitions::lock_owner(tx, self.partition).await?;
        }
        match (row, self.epoch) {
            (Some(row), Some(ours)) if ours == row.epoch => Ok(row),
            (Some(row), None) => {
                let epoch = row.epoch + 1;
                partitions::take_partition(tx, self.partition, epoch, &self.owner).await?;
                Ok(partitions::Ownership { epoch, ..row })
            }
            _ => Err(StoreError::TakenOver(format!("partition {}", self.partition))),
        }
    }

    /// Notes that a transaction of this epoch is committed.
    pub fn committed(&mut self, epoch: u64) {
        let Self { partition, .. } = *self;
        telemetry().partition(partition).writes();
        if self.epoch.replace(epoch).is_none() {
            info!(event = "partition-taken", partition, epoch, "partition {partition} is written here now");
        }
    }

    /// Gives the partition back, after everything is written and the broker has the rest.
    pub async fn release(&self, store: &Store) {
        let Some(epoch) = self.epoch else { return };
        let released = async {
            let mut conn = store.acquire().await?;
            conn.limit("release the partition", |connection| {
                partitions::release_partition(connection, self.partition, epoch)
            })
            .await
        };
        if let Err(error) = released.await {
            debug!(event = "release-failed", partition = self.partition, "{:#}", anyhow::Error::from(error));
        }
    }
}
