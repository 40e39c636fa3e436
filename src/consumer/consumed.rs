//! What a partition has consumed, said once a minute while anything comes.

use std::time::{Duration, Instant};

use tracing::info;

/// How often it is said.
const SAY_EVERY: Duration = Duration::from_secs(60);

/// Since it was last said.
#[derive(Default)]
pub(super) struct Consumed {
    said: Option<Instant>,
    pub batches: u64,
    pub events: u64,
    pub rows: u64,
    /// Events that carried their target's number in Redis.
    pub with_count: u64,
    /// Targets whose events told of a drift.
    pub drift_seen: u64,
}

impl Consumed {
    /// Says it, if it is time.
    pub(super) fn say(&mut self, partition: u16, now: Instant) {
        let said = *self.said.get_or_insert(now);
        if now.duration_since(said) < SAY_EVERY {
            return;
        }
        let Self { batches, events, rows, drift_seen, .. } = *self;
        let with_count_percent = self.with_count * 100 / events.max(1);
        let seconds = now.duration_since(said).as_secs();
        info!(
            event = "consumed",
            partition,
            events,
            batches,
            rows,
            with_count_percent,
            drift_seen,
            seconds,
            "{events} events in {batches} batches became {rows} rows in {seconds} s, {with_count_percent} % of them with a count"
        );
        *self = Self { said: Some(now), ..Self::default() };
    }
}
