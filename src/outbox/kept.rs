//! Decides which rows of the outboxes MySQL no longer needs.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use tallyd_core::outbox::OutboxOffsets;

/// A reconcile needs the rows between its sample of Redis and its read of MySQL, and reads within this time.
const KEPT: Duration = Duration::from_secs(600);

/// For several instants, oldest first: the last row of each partition that was in Redis.
#[derive(Default)]
pub(super) struct Kept(VecDeque<(Instant, OutboxOffsets)>);

impl Kept {
    /// The last rows that have been in Redis for at least `KEPT`. At `now`, the rows up to `noted` are in Redis.
    pub(super) fn over(&mut self, now: Instant, noted: &OutboxOffsets) -> OutboxOffsets {
        self.0.push_back((now, noted.clone()));
        let is_over = |(since, _): &(Instant, OutboxOffsets)| now.duration_since(*since) >= KEPT;
        while self.0.get(1).is_some_and(is_over) {
            self.0.pop_front();
        }
        self.0.front().filter(|oldest| is_over(oldest)).map(|(_, offsets)| offsets.clone()).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_kept_from_when_they_were_added() {
        let (began, mut kept) = (Instant::now(), Kept::default());
        let mut over = |after_s: u64, number: u64| {
            kept.over(began + Duration::from_secs(after_s), &OutboxOffsets::from_iter([(0, number)])).of(0)
        };
        assert_eq!([over(0, 5), over(300, 7), over(599, 9)], [0, 0, 0]);
        assert_eq!([over(600, 9), over(899, 9), over(900, 9), over(2_000, 12)], [5, 5, 7, 9]);
    }
}
