//! The words of the contract as types, so that two integers can't be swapped. Pure: no I/O, no clock.

use std::fmt;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

/// What kind of thing is liked (`video`, `post`, ...), as its code from `[kinds]` in config.toml: 1 to 255.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Kind(pub u8);

/// Which number of a target is meant (`like`, `comment`, ...), as its code from `[metrics]`: 1 to 255.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Metric(pub u8);

/// The id of a target within its kind: 1 to 2^63-1.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TargetId(pub u64);

/// The id of a user: 1 to 2^63-1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct UserId(pub u64);

/// Microseconds since the Unix epoch, by Redis' clock: the version of a like record, and the instant of a cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Micros(pub i64);

impl Micros {
    /// 9999-12-31T23:59:59.999999Z: the last instant that MySQL's `DATETIME(6)` holds.
    pub const MAX: Self = Self(253_402_300_799_999_999);

    /// This instant, `by` earlier.
    #[must_use]
    pub fn before(self, by: Duration) -> Self {
        Self(self.0.saturating_sub(i64::try_from(by.as_micros()).unwrap_or(i64::MAX)))
    }

    /// This instant, `by` later.
    #[must_use]
    pub fn after(self, by: Duration) -> Self {
        Self(self.0.saturating_add(i64::try_from(by.as_micros()).unwrap_or(i64::MAX)))
    }
}

impl From<SystemTime> for Micros {
    /// Zero before 1970.
    fn from(time: SystemTime) -> Self {
        let since_epoch = time.duration_since(UNIX_EPOCH).unwrap_or_default();
        Self(i64::try_from(since_epoch.as_micros()).unwrap_or(Self::MAX.0))
    }
}

/// What is liked or counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Target {
    pub kind: Kind,
    pub id: TargetId,
}

/// What is added to one of a target's numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Addition {
    pub target: Target,
    pub metric: Metric,
    pub delta: i64,
}

/// A counter row's difference.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Difference {
    pub target: Target,
    /// Which of its numbers.
    pub metric: Metric,
    pub delta: i64,
    /// The newest `at` that was applied.
    pub at: Micros,
}

impl Difference {
    /// Without its time.
    pub fn addition(&self) -> Addition {
        Addition { target: self.target, metric: self.metric, delta: self.delta }
    }
}

/// One of a target's numbers.
pub type CounterKey = (Target, Metric);

/// One period of a board.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct BoardPeriod {
    pub board: String,
    /// The period's text: `2026-W47`.
    pub period: String,
}

/// A member of a board.
#[derive(Clone, Debug, PartialEq)]
pub struct BoardMember {
    /// Any bytes.
    pub member: Vec<u8>,
    /// Never NaN: Redis has none.
    pub score: f64,
}

/// What is known of a period's freeze in Redis. The greater one is newer, because run numbers grow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Freeze {
    /// The first run that claimed the board in this data set: a later one after each loss of all data.
    pub generation: u64,
    /// The run that put the frozen zset back, 0 where it is the board itself; none where the period was never frozen.
    pub note: Option<u64>,
}

impl Freeze {
    /// Of a data set that no run has claimed yet.
    pub const UNCLAIMED: Self = Self { generation: u64::MAX, note: None };
}

impl fmt::Display for BoardPeriod {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.board, self.period)
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Display for TargetId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Display for UserId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Display for Micros {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}
