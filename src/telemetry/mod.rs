//! What the process knows of its own work: counts, times, what it waits for.
//!
//! Like the log it is the process's own, and can be written to from everywhere: tasks and what they stand on note what they
//! do, at once for each batch and not for each message, and nobody waits for anybody. Only [`crate::admin`],
//! [`crate::telemetry::status`] and the line for systemd read it. Nothing here decides anything.

mod job;
mod number;
pub mod observer;
mod process;
mod pulse;
pub mod status;
mod waits;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU8, Ordering};
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

pub use job::{JobRun, Jobs, Running, WaitsFor};
pub use number::{Buckets, Count, Histogram};
pub use process::Process;
pub use pulse::{POINT_EVERY, Point, Pulse};
pub use waits::{Wait, Waits};

use crate::model::Micros;
use crate::{broker, cache, store};

/// Seconds from an event's `at` to its commit: from a batch's linger to a day's backlog.
const LAG_BOUNDS: &[f64] = &[
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1_800.0, 7_200.0, 43_200.0,
    86_400.0,
];

/// Seconds of a step of a flush.
const STEP_BOUNDS: &[f64] =
    &[0.000_1, 0.000_25, 0.000_5, 0.001, 0.002_5, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0];

/// Events in a batch, of which `[consumer] batch_events_max` may be 10,000.
const BATCH_BOUNDS: &[f64] = &[1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1_000.0, 2_000.0, 5_000.0];

/// Numbers of some kinds, each kind with its name.
#[derive(Debug)]
pub struct Kinds<const N: usize> {
    names: [&'static str; N],
    counts: [Count; N],
}

impl<const N: usize> Kinds<N> {
    const fn new(names: [&'static str; N]) -> Self {
        Self { names, counts: [const { Count::new() }; N] }
    }

    /// Adds so many of that kind. A kind without a name is none.
    pub fn add(&self, name: &str, more: u64) {
        if let Some(place) = self.names.iter().position(|known| *known == name)
            && let Some(count) = self.counts.get(place)
        {
            count.add(more);
        }
    }

    /// So many of each.
    pub fn get(&self) -> impl Iterator<Item = (&'static str, u64)> + '_ {
        self.names.iter().copied().zip(self.counts.iter().map(Count::get))
    }
}

/// The steps of a flush, in their order: a connection, the partition's row, like records, counters, COMMIT, and the
/// acknowledgement.
pub const STEPS: [&str; 6] = ["lend", "lock", "rows", "counters", "commit", "acknowledge"];

/// The servers.
pub const SERVERS: [&str; 3] = ["mysql", "redis", "rabbitmq"];

/// All of it.
#[derive(Debug)]
pub struct Telemetry {
    /// When this process began to work.
    pub started_at: Micros,
    /// Told to stop: what is open is being written.
    pub draining: AtomicBool,
    /// The tasks run.
    pub working: AtomicBool,
    /// Reloads: taken, refused.
    pub reloads: Kinds<2>,
    /// The last one, where it was refused: when, and what is wrong.
    refused: Mutex<Option<(Micros, String)>>,
    /// Messages that the broker delivered.
    pub messages: Count,
    /// Of those, how many it had delivered before.
    pub redelivered: Count,
    /// Events in them. A reset is a set.
    pub received: Kinds<4>,
    /// Events whose effect is in MySQL.
    pub committed: Count,
    /// Of those, how many another event of the batch stood for.
    pub coalesced: Count,
    dead_letters: Mutex<BTreeMap<&'static str, u64>>,
    dead_letters_dropped: Mutex<BTreeMap<&'static str, u64>>,
    /// Batches by why they were closed.
    pub batches: Kinds<3>,
    /// Events in a batch.
    pub batch_events: Histogram,
    /// Seconds of each of [`STEPS`].
    pub steps: [Histogram; STEPS.len()],
    /// Seconds from an event's `at` to its commit.
    pub lag: Histogram,
    /// Batches that had to be written again, by why.
    pub retries: Kinds<5>,
    /// What the outbox has added to Redis.
    pub outbox_added: Count,
    /// Seconds from a row's transaction to Redis.
    pub outbox_lag: Histogram,
    went_back: Mutex<Option<Micros>>,
    /// What fails and is tried again.
    pub waits: Waits,
    /// Runs of jobs in this process.
    pub jobs: Jobs,
    /// The last hour.
    pub pulse: Pulse,
    bucket_fields: Mutex<BTreeMap<String, u64>>,
    partitions: Mutex<BTreeMap<u16, Arc<PartitionVitals>>>,
}

static VITALS: LazyLock<Telemetry> = LazyLock::new(|| Telemetry {
    started_at: Micros::now(),
    draining: AtomicBool::new(false),
    working: AtomicBool::new(false),
    reloads: Kinds::new(["taken", "refused"]),
    refused: Mutex::new(None),
    messages: Count::new(),
    redelivered: Count::new(),
    received: Kinds::new(["like", "unlike", "count", "set"]),
    committed: Count::new(),
    coalesced: Count::new(),
    dead_letters: Mutex::default(),
    dead_letters_dropped: Mutex::default(),
    batches: Kinds::new(["size", "linger", "stop"]),
    batch_events: Histogram::new(BATCH_BOUNDS),
    steps: STEPS.map(|_| Histogram::new(STEP_BOUNDS)),
    lag: Histogram::new(LAG_BOUNDS),
    retries: Kinds::new(["1213", "1205", "timeout", "connection", "other"]),
    outbox_added: Count::new(),
    outbox_lag: Histogram::new(LAG_BOUNDS),
    went_back: Mutex::new(None),
    waits: Waits::default(),
    jobs: Jobs::default(),
    pulse: Pulse::default(),
    bucket_fields: Mutex::default(),
    partitions: Mutex::default(),
});

/// This process's.
pub fn telemetry() -> &'static Telemetry {
    &VITALS
}

impl Telemetry {
    /// Those of a partition.
    pub fn partition(&self, number: u16) -> Arc<PartitionVitals> {
        Arc::clone(locked(&self.partitions).entry(number).or_default())
    }

    /// Those of all partitions.
    pub fn partitions(&self) -> Vec<(u16, Arc<PartitionVitals>)> {
        locked(&self.partitions).iter().map(|(number, it)| (*number, Arc::clone(it))).collect()
    }

    /// Notes how many fields the fullest bucket of a kind has that a run has seen.
    pub fn bucket_fields(&self, kind: &str, most: u64) {
        locked(&self.bucket_fields).insert(kind.to_owned(), most);
    }

    /// The same of every kind that a run has gone through.
    pub fn fullest_buckets(&self) -> BTreeMap<String, u64> {
        locked(&self.bucket_fields).clone()
    }

    /// Notes that a reload was taken, or refused for what is wrong.
    pub fn reloaded(&self, wrong: Option<String>) {
        self.reloads.add(if wrong.is_some() { "refused" } else { "taken" }, 1);
        *locked(&self.refused) = wrong.map(|wrong| (Micros::now(), wrong));
    }

    /// The last reload, where it was refused.
    pub fn refused(&self) -> Option<(Micros, String)> {
        locked(&self.refused).clone()
    }

    /// Notes that MySQL lacks what Redis has.
    pub fn mysql_went_back(&self) {
        *locked(&self.went_back) = Some(Micros::now());
    }

    /// When MySQL was last seen to lack what Redis has.
    pub fn mysql_went_back_at(&self) -> Option<Micros> {
        *locked(&self.went_back)
    }

    /// How many dead letters each reason made; those that made none are left out.
    pub fn dead_letters(&self) -> BTreeMap<&'static str, u64> {
        locked(&self.dead_letters).clone()
    }

    /// How many dead letters of each reason were counted and not kept; those that were none are left out.
    pub fn dropped_dead_letters(&self) -> BTreeMap<&'static str, u64> {
        locked(&self.dead_letters_dropped).clone()
    }

    /// Notes so many dead letters of that reason that were not kept.
    pub fn dead_letters_dropped(&self, reason: &'static str, count: u64) {
        *locked(&self.dead_letters_dropped).entry(reason).or_default() += count;
    }

    /// Notes a dead letter of that reason.
    pub fn dead_letter(&self, reason: &'static str) {
        *locked(&self.dead_letters).entry(reason).or_default() += 1;
    }

    /// Connections that were opened.
    pub fn opened(&self) -> impl Iterator<Item = (&'static str, u64)> {
        let opened = [store::connections_opened(), cache::connections_opened(), broker::connections_opened()];
        SERVERS.into_iter().zip(opened)
    }

    /// Notes how long a step took.
    pub fn step(&self, step: &str, seconds: f64) {
        if let Some(place) = STEPS.iter().position(|known| *known == step)
            && let Some(histogram) = self.steps.get(place)
        {
            histogram.add(seconds);
        }
    }
}

fn locked<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// How a partition's consumer stands.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub enum Standing {
    /// It connects, or waits for a server.
    #[default]
    Connecting = 0,
    /// It listens; the broker gives the messages to whom it likes, and this process has written none since.
    Listening = 1,
    /// It has written, and the partition is its own.
    Writing = 2,
    /// It has ended.
    Stopped = 3,
}

impl Standing {
    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Connecting => "connecting",
            Self::Listening => "listening",
            Self::Writing => "writing",
            Self::Stopped => "stopped",
        }
    }
}

/// What is known of a partition's consumer.
#[derive(Debug, Default)]
pub struct PartitionVitals {
    standing: AtomicU8,
    /// When the oldest message came that is not acknowledged; 0 where there is none.
    oldest: AtomicI64,
}

impl PartitionVitals {
    /// It stands so from now on.
    pub fn stands(&self, standing: Standing) {
        self.standing.store(standing as u8, Ordering::Relaxed);
    }

    /// It has written a batch.
    pub fn writes(&self) {
        let _ = self.standing.compare_exchange(
            Standing::Listening as u8,
            Standing::Writing as u8,
            Ordering::Relaxed,
            Ordering::Relaxed,
        );
    }

    /// How it stands.
    pub fn standing(&self) -> Standing {
        match self.standing.load(Ordering::Relaxed) {
            0 => Standing::Connecting,
            1 => Standing::Listening,
            2 => Standing::Writing,
            _ => Standing::Stopped,
        }
    }

    /// When the oldest message came that is not acknowledged.
    pub fn oldest(&self, came: Option<Micros>) {
        self.oldest.store(came.map_or(0, |came| came.0), Ordering::Relaxed);
    }

    /// Seconds since the oldest message came that is not acknowledged; 0 where there is none.
    pub fn oldest_s(&self, now: Micros) -> f64 {
        match self.oldest.load(Ordering::Relaxed) {
            0 => 0.0,
            came => (now.0 - came).max(0) as f64 / 1e6,
        }
    }
}
