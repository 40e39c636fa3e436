//! Calculates how many messages a session receives, and how many it writes together, from the sizes of messages and from
//! the number of their returns. Pure: no I/O, no clock.
//!
//! The broker limits the number of messages and not their bytes, but a list of events can be a thousand times larger
//! than one event (decision 0008).
//!
//! A quorum queue counts how often each message is returned, and dead-letters a message after twenty returns. If one
//! message crashes the daemon, all messages that the daemon holds return to the queue, again and again. So a daemon
//! starts with a prefetch of one message, and keeps it while the messages were returned often (decision 0012). Where
//! such a message arrives among others, the daemon writes it alone. It does not return the others for that: this would
//! count as much as a crash, and would also bring them behind the bad message.

/// The prefetch of a daemon's first session. A daemon that has just started does not know the size of messages. It also
/// does not know whether its predecessor died of a message that is still in the queue. If the first session received
/// more messages and returned them, they could come behind the deadly message again and again, until the queue drops
/// them.
const FIRST_PREFETCH: u16 = 1;

/// The smallest prefetch, for messages of any size. With a prefetch of two, the next message can arrive while the
/// daemon writes the first one.
const PREFETCH_MIN: u16 = 2;

/// A session takes at least this many messages before it ends for another prefetch, because a new session needs as much
/// time as these messages one by one.
const SEEN_MIN: u16 = 10;

/// After this many messages in a row that may be written together, the limit on the prefetch ends.
const CALM_MESSAGES: u16 = 500;

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

/// Limits on the messages that a session receives and has not acknowledged.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// The number of messages.
    pub messages: u16,
    /// The bytes of all messages. The daemon estimates them from the mean size of the last messages.
    pub bytes: usize,
}

/// Measures the size of a partition's messages.
#[derive(Debug, Default)]
struct MessageSizes {
    /// The moving mean of the messages' sizes, in bytes. It is 0 before the first message.
    mean: usize,
}

impl MessageSizes {
    /// Includes a message's size in the moving mean.
    fn note(&mut self, bytes: usize) {
        self.mean = if self.mean == 0 { bytes.max(1) } else { (self.mean * 63 + bytes).div_ceil(64) };
    }

    /// Computes the mean size again after the received messages have needed too much memory. The new mean weights each
    /// message by its size, so that a few large messages raise the mean.
    fn learn(&mut self, sizes: impl Iterator<Item = usize>) {
        let sum = |(bytes, squares): (u128, u128), size| (bytes + size as u128, squares + (size as u128).pow(2));
        let (bytes, squares) = sizes.fold((0, 0), sum);
        if let Some(mean) = squares.checked_div(bytes) {
            self.mean = usize::try_from(mean).unwrap_or(usize::MAX).max(1);
        }
    }

    /// Returns how many messages can be in flight.
    fn prefetch(&self, limits: Limits) -> u16 {
        match self.mean {
            0 => limits.messages.min(FIRST_PREFETCH),
            mean => {
                let most = limits.messages.max(PREFETCH_MIN);
                u16::try_from(limits.bytes / mean).unwrap_or(u16::MAX).clamp(PREFETCH_MIN, most)
            }
        }
    }
}

/// Returns how many messages can be written together, if one of them was returned so often. If hosts crash or daemons
/// stop normally, a message can be returned up to five times.
pub fn portion(returns: i64) -> u16 {
    match returns {
        ..=5 => u16::MAX,
        6..=10 => 100,
        _ => 1,
    }
}

/// The prefetch of one partition's sessions, and what the daemon has learned from the messages of earlier sessions.
#[derive(Debug)]
pub struct Prefetch {
    sizes: MessageSizes,
    /// Limits the prefetch after messages that were returned often, and after sessions that failed.
    limit: u16,
    /// How many messages in a row may be written together with any number of others.
    calm: u16,
    /// The prefetch of the present session.
    messages: u16,
    /// The number of messages since the prefetch was last compared with the wanted one.
    seen: u16,
}

impl Default for Prefetch {
    fn default() -> Self {
        Self { sizes: MessageSizes::default(), limit: u16::MAX, calm: 0, messages: 0, seen: 0 }
    }
}

impl Prefetch {
    /// Returns the prefetch that the next session should have.
    pub fn wanted(&self, limits: Limits) -> u16 {
        self.limit.min(self.sizes.prefetch(limits))
    }

    /// Begins a session, and returns its prefetch.
    pub fn begin(&mut self, limits: Limits) -> u16 {
        (self.messages, self.seen) = (self.wanted(limits), 0);
        self.messages
    }

    /// Includes a message that will be written: how often it was returned, and its size.
    pub fn note(&mut self, returns: i64, bytes: usize) {
        self.sizes.note(bytes);
        self.seen = self.seen.saturating_add(1);
        let portion = portion(returns);
        if portion < u16::MAX {
            (self.limit, self.calm) = (self.limit.min(portion), 0);
        } else if self.calm < CALM_MESSAGES {
            self.calm += 1;
        } else {
            self.limit = u16::MAX;
        }
    }

    /// Returns true if the session should end, because another prefetch would suit the messages much better. This is
    /// checked once after each `prefetch` messages. A session that holds messages that were returned often does not end
    /// for that, because its end would return them once more.
    pub fn is_off(&mut self, limits: Limits) -> bool {
        if self.seen < self.messages.max(SEEN_MIN) {
            return false;
        }
        self.seen = 0;
        let by_size = self.sizes.prefetch(limits);
        let wanted = self.limit.min(by_size);
        let is_too_low = wanted / 2 > self.messages || (wanted >= PREFETCH_MIN && self.messages < PREFETCH_MIN);
        is_too_low || self.messages / 2 > by_size
    }

    /// Returns true if the messages that the session holds are too large for its prefetch, and the prefetch can be
    /// lowered. `bytes` are all their bytes, and `sizes` the size of each.
    pub fn is_overfull(&mut self, bytes: usize, limits: Limits, sizes: impl Iterator<Item = usize>) -> bool {
        let is_overfull = bytes > limits.bytes.saturating_mul(2) && self.messages > PREFETCH_MIN;
        if is_overfull {
            self.sizes.learn(sizes);
        }
        is_overfull
    }

    /// Lowers the limit after a session ended before it acknowledged a message.
    pub fn failed(&mut self) {
        (self.limit, self.calm) = ((self.messages / FAILED_LEAVES).max(1), 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limits(messages: u16) -> Limits {
        Limits { messages, bytes: 1 << 25 }
    }

    #[test]
    fn large_messages_are_taken_in_smaller_numbers() {
        let mut sizes = MessageSizes::default();
        assert_eq!((sizes.prefetch(limits(10_000)), sizes.prefetch(limits(0))), (1, 0));
        sizes.note(120);
        assert_eq!(sizes.prefetch(limits(10_000)), 10_000);
        (0..1_000).for_each(|_| sizes.note(1 << 20));
        assert!((31..=33).contains(&sizes.prefetch(limits(10_000))), "{}", sizes.prefetch(limits(10_000)));
        (0..1_000).for_each(|_| sizes.note(1 << 40));
        assert_eq!(sizes.prefetch(limits(10_000)), 2);
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
        assert_eq!(sizes.prefetch(limits(10_000)), FIRST_PREFETCH, "nothing was seen");
        sizes.learn([120; 10_000].into_iter().chain([1 << 20; 64]));
        assert_eq!(sizes.prefetch(limits(10_000)), 32);
        sizes.learn([120, 40 << 20, 40 << 20].into_iter());
        assert_eq!(sizes.prefetch(limits(10_000)), PREFETCH_MIN);
    }

    #[test]
    fn what_came_back_often_is_taken_in_small_portions() {
        let mut prefetch = Prefetch::default();
        for (returns, taken) in [(0, 5_000), (5, 5_000), (6, 100), (0, 100), (10, 100), (11, 1), (6, 1), (0, 1)] {
            prefetch.note(returns, 120);
            assert_eq!(prefetch.wanted(limits(5_000)), taken, "after {returns}");
        }
        (0..CALM_MESSAGES).for_each(|_| prefetch.note(5, 120));
        assert_eq!(prefetch.wanted(limits(5_000)), 5_000);
    }

    #[test]
    fn a_prefetch_of_one_message_ends_although_two_are_the_most() {
        for (most, bytes) in [(2, 120), (3, 120), (5_000, 1 << 25)] {
            let mut prefetch = Prefetch::default();
            assert_eq!(prefetch.begin(limits(most)), 1);
            (0..SEEN_MIN).for_each(|_| prefetch.note(0, bytes));
            assert!(prefetch.is_off(limits(most)), "{most} messages of {bytes} bytes");
            assert_eq!(prefetch.begin(limits(most)), prefetch.sizes.prefetch(limits(most)));
        }
    }

    /// RabbitMQ dead-letters a message that was returned more than twenty times.
    #[test]
    fn four_daemons_take_one_by_one_before_a_queue_drops_neighbours() {
        let (mut prefetch, mut with_neighbours) = (Prefetch::default(), 0);
        prefetch.sizes.note(1);
        while prefetch.begin(Limits { messages: u16::MAX, bytes: usize::MAX }) > 1 {
            with_neighbours += 1;
            prefetch.failed();
        }
        assert!(with_neighbours * 4 <= 20, "four daemons in turn must not return a message more than twenty times");
    }
}
