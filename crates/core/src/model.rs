//! Types for ids, codes and times. With these types, the compiler finds an integer that was passed as the wrong
//! argument. Pure: no I/O, no clock.

use std::fmt;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

/// The kind of a target (`video`, `post`, ...), as its code from `[kinds]` in config.toml: 1 to 255.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Kind(pub u8);

/// The metric of a counter (`like`, `comment`, ...), as its code from `[metrics]`: 1 to 255.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Metric(pub u8);

/// The id of a target within its kind: 1 to 2^63-1.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TargetId(pub u64);

/// The id of a user: 1 to 2^63-1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct UserId(pub u64);

/// Microseconds since the Unix epoch: for example the version of a like record, or the moment at which a reconcile
/// compares counters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Micros(pub i64);

impl Micros {
    /// 9999-12-31T23:59:59.999999Z: the last instant that MySQL's `DATETIME(6)` holds.
    pub const MAX: Self = Self(253_402_300_799_999_999);

    #[must_use]
    pub fn before(self, by: Duration) -> Self {
        Self(self.0.saturating_sub(i64::try_from(by.as_micros()).unwrap_or(i64::MAX)))
    }

    #[must_use]
    pub fn after(self, by: Duration) -> Self {
        Self(self.0.saturating_add(i64::try_from(by.as_micros()).unwrap_or(i64::MAX)))
    }
}

impl From<SystemTime> for Micros {
    /// A time before 1970 becomes zero.
    fn from(time: SystemTime) -> Self {
        let since_epoch = time.duration_since(UNIX_EPOCH).unwrap_or_default();
        Self(i64::try_from(since_epoch.as_micros()).unwrap_or(Self::MAX.0))
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Target {
    pub kind: Kind,
    pub id: TargetId,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Addition {
    pub target: Target,
    pub metric: Metric,
    pub delta: i64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Difference {
    pub target: Target,
    pub metric: Metric,
    pub delta: i64,
    pub at: Micros,
}

impl Difference {
    pub fn addition(&self) -> Addition {
        Addition { target: self.target, metric: self.metric, delta: self.delta }
    }
}

pub type CounterKey = (Target, Metric);

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct BoardPeriod {
    pub board: String,
    /// For example `2026-W47`.
    pub period: String,
}

#[derive(Clone, Debug, PartialEq)]
pub struct BoardMember {
    /// Any bytes.
    pub member: Vec<u8>,
    /// The score is never NaN, because Redis does not allow NaN as a score.
    pub score: f64,
}

/// Identifies the run of the archiver that froze a board's period in Redis. A frozen period receives no more writes.
/// The greater `Freeze` is the newer one, because run numbers grow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Freeze {
    /// After Redis has lost all data, the next archiver run that changes the board writes its number here. So this
    /// number grows after each loss of all data.
    pub generation: u64,
    /// The number of the run that restored the frozen zset, or 0 if the zset was never restored. `None` if the period
    /// was never frozen.
    pub note: Option<u64>,
}

impl Freeze {
    /// Stands for a missing freeze: Redis has lost all data, and no archiver run has changed the board since then.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_end_at_the_limits_of_their_type() {
        let second = Duration::from_secs(1);
        assert_eq!((Micros(5).before(second), Micros(5).after(second)), (Micros(-999_995), Micros(1_000_005)));
        assert_eq!(Micros(-2).before(Duration::MAX), Micros(i64::MIN));
        assert_eq!(Micros(2).after(Duration::MAX), Micros(i64::MAX));
        assert_eq!(Micros::from(UNIX_EPOCH + Duration::from_micros(7)), Micros(7));
        assert_eq!(Micros::from(UNIX_EPOCH - second), Micros(0));
    }

    #[test]
    fn ids_codes_and_times_are_written_as_their_numbers() {
        let text = [Kind(1).to_string(), TargetId(2).to_string(), UserId(3).to_string(), Micros(4).to_string()];
        assert_eq!(text, ["1", "2", "3", "4"]);
        let period = BoardPeriod { board: "top".to_owned(), period: "2026-W47".to_owned() };
        assert_eq!(period.to_string(), "top 2026-W47");
    }

    #[test]
    fn an_addition_is_a_difference_without_its_time() {
        let (target, metric) = (Target { kind: Kind(1), id: TargetId(2) }, Metric(3));
        let difference = Difference { target, metric, delta: 4, at: Micros(5) };
        assert_eq!(difference.addition(), Addition { target, metric, delta: 4 });
    }
}
