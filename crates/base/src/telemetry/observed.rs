//! What the observer has read from the servers.
//!
//! Times are in microseconds since the epoch. [`Observed::at`] is the time of this data. An unreachable server has
//! `up: false` and the reason, and its last known data stays. If a daemon of another version does not send a field, the
//! field gets its default.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use tokio::sync::watch;

use super::{ReportedOutcome, Server, WaitsFor};
use tallyd_core::partition::Partitions;
use tallyd_mysql::maps::NotedMap;
use tallyd_mysql::partitions::Owner;

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ServerStatus {
    pub server: Server,
    pub up: bool,
    pub reason: Option<String>,
    pub since: i64,
    pub look_s: f64,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Job {
    pub job: String,
    pub mode: String,
    pub running: Option<ActiveRun>,
    pub last: Option<EndedRun>,
    pub last_success_at: Option<i64>,
    pub next_at: Option<i64>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ActiveRun {
    /// The run's number. All writes of the run contain this number as a fencing token.
    pub run: u64,
    pub owner: String,
    pub started_at: i64,
    /// Progress from 0 to 1. `None` if the progress is unknown, or if the run is in another process.
    pub progress: Option<f64>,
    pub waits: Option<WaitsFor>,
    pub waits_words: Option<String>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct EndedRun {
    pub run: u64,
    pub owner: String,
    pub started_at: i64,
    pub ended_at: i64,
    pub outcome: ReportedOutcome,
    pub reason: Option<String>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Reconciled {
    pub run: u64,
    pub mode: String,
    pub ended_at: i64,
    pub outcome: ReportedOutcome,
    pub checked: u64,
    pub drifted: u64,
    pub repaired: u64,
    /// Number of counters that were wrong only at the first measurement, because events were in flight.
    pub transient: u64,
    pub unknown: u64,
    /// Number of busy counters. The run had to capture their events to decide whether these counters are correct.
    pub busy: u64,
    pub exact: u64,
    /// Number of counters without a result: at each measurement, it was unknown whether an event was before or after
    /// the sample.
    pub undecided: u64,
    pub left: u64,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Board {
    /// The board's name. If the board has several period lengths, the length is appended: `likes`, `likes/week`.
    pub board: String,
    pub period: String,
    /// `open`, or `lost` if Redis has lost the current period since its snapshot.
    pub state: String,
    pub members: u64,
    pub ends_at: Option<i64>,
    /// Number of periods that Redis has lost since their snapshots, including the current period.
    pub lost: Vec<String>,
    /// Periods that are closed, past `archive_grace`, and not archived. Periods that Redis has lost are not included.
    pub unarchived: Vec<String>,
    pub oldest_unarchived_at: Option<i64>,
    pub archived: Option<(String, u64)>,
}

/// A status shows all fields that are not skipped.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Observed {
    #[serde(rename = "observed_at")]
    pub at: Option<i64>,
    pub servers: Vec<ServerStatus>,
    #[serde(skip)]
    pub queues: BTreeMap<u16, (u64, u64)>,
    #[serde(skip)]
    pub owners: Vec<Owner>,
    pub partitions_in_use: Option<u16>,
    /// Empty until MySQL has answered.
    #[serde(skip)]
    pub in_use: Partitions,
    #[serde(skip)]
    pub maps: Vec<NotedMap>,
    pub outbox_rows: Option<u64>,
    pub jobs: Vec<Job>,
    pub reconciles: Vec<Reconciled>,
    #[serde(skip)]
    pub last_reconciles: Vec<Reconciled>,
    pub boards: Vec<Board>,
    pub dead_letters: Option<BTreeMap<String, u64>>,
    pub dead_letters_full: Option<f64>,
    pub returned: Option<u64>,
}

pub type ObservedReceiver = watch::Receiver<Arc<Observed>>;
