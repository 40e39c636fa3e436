//! `[reconcile]`: when runs are due, what they wait for, and how much they can change.

use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::Pause;

/// `[reconcile]`
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Reconcile {
    /// When to compare changed targets, as a cron pattern. Empty: never.
    pub changed_cron: String,
    /// When to recount all targets, as a cron pattern. Empty: never.
    pub full_cron: String,
    /// When to recount the next slice of all targets, as a cron pattern. Empty: never. Use it for large tables instead
    /// of `full_cron`: `0 20 * * * *` recounts everything once a day at a low, steady cost.
    pub scrub_cron: String,
    /// Number of slices for `scrub_cron` (1 to 10000). The slices have about the same size, by the server's statistics.
    #[schemars(range(min = 1, max = 10_000))]
    pub scrub_parts: u64,
    /// The clock that sets an event's `at`: Redis, or the API servers that publish. With `[redis.also]` it is always
    /// `producer`.
    pub event_clock: EventClock,
    /// Largest difference between a producer's clock and Redis' clock, and longest time between setting `at` and
    /// counting. Used only with `event_clock = "producer"`. The daemon skips a target while it has an event so close to
    /// the instant of a comparison.
    pub clock_skew_max: Pause,
    /// How long an API server can take to publish an event after it counted in Redis, with all retries. In a recount:
    /// the longest time between a row and its event. At least twice `[amqp] timeout_ms`. Only runs on numbers with
    /// `writer = "api"` and recounts wait for it.
    pub publish_grace: Pause,
    /// Time limit of a fence through the partitions. Then the run aborts.
    pub fence_max: Pause,
    /// How far before the last run's end a run of changed targets begins. It covers publishes that took longer than
    /// `publish_grace`.
    pub overlap: Pause,
    /// Most rows of `counter` per page (1 to 1000000): one for each target, metric and partition. Each takes about 200
    /// bytes of memory.
    #[schemars(range(min = 1, max = 1_000_000))]
    pub page_targets: usize,
    /// Milliseconds that a page should take (10 to 60000). The daemon adapts the page size to the measured time.
    #[schemars(range(min = 10, max = 60_000))]
    pub page_target_ms: u64,
    /// Milliseconds between two pages (0 to 60000). Raise it for a slow, fixed pace.
    #[schemars(range(min = 0, max = 60_000))]
    pub pause_ms: u64,
    /// A run waits while MySQL runs more threads than this (`Threads_running`). 0: never.
    pub threads_running_max: u64,
    /// A run waits while Redis takes longer than this to answer, in milliseconds. 0: never.
    pub redis_latency_max_ms: u64,
    /// A run waits while a partition has more messages than this. 0: never.
    pub queue_depth_max: u64,
    /// MySQL replicas, as `HOST:PORT`. A run waits while one of them lags more than `max_lag`. Account, database and
    /// options are those of `[mysql] url`; the account needs only SELECT.
    pub replicas: Vec<String>,
    /// Largest lag of a replica in `replicas`. tallyd measures it with a time stamp that each run writes.
    pub max_lag: Pause,
    /// Safety limit: abort a run, before it changes anything, if it would repair more than this percentage of the
    /// checked targets (0 to 100). Up to 100 targets are always allowed. `tallyd reconcile --force` ignores the limit.
    #[schemars(range(min = 0, max = 100))]
    pub repair_targets_max_percent: u8,
    /// Safety limit: abort a run, before it changes anything, if it would change one counter by more than this.
    #[schemars(range(min = 0, max = 1_i64 << 62))]
    pub repair_abs_max: i64,
    /// How long the tables `repair` and `job_run` keep their rows.
    pub repair_keep: Pause,
    /// How often the daemon checks whether Redis lost counters (a flush, an empty replica promoted). It loads lost
    /// counters again.
    pub watch_every: Pause,
}

/// The longest time that a client of this project takes: three attempts, each with 5 s to connect and 5 s for the
/// confirm. The Rust client and the gateway take twice `[amqp] timeout_ms`, by default 20 s.
const PUBLISH_GRACE: Pause = Pause::from_secs(3 * (5 + 5));

impl Default for Reconcile {
    fn default() -> Self {
        Self {
            changed_cron: "0 */5 * * * *".to_owned(),
            full_cron: "0 30 4 * * *".to_owned(),
            scrub_cron: String::new(),
            scrub_parts: 24,
            event_clock: EventClock::Redis,
            clock_skew_max: Pause::from_secs(1),
            publish_grace: PUBLISH_GRACE,
            fence_max: Pause::from_secs(60),
            overlap: Pause::from_secs(900),
            page_targets: 100_000,
            page_target_ms: 1_000,
            pause_ms: 0,
            threads_running_max: 64,
            redis_latency_max_ms: 100,
            queue_depth_max: 200_000,
            replicas: Vec::new(),
            max_lag: Pause::from_secs(10),
            repair_targets_max_percent: 5,
            repair_abs_max: 1_000_000,
            repair_keep: Pause::from_secs(90 * 86_400),
            watch_every: Pause::from_secs(5),
        }
    }
}

impl Reconcile {
    /// If an event's `at` and a cut are closer than this, their order is unknown.
    pub fn skew(&self) -> Duration {
        match self.event_clock {
            EventClock::Redis => Duration::ZERO,
            EventClock::Producer => self.clock_skew_max.0,
        }
    }
}

/// The clock that sets an event's `at`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum EventClock {
    /// Redis' clock: lua/like.lua returns it. A cut by the same clock separates events exactly.
    Redis,
    /// The clock of the publishing machine. Within `clock_skew_max` of a cut, the order is unknown.
    Producer,
}
