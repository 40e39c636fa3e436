//! Why an event is refused.

/// Why an event can never be applied.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// Stable, for machines: a column of `dead_letter`.
    pub reason: Reason,
    /// A sentence for a person: what is wrong and what is allowed.
    pub error: String,
}

/// The stable codes of [`Refusal`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Reason {
    /// The body is larger than [`super::BODY_BYTES_MAX`].
    TooLarge,
    /// Not JSON, not UTF-8, not an object, or a field stands twice.
    MalformedJson,
    /// `type` is missing or no text.
    NoType,
    /// `type` is not one that this version takes.
    UnknownType,
    /// `kind` is missing or not in `[kinds]`.
    UnknownKind,
    /// `target_id` is missing or not 1 to 2^63-1.
    TargetIdOutOfRange,
    /// `user_id` is missing or not 1 to 2^63-1.
    UserIdOutOfRange,
    /// `metric` is missing, or not in `[metrics]`, or `like`.
    UnknownMetric,
    /// `set` or `reset` of a metric whose rule isn't `settable`.
    NotSettable,
    /// `delta` is missing or not -2^31 to 2^31.
    DeltaOutOfRange,
    /// `value` is missing or not -2^53 to 2^53.
    ValueOutOfRange,
    /// `event_id` is missing or no text of 1 to 64 characters.
    EventIdOutOfRange,
    /// `at` is missing or no time that a `DATETIME(6)` holds.
    AtOutOfRange,
    /// `at` is further ahead of this machine's clock than `future_max`.
    AtInFuture,
    /// A `count`, `set` or `reset` is older than what the ledger remembers: nobody can say what was applied.
    AtTooOld,
    /// The database refuses this event's row, and no other of its batch.
    RefusedByDatabase,
    /// No refusal: the broker has set the message aside before it was written.
    ReturnedByBroker,
}

impl Reason {
    /// Every reason, in the order of the checks.
    pub const ALL: [Self; 17] = [
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
        Self::AtInFuture,
        Self::AtTooOld,
        Self::RefusedByDatabase,
        Self::ReturnedByBroker,
    ];

    /// Whether another configuration, another clock or a newer version may take what was refused with that code, or nobody has judged it.
    /// What other versions say is taken for such.
    pub fn may_be_good(code: &str) -> bool {
        let never = [
            Self::TooLarge,
            Self::MalformedJson,
            Self::NoType,
            Self::TargetIdOutOfRange,
            Self::UserIdOutOfRange,
            Self::DeltaOutOfRange,
            Self::ValueOutOfRange,
            Self::EventIdOutOfRange,
            Self::AtOutOfRange,
        ];
        never.into_iter().all(|reason| reason.code() != code)
    }

    /// The code as it stands in `dead_letter.reason`, in logs and metrics.
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
