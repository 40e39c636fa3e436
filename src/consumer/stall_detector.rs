//! Whether a broker that sends nothing has nothing. Pure: "now" is an argument.
//!
//! RabbitMQ can stop delivering without a word: a queue that was deleted and made again within moments keeps the consumers of the former
//! one (seen with 3.10), and what it sends to those that had got something is thrown away on the way. So who got something, holds nothing
//! and hears nothing asks now and then how long the queue is; if it isn't empty, twice in a row, the session is begun anew. Whoever only
//! waits for its turn has got nothing, and doesn't ask.

use std::time::Duration;

use tokio::time::Instant;

/// How long it is silent before it is asked, and before it is asked again.
const ASKED_EVERY: Duration = Duration::from_secs(5);

#[derive(Debug, Default)]
pub(super) struct StallDetector {
    /// When something came, or it was last asked; none until something has come.
    since: Option<Instant>,
    /// The queue had messages when it was last asked.
    is_odd: bool,
}

impl StallDetector {
    /// A message came.
    pub(super) fn received(&mut self, now: Instant) {
        *self = Self { since: Some(now), is_odd: false };
    }

    /// Whether to ask how long the queue is.
    pub(super) fn is_due(&self, now: Instant) -> bool {
        self.since.is_some_and(|since| now.duration_since(since) >= ASKED_EVERY)
    }

    /// So many messages wait in the queue: whether they should have come.
    pub(super) fn is_stalled(&mut self, messages: u32, now: Instant) -> bool {
        let was_odd = std::mem::replace(&mut self.is_odd, messages > 0);
        self.since = Some(now);
        was_odd && self.is_odd
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_broker_has_stalled_when_a_queue_twice_has_messages_that_do_not_come() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut detector = StallDetector::default();
        assert!(!detector.is_due(at(1_000)), "nothing has come yet: it may be another one's turn");
        detector.received(at(0));
        assert!(!detector.is_due(at(4)));
        assert!(detector.is_due(at(5)));
        assert!(!detector.is_stalled(0, at(5)));
        assert!(!detector.is_stalled(7, at(10)), "they may be on the way");
        assert!(!detector.is_due(at(14)));
        detector.received(at(14));
        assert!(!detector.is_stalled(7, at(19)));
        assert!(detector.is_stalled(7, at(24)));
    }
}
