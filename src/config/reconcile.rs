//! `[reconcile]`: when runs are due, what they wait for, and what they may change.

use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::Pause;

/// `[reconcile]`
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Reconcile {
    /// When targets that changed are compared: a cron pattern of five or six fields; empty for never.
    pub changed_cron: String,
    /// When every target is recounted: a cron pattern of five or six fields; empty for never.
    pub full_cron: String,
    /// When the next slice of all targets is recounted: a cron pattern of five or six fields; empty for never.
    pub scrub_cron: String,
    /// How many slices all targets are.
    #[schemars(range(min = 1, max = 10_000))]
    pub scrub_parts: u64,
    /// Whose clock gives an event its `at`.
    pub event_clock: EventClock,
    /// How far a producer's clock may be from Redis' one.
    pub clock_skew_max: Pause,
    /// How long an API server's publish can take after the count in Redis, and a recount's event after its row.
    pub publish_grace: Pause,
    /// How long a fence may take through the partitions before the run gives up.
    pub fence_max: Pause,
    /// How far before the last run's cut `changed` begins, for publishes later than `publish_grace`.
    pub overlap: Pause,
    /// Rows of `counter` that are compared at one cut at most: about 200 bytes of memory each.
    #[schemars(range(min = 1, max = 1_000_000))]
    pub page_targets: usize,
    /// Milliseconds that a page should take: it is made as large as its measured time allows.
    #[schemars(range(min = 10, max = 60_000))]
    pub page_target_ms: u64,
    /// Milliseconds between two pages.
    #[schemars(range(min = 0, max = 60_000))]
    pub pause_ms: u64,
    /// A run waits while MySQL runs more threads than this; 0 for never.
    pub threads_running_max: u64,
    /// A run waits while Redis takes more milliseconds to answer; 0 for never.
    pub redis_latency_max_ms: u64,
    /// A run waits while a partition has more messages; 0 for never.
    pub queue_depth_max: u64,
    /// MySQL's replicas, as `host:port`: the account, the database and the options are those of `[mysql] url`.
    pub replicas: Vec<String>,
    /// A run waits while a replica is further behind.
    pub max_lag: Pause,
    /// A run stops before it repairs more than this percentage of the checked targets.
    #[schemars(range(min = 0, max = 100))]
    pub repair_targets_max_percent: u8,
    /// A run stops before it changes a counter by more.
    #[schemars(range(min = 0, max = 1_i64 << 62))]
    pub repair_abs_max: i64,
    /// How long each repair stays in the table `repair`, and each run in `job_run`.
    pub repair_keep: Pause,
    /// How often Redis is looked at for lost buckets.
    pub watch_every: Pause,
}

/// The longest of the clients here: three attempts, each with five seconds to connect and five for the confirm. The Rust client and the
/// gateway take twice `[amqp] timeout_ms`, by default 20 s.
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
    /// How close an event's `at` and a cut may be to each other and still not say which of them was first.
    pub fn skew(&self) -> Duration {
        match self.event_clock {
            EventClock::Redis => Duration::ZERO,
            EventClock::Producer => self.clock_skew_max.0,
        }
    }
}

/// Whose clock gives an event its `at`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum EventClock {
    /// Redis' own, as lua/like.lua returns it: a cut, told by the same clock, parts events exactly.
    Redis,
    /// The producer's machine's: within `clock_skew_max` of a cut it isn't known which was first.
    Producer,
}
