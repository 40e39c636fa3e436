//! How carefully messages are taken, by how often the broker has taken them back. Pure.
//!
//! A quorum queue counts each message's returns, and from RabbitMQ 4 on sets one aside after twenty. A daemon that dies
//! of one message returns all that it holds, again and again; so whatever has come back often is taken in small
//! portions, at last one by one, and the neighbours of the message that kills go through.

use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};

use lapin::types::AMQPValue;
use lapin::{BasicProperties, types::FieldTable};

/// How many messages are taken at once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Care {
    /// As many as the configuration says.
    #[default]
    Usual,
    /// Few.
    Small,
    /// One by one.
    Single,
}

/// Returns that deaths of hosts and orderly stops explain.
const USUAL_RETURNS_MAX: i64 = 5;
const SMALL_RETURNS_MAX: i64 = 10;

/// How many returns a session stands for that brought nothing: the broker gives the message to several daemons by turns, and each sees its own
/// sessions alone. Four of them with neighbours (two as usual, two small) are sixteen with four daemons, and a queue's limit is twenty.
const FRUITLESS_RETURNS: i64 = 3;

/// What [`Care::Small`] takes at once.
const SMALL: u16 = 100;

impl Care {
    /// The care that a message needs which came back so often.
    pub fn needed(returns: i64) -> Self {
        if returns <= USUAL_RETURNS_MAX {
            Self::Usual
        } else if returns <= SMALL_RETURNS_MAX {
            Self::Small
        } else {
            Self::Single
        }
    }

    /// The care to go on with after `calm` messages in a row that needed less. Step by step, and not after the first one:
    /// what came back often may lie between others, and starting with too much returns all of it once more.
    pub fn after(self, calm: u32) -> Self {
        match self {
            Self::Single if calm >= 100 => Self::Small,
            Self::Small if calm >= 1_000 => Self::Usual,
            care => care,
        }
    }

    /// How many messages may be on the way, where the configuration says `prefetch`.
    pub fn prefetch(self, prefetch: u16) -> u16 {
        match self {
            Self::Usual => prefetch,
            Self::Small => prefetch.min(SMALL),
            Self::Single => 1,
        }
    }
}

/// Sessions in a row that the broker's side ended soon, before anything was acknowledged. There may be a message at which they end, whose own count
/// nobody can read: one that the library can't take. What it held came back each time.
#[derive(Debug, Default)]
pub(super) struct Fruitless(AtomicU32);

impl Fruitless {
    /// Another one.
    pub fn note(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    /// Something was acknowledged, or one has lasted: nothing that it was sent has ended it.
    pub fn over(&self) {
        self.0.store(0, Ordering::Relaxed);
    }

    /// How many there were.
    pub fn sessions(&self) -> i64 {
        self.0.load(Ordering::Relaxed).into()
    }

    /// The care that the next one takes.
    pub fn needed(&self) -> Care {
        Care::needed(self.sessions() * FRUITLESS_RETURNS)
    }
}

/// What is taken at once while nobody knows how large messages are.
const FIRST_PREFETCH: u16 = 200;

/// However large they are: while one is written, the next one may come.
pub(super) const PREFETCH_MIN: u16 = 2;

/// How large a partition's messages are: a list of events has a thousand times the bytes of one event, and the broker
/// counts messages, not bytes.
#[derive(Debug, Default)]
pub(super) struct Sizes(AtomicUsize);

impl Sizes {
    /// Notes a message's size in a moving mean.
    pub fn note(&self, bytes: usize) {
        let mean = self.0.load(Ordering::Relaxed);
        let new = if mean == 0 { bytes.max(1) } else { (mean * 63 + bytes).div_ceil(64) };
        self.0.store(new, Ordering::Relaxed);
    }

    /// Takes the messages of which there is too much for typical, the larger the more: their mean by bytes, not by number.
    pub fn learn(&self, sizes: impl Iterator<Item = usize>) {
        let sum = |(bytes, squares): (u128, u128), size| (bytes + size as u128, squares + (size as u128).pow(2));
        let (bytes, squares) = sizes.fold((0, 0), sum);
        if let Some(mean) = squares.checked_div(bytes) {
            self.0.store(usize::try_from(mean).unwrap_or(usize::MAX).max(1), Ordering::Relaxed);
        }
    }

    /// How many messages may be on the way: at most as configured, and at most `bytes_max` of them by their mean.
    pub fn prefetch(&self, configured: u16, bytes_max: usize) -> u16 {
        match self.0.load(Ordering::Relaxed) {
            0 => configured.min(FIRST_PREFETCH),
            mean => {
                u16::try_from(bytes_max / mean).unwrap_or(u16::MAX).clamp(PREFETCH_MIN, configured.max(PREFETCH_MIN))
            }
        }
    }
}

/// How often the broker has taken the message back: the header `x-delivery-count` of quorum queues.
pub(super) fn returns(properties: &BasicProperties) -> i64 {
    let count = properties.headers().as_ref().and_then(|headers: &FieldTable| headers.inner().get("x-delivery-count"));
    match count {
        Some(AMQPValue::LongLongInt(count)) => *count,
        Some(AMQPValue::LongInt(count)) => i64::from(*count),
        Some(AMQPValue::LongUInt(count)) => i64::from(*count),
        Some(AMQPValue::ShortInt(count)) => i64::from(*count),
        Some(AMQPValue::ShortShortInt(count)) => i64::from(*count),
        Some(AMQPValue::ShortShortUInt(count)) => i64::from(*count),
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn care_grows_with_the_returns() {
        for (returns, care, prefetch) in
            [(0, Care::Usual, 5_000), (5, Care::Usual, 5_000), (6, Care::Small, 100), (11, Care::Single, 1)]
        {
            assert_eq!(Care::needed(returns), care);
            assert_eq!(care.prefetch(5_000), prefetch);
        }
        assert!(Care::Usual < Care::Small && Care::Small < Care::Single);
        assert_eq!((Care::Single.after(99), Care::Single.after(100)), (Care::Single, Care::Small));
        assert_eq!((Care::Small.after(999), Care::Small.after(1_000)), (Care::Small, Care::Usual));
        assert_eq!(Care::Small.prefetch(10), 10);
    }

    /// RabbitMQ sets aside what came back more than twenty times.
    #[test]
    fn four_daemons_by_turns_take_one_by_one_before_a_queue_gives_up_on_neighbours() {
        let daemon = Fruitless::default();
        let with_neighbours =
            (0..20).map(|_| (daemon.needed(), daemon.note())).filter(|(care, ())| *care < Care::Single);
        assert!(with_neighbours.count() * 4 <= 20, "of one daemon, whenever the others have their turns");
        daemon.over();
        assert_eq!(daemon.needed(), Care::Usual);
    }

    #[test]
    fn large_messages_are_taken_in_smaller_numbers() {
        let sizes = Sizes::default();
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
        let sizes = Sizes::default();
        sizes.learn([].into_iter());
        assert_eq!(sizes.prefetch(10_000, 1 << 25), 200, "nothing was seen");
        sizes.learn([120; 10_000].into_iter().chain([1 << 20; 64]));
        assert_eq!(sizes.prefetch(10_000, 1 << 25), 32);
        sizes.learn([120, 40 << 20, 40 << 20].into_iter());
        assert_eq!(sizes.prefetch(10_000, 1 << 25), PREFETCH_MIN);
    }

    #[test]
    fn returns_are_read_from_the_header() {
        assert_eq!(returns(&BasicProperties::default()), 0);
        let mut headers = FieldTable::default();
        headers.insert("x-delivery-count".into(), AMQPValue::LongLongInt(7));
        assert_eq!(returns(&BasicProperties::default().with_headers(headers)), 7);
    }
}
