//! Whether a broker that delivers nothing has nothing to deliver. Pure: "now" is an argument.
//!
//! RabbitMQ can stop delivering without an error: a queue that was deleted and made again within moments keeps the consumers of the former
//! queue (seen with 3.10), and messages to consumers that had received something are lost in flight. So a session that has received
//! messages, holds none and receives nothing for 5 s checks the queue's depth. If the queue isn't empty twice in a row, the session ends. A
//! consumer that waits for its turn has received nothing, and does not check.

use std::time::{Duration, Instant};

/// How long nothing comes before the queue's depth is checked, and between two checks.
const CHECK_EVERY: Duration = Duration::from_secs(5);

/// Detects a broker that has messages and delivers none.
#[derive(Debug, Default)]
pub struct StallDetector {
    /// When a message came or the depth was last checked; `None` until a message has come.
    since: Option<Instant>,
    /// The queue had messages at the last check.
    had_messages: bool,
}

impl StallDetector {
    /// A message came.
    pub fn received(&mut self, now: Instant) {
        *self = Self { since: Some(now), had_messages: false };
    }

    /// Whether it is time to check the queue's depth.
    pub fn is_due(&self, now: Instant) -> bool {
        self.since.is_some_and(|since| now.duration_since(since) >= CHECK_EVERY)
    }

    /// Notes how many messages the queue has. Returns whether they should have been delivered.
    pub fn is_stalled(&mut self, messages: u32, now: Instant) -> bool {
        let had_before = std::mem::replace(&mut self.had_messages, messages > 0);
        self.since = Some(now);
        had_before && self.had_messages
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
