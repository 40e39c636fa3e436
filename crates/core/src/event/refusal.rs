//! The reasons why an event is refused.

/// The reason why an event can never be applied.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    pub reason: Reason,
    pub error: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Reason {
    TooLarge,
    MalformedJson,
    NoType,
    UnknownType,
    UnknownKind,
    TargetIdOutOfRange,
    UserIdOutOfRange,
    UnknownMetric,
    NotSettable,
    DeltaOutOfRange,
    ValueOutOfRange,
    EventIdOutOfRange,
    AtOutOfRange,
    AtTooEarly,
    AtInFuture,
    /// A `count`, `set` or `reset` is older than the ledger of applied events. So it is unknown whether the event was
    /// applied.
    AtTooOld,
    /// The database rejects this event's row, but accepts the rest of the batch.
    RefusedByDatabase,
    ReturnedByBroker,
}

impl Reason {
    pub const ALL: [Self; 18] = [
        Self::TooLarge,
        Self::MalformedJson,
        Self::NoType,
        Self::UnknownType,
        Self::UnknownKind,
        Self::TargetIdOutOfRange,
        Self::UserIdOutOfRange,
        Self::UnknownMetric,
        Self::NotSettable,
        Self::DeltaOutOfRange,
        Self::ValueOutOfRange,
        Self::EventIdOutOfRange,
        Self::AtOutOfRange,
        Self::AtTooEarly,
        Self::AtInFuture,
        Self::AtTooOld,
        Self::RefusedByDatabase,
        Self::ReturnedByBroker,
    ];

    /// Possible if the cause is the configuration, a clock or an old version, or if the event was never checked. With a
    /// map, each field's place and meaning are configuration. Unknown codes may be good.
    pub fn may_be_good(code: &str, is_mapped: bool) -> bool {
        let never = [Self::TooLarge, Self::MalformedJson];
        let never_of_own = [
            Self::NoType,
            Self::TargetIdOutOfRange,
            Self::UserIdOutOfRange,
            Self::DeltaOutOfRange,
            Self::ValueOutOfRange,
            Self::EventIdOutOfRange,
            Self::AtOutOfRange,
        ];
        let is = |reason: &Self| reason.code() == code;
        !never.iter().any(is) && (is_mapped || !never_of_own.iter().any(is))
    }

    pub fn code(self) -> &'static str {
        match self {
            Self::TooLarge => "too-large",
            Self::MalformedJson => "malformed-json",
            Self::NoType => "no-type",
            Self::UnknownType => "unknown-type",
            Self::UnknownKind => "unknown-kind",
            Self::TargetIdOutOfRange => "target-id-out-of-range",
            Self::UserIdOutOfRange => "user-id-out-of-range",
            Self::UnknownMetric => "unknown-metric",
            Self::NotSettable => "not-settable",
            Self::DeltaOutOfRange => "delta-out-of-range",
            Self::ValueOutOfRange => "value-out-of-range",
            Self::EventIdOutOfRange => "event-id-out-of-range",
            Self::AtOutOfRange => "at-out-of-range",
            Self::AtTooEarly => "at-too-early",
            Self::AtInFuture => "at-in-future",
            Self::AtTooOld => "at-too-old",
            Self::RefusedByDatabase => "refused-by-database",
            Self::ReturnedByBroker => "returned-by-broker",
        }
    }
}

pub(crate) fn refuse(reason: Reason, error: String) -> Refusal {
    Refusal { reason, error }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refused_event_may_be_good_if_a_setting_can_be_wrong() {
        let may_be_good = |code: &str| [false, true].map(|is_mapped| Reason::may_be_good(code, is_mapped));
        for reason in [Reason::TooLarge, Reason::MalformedJson] {
            assert_eq!(may_be_good(reason.code()), [false, false], "{reason:?}");
        }
        for reason in [Reason::NoType, Reason::UserIdOutOfRange, Reason::AtOutOfRange] {
            assert_eq!(may_be_good(reason.code()), [false, true], "{reason:?}");
        }
        for reason in [Reason::UnknownKind, Reason::AtInFuture, Reason::ReturnedByBroker] {
            assert_eq!(may_be_good(reason.code()), [true, true], "{reason:?}");
        }
        assert_eq!(may_be_good("of-a-later-version"), [true, true]);
    }
}
