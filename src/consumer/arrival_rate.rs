//! Measures how fast events arrive. Pure.

use std::time::{Duration, Instant};

/// From this rate on, batches wait for more events. Below, the database has a transaction for every few events, but such
/// a load is low.
const FAST_PER_MS: u128 = 2;

/// The rate is measured over at least this time, because single batches differ by chance.
const OVER: Duration = Duration::from_millis(100);

/// The rate of events. The rate does not depend on the size of batches, so waiting does not change the result.
#[derive(Debug)]
pub(super) struct ArrivalRate {
    /// Whether at least two events arrive per millisecond. True until the first measurement.
    pub is_fast: bool,
    since: Option<Instant>,
    events: usize,
}

impl Default for ArrivalRate {
    fn default() -> Self {
        Self { is_fast: true, since: None, events: 0 }
    }
}

impl ArrivalRate {
    pub(super) fn note(&mut self, events: usize, now: Instant) {
        self.events += events;
        let since = *self.since.get_or_insert(now);
        let took = now.saturating_duration_since(since);
        if took >= OVER {
            *self =
                Self { is_fast: self.events as u128 >= took.as_millis() * FAST_PER_MS, since: Some(now), events: 0 };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Notes batches of `events` every `ms` milliseconds for a second. Returns whether events arrive fast after each.
    fn notes(rate: &mut ArrivalRate, began: Instant, events: usize, ms: u64) -> Vec<bool> {
        let note = |at| {
            rate.note(events, began + Duration::from_millis(at));
            rate.is_fast
        };
        (0..1_000).step_by(usize::try_from(ms).unwrap()).map(note).collect()
    }

    #[test]
    fn the_rate_is_the_same_in_small_and_in_large_batches() {
        for (ms, is_fast) in [(2, false), (7, false), (2, true), (7, true)] {
            let began = Instant::now();
            let mut rate = ArrivalRate::default();
            let per_ms = if is_fast { 3 } else { 1 };
            let seen = notes(&mut rate, began, per_ms * usize::try_from(ms).unwrap(), ms);
            assert!(seen[..100 / usize::try_from(ms).unwrap()].iter().all(|is_fast| *is_fast), "{ms}");
            assert!(seen[120 / usize::try_from(ms).unwrap()..].iter().all(|it| *it == is_fast), "{ms}");
        }
    }

    #[test]
    fn after_a_pause_the_rate_is_low() {
        let mut rate = ArrivalRate::default();
        let began = Instant::now();
        assert!(notes(&mut rate, began, 100, 10).last().unwrap());
        rate.note(500, began + Duration::from_secs(60));
        assert!(!rate.is_fast);
    }
}
