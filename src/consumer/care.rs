//! How carefully messages are taken, by how often the broker has taken them back. Pure.
//!
//! A quorum queue counts each message's returns, and from RabbitMQ 4 on sets one aside after twenty. A daemon that dies
//! of one message returns all that it holds, again and again; so whatever has come back often is taken in small
//! portions, at last one by one, and the neighbours of the message that kills go through.

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

    /// How many messages may be on the way, where the configuration says `prefetch`.
    pub fn prefetch(self, prefetch: u16) -> u16 {
        match self {
            Self::Usual => prefetch,
            Self::Small => prefetch.min(SMALL),
            Self::Single => 1,
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
        assert_eq!(Care::Small.prefetch(10), 10);
    }

    #[test]
    fn returns_are_read_from_the_header() {
        assert_eq!(returns(&BasicProperties::default()), 0);
        let mut headers = FieldTable::default();
        headers.insert("x-delivery-count".into(), AMQPValue::LongLongInt(7));
        assert_eq!(returns(&BasicProperties::default().with_headers(headers)), 7);
    }
}
