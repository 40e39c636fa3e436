//! Detects a broker that has messages but does not deliver them. Pure: the current time is an argument.
//!
//! If a queue is deleted and quickly recreated, the new queue keeps the consumers of the old one (seen with RabbitMQ
//! 3.10), and those that have received a message receive nothing more. And a node that the network cuts off from the
//! others keeps its clients (always with 4.3); if it led the queue, it even answers that the queue is empty. So a session
//! that has received messages, holds none, and receives nothing for some time counts the messages in the queue, at its
//! own node and at another node. If two checks in a row find some, the session ends (decision 0011). A session that has
//! received nothing makes no checks, because another consumer may be the active one.

use std::time::{Duration, Instant};

/// Detects a broker that has messages but delivers none.
#[derive(Debug)]
pub struct StallDetector {
    /// The duration without a message after which the session checks the queue's depth, and the interval between two
    /// checks.
    every: Duration,
    /// The time of the last message or of the last check, whichever is later. `None` before the first message.
    since: Option<Instant>,
    had_messages: bool,
}

impl StallDetector {
    pub fn new(every: Duration) -> Self {
        Self { every, since: None, had_messages: false }
    }

    /// Records that a message arrived.
    pub fn received(&mut self, now: Instant) {
        (self.since, self.had_messages) = (Some(now), false);
    }

    pub fn is_due(&self, now: Instant) -> bool {
        self.since.is_some_and(|since| now.duration_since(since) >= self.every)
    }

    /// Records how many messages the queue has, or `None` if the broker does not know. Returns true if the broker has
    /// stalled.
    pub fn is_stalled(&mut self, messages: Option<u32>, now: Instant) -> bool {
        self.since = Some(now);
        let Some(messages) = messages else { return false };
        let had_before = std::mem::replace(&mut self.had_messages, messages > 0);
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
        let mut detector = StallDetector::new(Duration::from_secs(5));
        assert!(!detector.is_due(at(1_000)), "no message has arrived yet: another consumer may be the active one");
        detector.received(at(0));
        assert!(!detector.is_due(at(4)));
        assert!(detector.is_due(at(5)));
        assert!(!detector.is_stalled(Some(0), at(5)));
        assert!(!detector.is_stalled(Some(7), at(10)), "the seven messages may be in flight");
        assert!(!detector.is_due(at(14)));
        detector.received(at(14));
        assert!(!detector.is_stalled(Some(7), at(19)));
        assert!(!detector.is_stalled(None, at(24)), "an unknown depth proves nothing");
        assert!(detector.is_stalled(Some(7), at(29)));
    }
}
