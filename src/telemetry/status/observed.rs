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
    pub queues: BTreeMap<u16, (u64, u64)>,
    pub returned: Option<u64>,
    pub owners: Vec<Owner>,
    pub noted_partitions: Option<u16>,
    pub outbox_rows: Option<u64>,
    pub jobs: Vec<Job>,
    pub reconciles: Vec<Reconciled>,
    pub last_reconciles: Vec<Reconciled>,
    pub boards: Vec<Board>,
    pub dead_letters: Option<BTreeMap<String, u64>>,
    /// Those of the fullest partition, divided by how many it can have.
    pub dead_letters_full: Option<f64>,
}

pub(crate) type Sight = watch::Receiver<Arc<Observed>>;
