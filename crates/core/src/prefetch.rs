//! Calculates how many messages a session receives, and how many it writes together, from the sizes and the returns of
//! messages. Pure: no I/O, no clock.
//!
//! The broker limits the number of messages and not their bytes, but a list of events can be a thousand times larger
//! than one event (decision 0008).
//!
//! A quorum queue dead-letters a message after twenty returns. If one message crashes the daemon, all messages that the
//! daemon holds return, again and again. So a daemon starts with a prefetch of one message, and keeps it while the
//! messages were returned often (decision 0012). Where such a message arrives among others, it is written alone. The
//! others are not returned for that: this would count as much as a crash, and bring them behind the bad message.

/// A daemon that has just started knows neither the size of messages, nor whether its predecessor died of one that is
/// still in the queue. Messages that it returned could come behind the deadly message again and again, until the queue
/// drops them.
const FIRST_PREFETCH: u16 = 1;

/// The smallest prefetch, for messages of any size. With a prefetch of two, the next message can arrive while the
/// daemon writes the first one.
const PREFETCH_MIN: u16 = 2;

/// A session takes at least this many messages before it ends for another prefetch, because a new session needs as much
/// time as these messages one by one.
const SEEN_MIN: u16 = 10;

/// After this many messages in a row that may be written together, the limit on the prefetch ends.
const CALM_MESSAGES: u16 = 500;

/// If a session fails before it acknowledges a message, the next prefetch is divided by this: the AMQP library perhaps
/// cannot read a message, and the daemon then does not know its returns. Four failed sessions lead from the largest
/// prefetch to one message, sixteen with four daemons in turn; the queue allows twenty returns.
const FAILED_LEAVES: u16 = 16;

/// A partition's share of the prefetch is not smaller than this, because small batches cost more time per event. No session
/// ends because messages became smaller and would allow more than twice this: lists of events shrink at night and grow at
/// noon, up to a hundredfold.
const SHARE_MIN: u16 = 2_500;

/// An equal share, so that a daemon with several partitions does not need much more memory.
pub fn share(configured: u16, partitions: u16) -> u16 {
    (configured / partitions.max(1)).max(configured.min(SHARE_MIN))
}

#[derive(Clone, Copy, Debug)]
pub struct Limits {
    pub messages: u16,
    /// The bytes of all messages. The daemon estimates them from the mean size of the last messages.
    pub bytes: usize,
}

#[derive(Debug, Default)]
struct MessageSizes {
    /// The moving mean of the messages' sizes, in bytes. It is 0 before the first message.
    mean: usize,
}

impl MessageSizes {
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

#[derive(Debug)]
pub struct Prefetch {
    sizes: MessageSizes,
    /// Limits the prefetch after messages that were returned often, and after sessions that failed.
    limit: u16,
    calm: u16,
    messages: u16,
    /// What the size of messages allowed when the session began.
    by_size: u16,
    seen: u16,
}

impl Default for Prefetch {
    fn default() -> Self {
        Self { sizes: MessageSizes::default(), limit: u16::MAX, calm: 0, messages: 0, by_size: 0, seen: 0 }
    }
}

impl Prefetch {
    pub fn wanted(&self, limits: Limits) -> u16 {
        self.limit.min(self.sizes.prefetch(limits))
    }

    pub fn begin(&mut self, limits: Limits) -> u16 {
        (self.messages, self.by_size, self.seen) = (self.wanted(limits), self.sizes.prefetch(limits), 0);
        self.messages
    }

    /// Whether the broker sends no message beside these.
    pub fn is_used_up(&self, messages: usize) -> bool {
        self.messages > 0 && messages >= usize::from(self.messages)
    }

    pub fn is_lowest(&self) -> bool {
        self.messages <= PREFETCH_MIN
    }

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

    /// Checked once after each `prefetch` messages. A session with messages that were returned often does not end for
    /// that, because its end would return them once more.
    pub fn is_off(&mut self, limits: Limits) -> bool {
        if self.seen < self.messages.max(SEEN_MIN) {
            return false;
        }
        self.seen = 0;
        let by_size = self.sizes.prefetch(limits);
        let wanted = self.limit.min(by_size);
        let enough = if self.messages < self.by_size { wanted } else { wanted.min(SHARE_MIN) };
        let is_too_low = enough / 2 > self.messages || (wanted >= PREFETCH_MIN && self.messages < PREFETCH_MIN);
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

    #[test]
    fn the_smallest_prefetch_and_the_largest_end_no_session() {
        for most in [PREFETCH_MIN, 32_000] {
            let mut prefetch = Prefetch::default();
            prefetch.note(0, 120);
            assert_eq!(prefetch.begin(limits(most)), most);
            (0..32_000).for_each(|_| prefetch.note(0, 120));
            assert!(!prefetch.is_off(limits(most)), "{most}");
        }
    }

    #[test]
    fn a_prefetch_that_a_failure_has_lowered_grows_again() {
        let mut prefetch = Prefetch::default();
        prefetch.note(0, 120);
        assert_eq!(prefetch.begin(limits(32_000)), 32_000);
        prefetch.failed();
        assert_eq!(prefetch.begin(limits(32_000)), 2_000);
        (0..2_000).for_each(|_| prefetch.note(0, 120));
        assert!(prefetch.is_off(limits(32_000)));
        assert_eq!(prefetch.begin(limits(32_000)), 32_000);
    }

    #[test]
    fn the_mean_size_starts_with_the_first_message_and_moves_slowly() {
        let mut sizes = MessageSizes::default();
        sizes.note(6_400);
        assert_eq!(sizes.mean, 6_400);
        sizes.note(0);
        assert_eq!(sizes.mean, 6_300);
    }

    #[test]
    fn a_prefetch_is_used_up_by_as_many_messages_unless_it_is_none() {
        let used_up = |most, messages| {
            let mut prefetch = Prefetch::default();
            prefetch.sizes.note(1);
            prefetch.begin(limits(most));
            prefetch.is_used_up(messages)
        };
        assert!(!used_up(5, 4) && used_up(5, 5) && used_up(5, 6));
        assert!(!Prefetch::default().is_used_up(0));
    }

    /// A session with a prefetch of 100 messages, and the mean size that suits `wanted` messages.
    fn after(seen: u16, wanted: usize) -> Prefetch {
        let limits = Limits { messages: 1_000, bytes: 1_000_000 };
        let mut prefetch = Prefetch::default();
        prefetch.sizes.mean = 10_000;
        assert_eq!(prefetch.begin(limits), 100);
        prefetch.sizes.mean = limits.bytes / wanted;
        prefetch.seen = seen;
        prefetch
    }

    #[test]
    fn a_session_ends_when_another_prefetch_suits_more_than_twice_as_well() {
        let is_off = |seen, wanted| after(seen, wanted).is_off(Limits { messages: 1_000, bytes: 1_000_000 });
        assert!(!is_off(100, 200) && is_off(100, 204), "more messages");
        assert!(!is_off(100, 50) && is_off(100, 49), "fewer messages");
        assert!(!is_off(99, 1_000), "it has not seen enough");
    }

    #[test]
    fn lists_that_grow_and_shrink_end_a_session_only_once() {
        let limits = Limits { messages: 20_000, bytes: 1 << 25 };
        for (bytes, expected) in [(110, 3_050), (190, 1_766), (260, 1_290)] {
            let (mut prefetch, mut ended) = (Prefetch::default(), 0);
            prefetch.note(0, bytes);
            assert_eq!(prefetch.begin(limits), 20_000);
            for events in [1, 100, 20, 1, 100, 1, 100] {
                for _ in 0..40_000 {
                    prefetch.note(0, bytes * events);
                    if prefetch.is_off(limits) {
                        (ended, _) = (ended + 1, prefetch.begin(limits));
                    }
                }
            }
            assert_eq!((ended, prefetch.messages), (1, expected), "{bytes} bytes");
        }
        let mut low = Prefetch::default();
        low.note(0, 100_000);
        assert_eq!(low.begin(limits), 335);
        (0..2_000).for_each(|_| low.note(0, 110));
        assert!(low.is_off(limits), "335 messages are too few");
    }

    #[test]
    fn a_prefetch_that_returns_had_lowered_is_raised_from_the_double_on() {
        let limits = Limits { messages: 500, bytes: 1 << 25 };
        let mut prefetch = Prefetch::default();
        prefetch.note(6, 110);
        assert_eq!(prefetch.begin(limits), 100);
        let ends = (0..=CALM_MESSAGES).filter(|_| {
            prefetch.note(0, 110);
            prefetch.is_off(limits)
        });
        assert_eq!(ends.count(), 0);
        (0..100).for_each(|_| prefetch.note(0, 110));
        assert!(prefetch.is_off(limits));
    }

    #[test]
    fn a_session_is_overfull_from_twice_the_bytes_on() {
        let limits = Limits { messages: 1_000, bytes: 1_000_000 };
        let overfull = |prefetch: &mut Prefetch, bytes| prefetch.is_overfull(bytes, limits, [20_000; 100].into_iter());
        let mut prefetch = after(0, 100);
        assert!(!overfull(&mut prefetch, 2_000_000));
        assert_eq!(prefetch.sizes.mean, 10_000);
        assert!(overfull(&mut prefetch, 2_000_001));
        assert_eq!(prefetch.sizes.mean, 20_000);
        for (messages, is_overfull) in [(PREFETCH_MIN, false), (PREFETCH_MIN + 1, true)] {
            prefetch.messages = messages;
            assert_eq!(overfull(&mut prefetch, 3_000_000), is_overfull, "with {messages} messages");
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
