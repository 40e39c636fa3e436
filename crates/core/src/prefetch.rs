//! Calculates the prefetch from the sizes of messages and from the number of redeliveries. Pure: no I/O, no clock.
//!
//! The broker limits the number of messages and not their bytes, but a list of events can be a thousand times larger
//! than one event.
//!
//! A quorum queue counts how often each message is returned, and dead-letters a message after twenty returns. If one
//! message crashes the daemon, all messages that the daemon holds return to the queue, again and again. So after many
//! redeliveries the daemon reduces its prefetch, finally to one message. Then the daemon applies the other messages,
//! and only the message that crashes the daemon returns to the queue.

/// The prefetch while the size of messages is unknown.
const FIRST_PREFETCH: u16 = 200;

/// The smallest prefetch, for messages of any size. With a prefetch of two, the next message can arrive while the
/// daemon writes the first one.
pub const PREFETCH_MIN: u16 = 2;

/// If a session fails before it acknowledges a message, the next session's prefetch is divided by sixteen. The session
/// may have failed at a message that the AMQP library cannot read. For such a message, the daemon does not know how
/// often it was returned. After four failed sessions, even the largest prefetch is reduced to one message. If four
/// daemons receive from the queue in turn, sixteen sessions fail before each daemon's prefetch is one. Each failed
/// session also returns the readable messages that it received. The queue allows twenty returns of a message.
const FAILED_LEAVES: u16 = 16;

/// A partition's share of the prefetch is not smaller than this, because small batches cost more time per event.
const SHARE_MIN: u16 = 2_500;

/// Returns the prefetch of one partition: an equal share of the prefetch `configured` for `partitions` partitions. So a
/// daemon with several partitions does not need much more memory than a daemon with one.
pub fn share(configured: u16, partitions: u16) -> u16 {
    (configured / partitions.max(1)).max(configured.min(SHARE_MIN))
}

/// Measures the size of a partition's messages.
#[derive(Debug, Default)]
pub struct MessageSizes {
    /// The moving mean of the messages' sizes, in bytes. It is 0 before the first message.
    mean: usize,
}

impl MessageSizes {
    /// Includes a message's size in the moving mean.
    pub fn note(&mut self, bytes: usize) {
        self.mean = if self.mean == 0 { bytes.max(1) } else { (self.mean * 63 + bytes).div_ceil(64) };
    }

    /// Computes the mean size again after the received messages have needed too much memory. The new mean weights each
    /// message by its size, so that a few large messages raise the mean.
    pub fn learn(&mut self, sizes: impl Iterator<Item = usize>) {
        let sum = |(bytes, squares): (u128, u128), size| (bytes + size as u128, squares + (size as u128).pow(2));
        let (bytes, squares) = sizes.fold((0, 0), sum);
        if let Some(mean) = squares.checked_div(bytes) {
            self.mean = usize::try_from(mean).unwrap_or(usize::MAX).max(1);
        }
    }

    /// Returns how many messages can be in flight: at most `configured`, and only as many messages of the mean size as
    /// fit into `bytes_max` bytes.
    pub fn prefetch(&self, configured: u16, bytes_max: usize) -> u16 {
        match self.mean {
            0 => configured.min(FIRST_PREFETCH),
            mean => {
                u16::try_from(bytes_max / mean).unwrap_or(u16::MAX).clamp(PREFETCH_MIN, configured.max(PREFETCH_MIN))
            }
        }
    }
}

/// A limit on the prefetch, which the daemon sets after redeliveries. By default there is no limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PrefetchLimit(u16);

impl Default for PrefetchLimit {
    fn default() -> Self {
        Self(u16::MAX)
    }
}

impl PrefetchLimit {
    /// Returns `prefetch`, or the limit if `prefetch` is above the limit.
    pub fn of(self, prefetch: u16) -> u16 {
        self.0.min(prefetch)
    }

    /// Adapts the limit to the number of times that a message was returned. If the number is at most five, the limit
    /// grows by one.
    pub fn note(&mut self, returns: i64) {
        self.0 = match returns {
            // If hosts crash or daemons stop normally, a message can be returned up to five times.
            ..=5 => self.0.saturating_add(1),
            6..=10 => self.0.min(100),
            _ => 1,
        };
    }

    /// Lowers the limit after a session ended before it acknowledged a message. `prefetch` is this session's prefetch.
    pub fn failed(&mut self, prefetch: u16) {
        self.0 = (prefetch / FAILED_LEAVES).max(1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn large_messages_are_taken_in_smaller_numbers() {
        let mut sizes = MessageSizes::default();
        assert_eq!((sizes.prefetch(10_000, 1 << 25), sizes.prefetch(50, 1 << 25)), (200, 50));
        sizes.note(120);
        assert_eq!(sizes.prefetch(10_000, 1 << 25), 10_000);
        (0..1_000).for_each(|_| sizes.note(1 << 20));
        assert!((31..=33).contains(&sizes.prefetch(10_000, 1 << 25)), "{}", sizes.prefetch(10_000, 1 << 25));
        (0..1_000).for_each(|_| sizes.note(1 << 40));
        assert_eq!(sizes.prefetch(10_000, 1 << 25), 2);
    }

    #[test]
    fn partitions_share_the_prefetch_down_to_a_minimum() {
        let shares = [1, 2, 4, 8, 16].map(|partitions| share(20_000, partitions));
        assert_eq!(shares, [20_000, 10_000, 5_000, 2_500, 2_500]);
        assert_eq!((share(20, 4), share(0, 4), share(20_000, 0)), (20, 0, 20_000));
    }

    #[test]
    fn of_too_much_the_large_ones_are_what_is_learned() {
        let mut sizes = MessageSizes::default();
        sizes.learn([].into_iter());
        assert_eq!(sizes.prefetch(10_000, 1 << 25), 200, "nothing was seen");
        sizes.learn([120; 10_000].into_iter().chain([1 << 20; 64]));
        assert_eq!(sizes.prefetch(10_000, 1 << 25), 32);
        sizes.learn([120, 40 << 20, 40 << 20].into_iter());
        assert_eq!(sizes.prefetch(10_000, 1 << 25), PREFETCH_MIN);
    }

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

    /// RabbitMQ dead-letters a message that was returned more than twenty times.
    #[test]
    fn four_daemons_take_one_by_one_before_a_queue_drops_neighbours() {
        let (mut limit, mut with_neighbours) = (PrefetchLimit::default(), 0);
        while limit.of(u16::MAX) > 1 {
            with_neighbours += 1;
            limit.failed(limit.of(u16::MAX));
        }
        assert!(with_neighbours * 4 <= 20, "four daemons in turn must not return a message more than twenty times");
    }
}
