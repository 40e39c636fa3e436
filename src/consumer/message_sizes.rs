//! How many messages can be in flight, by how large they are. Pure: no I/O, no clock.

/// The prefetch before the first message has shown how large messages are.
const FIRST_PREFETCH: u16 = 200;

/// The least prefetch, however large messages are: while one is written, the next one can come.
pub(super) const PREFETCH_MIN: u16 = 2;

/// How large a partition's messages are. A list of events has a thousand times the bytes of one event, and the broker
/// counts messages, not bytes.
#[derive(Debug, Default)]
pub(super) struct MessageSizes {
    /// In bytes; 0 until a message has come.
    mean: usize,
}

impl MessageSizes {
    /// Notes a message's size in a moving mean.
    pub fn note(&mut self, bytes: usize) {
        self.mean = if self.mean == 0 { bytes.max(1) } else { (self.mean * 63 + bytes).div_ceil(64) };
    }

    /// Replaces the mean after an inbox has grown too large. Each message weighs as much as it has bytes, so that a few large messages count.
    pub fn learn(&mut self, sizes: impl Iterator<Item = usize>) {
        let sum = |(bytes, squares): (u128, u128), size| (bytes + size as u128, squares + (size as u128).pow(2));
        let (bytes, squares) = sizes.fold((0, 0), sum);
        if let Some(mean) = squares.checked_div(bytes) {
            self.mean = usize::try_from(mean).unwrap_or(usize::MAX).max(1);
        }
    }

    /// How many messages can be in flight: at most `configured`, and at most `bytes_max` bytes by their mean.
    pub fn prefetch(&self, configured: u16, bytes_max: usize) -> u16 {
        match self.mean {
            0 => configured.min(FIRST_PREFETCH),
            mean => {
                u16::try_from(bytes_max / mean).unwrap_or(u16::MAX).clamp(PREFETCH_MIN, configured.max(PREFETCH_MIN))
            }
        }
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
    fn of_too_much_the_large_ones_are_what_is_learned() {
        let mut sizes = MessageSizes::default();
        sizes.learn([].into_iter());
        assert_eq!(sizes.prefetch(10_000, 1 << 25), 200, "nothing was seen");
        sizes.learn([120; 10_000].into_iter().chain([1 << 20; 64]));
        assert_eq!(sizes.prefetch(10_000, 1 << 25), 32);
        sizes.learn([120, 40 << 20, 40 << 20].into_iter());
        assert_eq!(sizes.prefetch(10_000, 1 << 25), PREFETCH_MIN);
    }
}
