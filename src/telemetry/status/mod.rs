//! How a daemon stands, in one object: what the status page, `GET /v1/status` and `tallyd status` show.
//!
//! Times are in microseconds since the epoch. What a server was asked for is as old as [`Status::observed_at`] says; a
//! server that is away leaves what was known of it as it was, and is `up: false` with its reason. What a daemon of another
//! version doesn't tell is read as nothing.

mod tell;
mod text;
mod trouble;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

pub use crate::telemetry::Point;
pub use text::{Text, printable};
pub use trouble::Trouble;

/// A daemon.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Status {
    /// tallyd's version.
    pub version: String,
    /// Host and process: what holds a lock or a partition.
    pub owner: String,
    /// When the process began to work.
    pub started_at: i64,
    /// When this was told, by the daemon's clock.
    pub now: i64,
    /// `starting`, `running` or `draining`.
    pub state: State,
    /// Whether events are written: what `/readyz` says.
    pub ready: bool,
    /// Why not, a sentence for each reason.
    pub not_ready: Vec<String>,
    /// What somebody should look at, the worst first.
    pub troubles: Vec<Trouble>,
    /// The last reload, where it was refused: when, and what is wrong with the configuration.
    pub reload_refused: Option<(i64, String)>,
    /// The last ten seconds.
    pub rate: Option<Point>,
    /// Events whose effect this process has committed.
    pub events_committed: u64,
    /// Bytes of memory.
    pub memory_bytes: u64,
    /// When the servers were last asked.
    pub observed_at: Option<i64>,
    /// MySQL, Redis, RabbitMQ.
    pub servers: Vec<Server>,
    /// By number: those of this daemon's configuration, and more where other daemons have more.
    pub partitions: Vec<Partition>,
    /// How many are in use, over all daemons.
    pub partitions_in_use: Option<u16>,
    /// Rows of the outbox that are not in Redis yet.
    pub outbox_rows: Option<u64>,
    /// When MySQL was last seen to lack what Redis has: it went back to an older state.
    pub mysql_went_back_at: Option<i64>,
    /// Every job and mode that is configured.
    pub jobs: Vec<Job>,
    /// The last runs of the reconciler, the oldest first: drift over time.
    pub reconciles: Vec<Reconciled>,
    /// Those that are configured.
    pub boards: Vec<Board>,
    /// Open dead letters by reason.
    pub dead_letters: Option<BTreeMap<String, u64>>,
    /// Those of the fullest partition, by how many it may have: 1 is full.
    pub dead_letters_full: Option<f64>,
    /// Messages in the queue of what the broker has given up on.
    pub returned: Option<u64>,
    /// What fails now and is tried again.
    pub waits: Vec<Wait>,
}

/// Where a daemon is in its life.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum State {
    /// It waits for MySQL, to compare its names.
    #[default]
    Starting,
    /// The tasks run.
    Running,
    /// It was told to stop.
    Draining,
}

/// A server.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Server {
    /// `mysql`, `redis` or `rabbitmq`.
    pub server: String,
    /// It answers.
    pub up: bool,
    /// Why it doesn't.
    pub reason: Option<String>,
    /// Since when it has been so.
    pub since: i64,
    /// Seconds that it took to answer the last time.
    pub look_s: f64,
}

/// A partition.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Partition {
    /// Its number.
    pub partition: u16,
    /// Its queue.
    pub queue: String,
    /// Here: `connecting`, `listening` (the broker gives the messages to another daemon, or there were none), `writing`
    /// or `stopped`; `elsewhere` of one that this daemon's configuration doesn't have.
    pub standing: String,
    /// Who wrote it last and has not given it back, over all daemons.
    pub owner: Option<String>,
    /// How often it was taken, by any daemon; none where it never was.
    pub epoch: Option<u64>,
    /// When it was taken the last time.
    pub taken_at: Option<i64>,
    /// Messages that wait in its queue.
    pub messages: Option<u64>,
    /// Its consumers, over all daemons.
    pub consumers: Option<u64>,
    /// Seconds since the oldest message came here that is not acknowledged.
    pub oldest_unacked_s: f64,
}

/// A job's mode, over all daemons and shells.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Job {
    /// Its name: `reconcile`.
    pub job: String,
    /// Its mode: `full`.
    pub mode: String,
    /// Who runs it now.
    pub running: Option<Run>,
    /// How its last run ended.
    pub last: Option<Ended>,
    /// When a run of it was last done.
    pub last_success_at: Option<i64>,
    /// When the next one is due by its schedule.
    pub next_at: Option<i64>,
}

/// A run that is under way.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Run {
    /// Its number, which all that it writes is fenced by.
    pub run: u64,
    /// Host and process.
    pub owner: String,
    /// Since when.
    pub started_at: i64,
    /// How much is done, from 0 to 1; none where nobody knows, or it runs elsewhere.
    pub progress: Option<f64>,
    /// What it waits for: `fence` or `pace`.
    pub waits: Option<String>,
    /// The same in words.
    pub waits_words: Option<String>,
}

/// A run that has ended.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Ended {
    /// Its number.
    pub run: u64,
    /// Host and process.
    pub owner: String,
    /// When it began.
    pub started_at: i64,
    /// When it ended.
    pub ended_at: i64,
    /// `done`, `failed`, `braked`, `refused` or `stopped`.
    pub outcome: String,
    /// Why it failed, or ended early.
    pub reason: Option<String>,
}

/// What a run of the reconciler found.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Reconciled {
    /// Its number.
    pub run: u64,
    /// Its mode.
    pub mode: String,
    /// When it ended.
    pub ended_at: i64,
    /// `done`, `failed`, `braked`, `refused` or `stopped`.
    pub outcome: String,
    /// Counters that were compared.
    pub checked: u64,
    /// Of those, how many had drifted.
    pub drifted: u64,
    /// Of those, how many were repaired.
    pub repaired: u64,
    /// Off at the first look alone: events on the way.
    pub transient: u64,
    /// In buckets that nobody has loaded.
    pub unknown: u64,
    /// Judged by watching their events.
    pub busy: u64,
}

/// A board.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Board {
    /// Its name, and with several lengths of period its period's length: `likes`, `likes/week`.
    pub board: String,
    /// The current period.
    pub period: String,
    /// `open`, or `lost`: Redis has lost it since its snapshot.
    pub state: String,
    /// Its members.
    pub members: u64,
    /// When the period ends; none of one that never does.
    pub ends_at: Option<i64>,
    /// Periods that Redis has lost since their snapshots, the current one among them.
    pub lost: Vec<String>,
    /// Periods that are closed, past `archive_grace`, and not archived; not those that Redis has lost.
    pub unarchived: Vec<String>,
    /// The end of the oldest of them.
    pub oldest_unarchived_at: Option<i64>,
    /// The last period that is archived, and its rows.
    pub archived: Option<(String, u64)>,
}

/// Something that fails and is tried again.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Wait {
    /// What.
    pub what: String,
    /// Why it failed the last time.
    pub reason: String,
    /// Since when.
    pub since: i64,
    /// How often it was tried.
    pub tries: u64,
}
