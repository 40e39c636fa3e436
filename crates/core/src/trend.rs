//! Detects whether the differences between a site's old counters and tallyd's counters grow from one comparison to the
//! next. Pure.

use serde::{Deserialize, Serialize};

/// An increase up to this amount is not reported, even if few targets are compared, because a few popular targets
/// always have events in flight.
const TOLERATED_MIN: u64 = 10;

/// An increase up to 1 / `TOLERATED_PART` of the former value is not reported, even if the increase is larger than
/// `TOLERATED_MIN`.
const TOLERATED_PART: u64 = 20;

/// Returns a short name for a set of compared counters. The results of two runs can be compared if their names are
/// equal.
pub fn series(number: &str, of: &str, text: &str) -> String {
    format!("{number} {of} {:08x}", crc32fast::hash(text.as_bytes()))
}

/// The figures of one comparison, as in its report.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Found {
    /// The number of compared targets.
    pub checked: u64,
    /// The number of targets that differed in both measurements.
    pub differ: u64,
    /// The sum of the absolute values of all drifts.
    pub drift_sum: u64,
}

impl Found {
    /// Describes a value whose increase since `before` must be reported (see `TOLERATED_MIN` and `TOLERATED_PART`).
    /// Returns `None` if there is no such value.
    pub fn grows_from(&self, before: &Self) -> Option<String> {
        let more = |before: &str, after: &str, now: u64, then: u64| {
            let tolerated = TOLERATED_MIN.max(then / TOLERATED_PART);
            (now > then.saturating_add(tolerated)).then(|| format!("{before}{now}{after} ({then} in the previous run)"))
        };
        more("", " targets differ", self.differ, before.differ)
            .or_else(|| more("the sum of the drifts is ", "", self.drift_sum, before.drift_sum))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn found(differ: u64, drift_sum: u64) -> Found {
        Found { checked: 1_000_000, differ, drift_sum }
    }

    #[test]
    fn it_grows_by_more_than_ten_and_more_than_a_twentieth() {
        for (then, now, grows) in [
            (0, 10, false),
            (0, 11, true),
            (200, 210, false),
            (200, 211, true),
            (1_000, 1_050, false),
            (1_000, 1_051, true),
        ] {
            assert_eq!(found(now, 0).grows_from(&found(then, 0)).is_some(), grows, "{then} to {now}");
            assert_eq!(found(5, now).grows_from(&found(5, then)).is_some(), grows, "{then} to {now}");
        }
        let why = found(30, 9).grows_from(&found(10, 9)).unwrap();
        assert_eq!(why, "30 targets differ (10 in the previous run)");
    }

    proptest! {
        #[test]
        fn what_shrinks_or_stays_never_grows(differ: u64, sum: u64, less: u64, less_sum: u64) {
            let now = found(differ.saturating_sub(less), sum.saturating_sub(less_sum));
            prop_assert_eq!(now.grows_from(&found(differ, sum)), None);
        }
    }
}
