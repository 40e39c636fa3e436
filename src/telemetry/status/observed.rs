//! What the observer has seen of the servers.

use std::collections::BTreeMap;
use std::sync::Arc;

use tokio::sync::watch;

use super::{Board, Job, Reconciled, ServerStatus};
use tallyd_core::model::Micros;
use tallyd_mysql::partitions::Owner;

/// How the servers, queues, jobs and boards stood when they were last asked. What has no answer yet is empty or `None`.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Observed {
    pub at: Option<Micros>,
    pub servers: Vec<ServerStatus>,
    /// Messages and consumers of each partition's queue.
    pub queues: BTreeMap<u16, (u64, u64)>,
    /// Messages in the queue of those that the broker has given up on.
    pub returned: Option<u64>,
    /// Who writes which partition.
    pub owners: Vec<Owner>,
    /// How many partitions are in use.
    pub noted_partitions: Option<u16>,
    /// Rows of the outbox that are not in Redis yet.
    pub outbox_rows: Option<u64>,
    pub jobs: Vec<Job>,
    /// The reconciler's last runs, the oldest first.
    pub reconciles: Vec<Reconciled>,
    /// The last one of each mode.
    pub last_reconciles: Vec<Reconciled>,
    pub boards: Vec<Board>,
    /// Open dead letters by reason.
    pub dead_letters: Option<BTreeMap<String, u64>>,
    /// Those of the fullest partition, divided by how many it can have.
    pub dead_letters_full: Option<f64>,
}

/// The last of what was seen.
pub(crate) type Sight = watch::Receiver<Arc<Observed>>;
