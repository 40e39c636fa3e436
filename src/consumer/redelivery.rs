//! How many messages are taken at once, by how often they were redelivered. Pure: no I/O, no clock.
//!
//! A quorum queue counts each message's returns and dead-letters it after twenty. A daemon that crashes on one message returns all messages
//! that it holds, again and again. So messages that were redelivered often are taken in small numbers, in the end one by one, and the
//! neighbours of the message that crashes the daemon go through.

/// A session that failed before it acknowledged anything leaves the next one a sixteenth of its prefetch: it may have failed at a message that
/// the library cannot read, so that its count of returns is not seen. From the largest prefetch, four sessions lead to one message at a
/// time. Four daemons that get the queue by turns then return neighbours sixteen times, and the limit is twenty.
const FAILED_LEAVES: u16 = 16;

/// How many messages are taken at once. There is no limit by default.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PrefetchLimit(u16);

impl Default for PrefetchLimit {
    fn default() -> Self {
        Self(u16::MAX)
    }
}

impl PrefetchLimit {
    /// The prefetch under this limit.
    pub fn of(self, prefetch: u16) -> u16 {
        self.0.min(prefetch)
    }

    /// Notes how often a message came back. The limit grows by one with each message that did not come back often.
    pub fn note(&mut self, returns: i64) {
        self.0 = match returns {
            // Crashes of hosts and orderly stops explain this many.
            ..=5 => self.0.saturating_add(1),
            6..=10 => self.0.min(100),
            _ => 1,
        };
    }

    /// Notes a session that took `prefetch` and ended before anything was acknowledged.
    pub fn failed(&mut self, prefetch: u16) {
        self.0 = (prefetch / FAILED_LEAVES).max(1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_came_back_often_is_taken_in_small_portions() {
        let mut limit = PrefetchLimit::default();
        for (returns, taken) in [(0, 5_000), (5, 5_000), (6, 100), (0, 101), (10, 100), (11, 1), (6, 1), (0, 2), (5, 3)]
        {
            limit.note(returns);
            assert_eq!(limit.of(5_000), taken, "after {returns}");
        }
        assert_eq!(limit.of(2), 2);
        (0..5_000).for_each(|_| limit.note(0));
        assert_eq!(limit.of(5_000), 5_000);
    }

    /// RabbitMQ dead-letters what came back more than twenty times.
    #[test]
    fn four_daemons_take_one_by_one_before_a_queue_drops_neighbours() {
        let (mut limit, mut with_neighbours) = (PrefetchLimit::default(), 0);
        while limit.of(u16::MAX) > 1 {
            with_neighbours += 1;
            limit.failed(limit.of(u16::MAX));
        }
        assert!(with_neighbours * 4 <= 20, "of one daemon, whenever the others have their turns");
    }
}
