//! The reasons why an event is refused.

/// The reason why an event can never be applied.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// The stable code for programs, as in the column `reason` of `dead_letter`.
    pub reason: Reason,
    /// A sentence for a person, with the problem and the allowed values.
    pub error: String,
}

/// The stable codes of [`Refusal`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Reason {
    /// The body is larger than [`super::BODY_BYTES_MAX`].
    TooLarge,
    /// The body is not JSON, is not UTF-8, is not an object, or contains a field twice.
    MalformedJson,
    /// `type` is missing or is not text.
    NoType,
    /// This version does not support the `type`.
    UnknownType,
    /// `kind` is missing or is not in `[kinds]`.
    UnknownKind,
    /// `target_id` is missing or is not an id from 1 to 2^63-1.
    TargetIdOutOfRange,
    /// `user_id` is missing or is not an id from 1 to 2^63-1.
    UserIdOutOfRange,
    /// `metric` is missing, is not in `[metrics]`, or is `like`.
    UnknownMetric,
    /// The event is a `set` or `reset`, but no rule makes its metric `settable`.
    NotSettable,
    /// `delta` is missing or is not from -2^31 to 2^31.
    DeltaOutOfRange,
    /// `value` is missing or is not from -2^53 to 2^53.
    ValueOutOfRange,
    /// `event_id` is missing or is not a text of 1 to 64 characters.
    EventIdOutOfRange,
    /// `at` is missing or is not a time that `DATETIME(6)` can hold.
    AtOutOfRange,
    /// `at` is before `at_min`. Its unit is probably wrong.
    AtTooEarly,
    /// `at` is ahead of this machine's clock by more than `future_max`.
    AtInFuture,
    /// A `count`, `set` or `reset` is older than the ledger of applied events. So it is unknown whether the event was
    /// applied.
    AtTooOld,
    /// The database rejects this event's row, but accepts the rest of the batch.
    RefusedByDatabase,
    /// No daemon refused this event. The broker dead-lettered the message before a daemon could write the event to
    /// MySQL.
    ReturnedByBroker,
}

impl Reason {
    /// All reasons, in the order in which they are checked.
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

    /// Whether an event with this code could be accepted later. This is possible if the cause is the configuration, a
    /// clock or an old version, or if the event was never checked. If the event came through a map (`is_mapped`), each
    /// field's place and meaning are configuration. For codes that this version does not know, returns true.
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

    /// Returns the code for `dead_letter.reason`, logs and metrics.
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
