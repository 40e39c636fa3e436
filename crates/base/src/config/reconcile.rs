//! `[reconcile]`: when runs are due, what they wait for, and how much they can change.

use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::Pause;

/// `[reconcile]`
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Reconcile {
    /// When to compare changed targets. Empty: never.
    pub changed_cron: String,
    /// When to recount all targets. Empty: never.
    pub full_cron: String,
    /// When to recount the next slice of all targets. Empty: never. For large tables instead of `full_cron`: `0 20 * *
    /// * *` recounts everything once a day at a steady cost.
    pub scrub_cron: String,
    /// Number of equal slices of all targets.
    #[schemars(range(min = 1, max = 10_000))]
    pub scrub_parts: u64,
    /// Clock of an event's `at`. With `[redis.also]` it is always `producer`.
    pub event_clock: EventClock,
    /// For `event_clock = "producer"`: largest clock difference to Redis, and longest time between setting `at` and
    /// counting. Runs skip a target if an event is closer than this to a comparison.
    pub clock_skew_max: Pause,
    /// Longest time between counting in Redis and publishing, with all retries. For recounts: longest time between a
    /// row and its event. At least twice `[amqp] timeout_ms`. Only recounts and reconciles of `writer = "api"` wait
    /// this long.
    pub publish_grace: Pause,
    /// Longest time that a run waits for a fence.
    pub fence_max: Pause,
    /// How far a `changed` run looks back from the last run's end, for publishes longer than `publish_grace`.
    pub overlap: Pause,
    /// Maximum rows of `counter` per page: one for each target, metric and partition. Each row takes about 200 bytes.
    #[schemars(range(min = 1, max = 1_000_000))]
    pub page_targets: usize,
    /// Milliseconds between pages. Larger values slow runs down.
    #[schemars(range(min = 0, max = 60_000))]
    pub pause_ms: u64,
    /// Runs wait while MySQL's `Threads_running` exceeds this. 0: never. Up to an eighth of this, a full run recounts two
    /// pages in parallel.
    pub threads_running_max: u64,
    /// Runs wait while Redis' latency exceeds these milliseconds. 0: never.
    pub redis_latency_max_ms: u64,
    /// Runs that need RabbitMQ wait while a partition's queue exceeds this number of messages. The clients' messages
    /// have up to 100 events each. 0: never.
    pub queue_depth_max: u64,
    /// MySQL replicas, as `HOST:PORT`. Runs wait while a replica lags more than `max_lag`. Account, database and
    /// options are those of `[mysql] url`. The account needs only SELECT.
    pub replicas: Vec<String>,
    /// Largest lag of a replica.
    pub max_lag: Pause,
    /// Safety limit: abort a run that would repair more than this percentage of the checked targets, and more than 100
    /// targets. `tallyd reconcile --force` ignores safety limits.
    #[schemars(range(min = 0, max = 100))]
    pub repair_targets_max_percent: u8,
    /// Safety limit: abort a run that would change one counter by more than this.
    #[schemars(range(min = 0, max = 1_i64 << 62))]
    pub repair_abs_max: i64,
    /// How often the daemon checks Redis for lost counters to load.
    pub watch_every: Pause,
}

/// A client of this project publishes an event within this time: it makes three attempts, each with 5 s to connect and
/// 5 s for the confirm. In the Rust client and the gateway, a publish lasts at most twice `[amqp] timeout_ms`, by
/// default 20 s.
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
            page_targets: 25_000,
            pause_ms: 0,
            threads_running_max: 64,
            redis_latency_max_ms: 100,
            queue_depth_max: 20_000,
            replicas: Vec::new(),
            max_lag: Pause::from_secs(10),
            repair_targets_max_percent: 5,
            repair_abs_max: 1_000_000,
            watch_every: Pause::from_secs(5),
        }
    }
}

impl Reconcile {
    /// Returns the margin around a cut (the instant of a sample). If an event's `at` is within this margin, it is
    /// unknown whether the event or the cut was first.
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
    /// Redis' clock, which lua/like.lua returns.
    Redis,
    /// The publishing machine's clock.
    Producer,
}
