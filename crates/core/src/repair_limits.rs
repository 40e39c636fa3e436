//! The safety limits of a reconcile or a recount. A run repairs a counter only if two measurements show drift in the
//! same direction (decision 0028). If a safety limit is exceeded, no run changes anything until a person has checked
//! the drifts (decision 0031). Pure.

use crate::drift::Judgement;

/// The percentage is checked only if more targets than this number have drifted. Otherwise one drifted target among ten
/// would already be ten percent.
const TARGETS_MIN: u64 = 100;

#[derive(Clone, Copy, Debug)]
pub struct RepairLimits<'a> {
    pub targets_max_percent: u8,
    pub abs_max: i64,
    pub command: &'a str,
    pub reload: Option<&'a str>,
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct LimitExceeded(pub String);

impl RepairLimits<'_> {
    /// Checks whether a run is allowed to repair its drifted targets. `drifted` is the number of drifted targets among
    /// the `checked` targets. `largest` is the absolute value of the largest drift.
    ///
    /// # Errors
    /// Returns [`LimitExceeded`] with the reason.
    pub fn check(self, checked: u64, drifted: u64, largest: u64) -> Result<(), LimitExceeded> {
        if largest > self.abs_max.unsigned_abs() {
            return Err(LimitExceeded(format!(
                "a counter is off by {largest}, more than [reconcile] repair_abs_max = {}; if this is correct, run {}",
                self.abs_max, self.command
            )));
        }
        if drifted > TARGETS_MIN && drifted * 100 > checked * u64::from(self.targets_max_percent) {
            let reload = self.reload.filter(|_| drifted * 2 > checked).map(|reload| {
                format!(
                    ". Most targets have drifted: run {reload} instead, which loads all counters from MySQL again and is \
                     faster"
                )
            });
            return Err(LimitExceeded(format!(
                "{drifted} of {checked} targets have drifted, more than [reconcile] repair_targets_max_percent = {}; if this is correct, \
                 run {}{}",
                self.targets_max_percent,
                self.command,
                reload.unwrap_or_default()
            )));
        }
        Ok(())
    }
}

/// The result of a measurement of a suspect, which is a counter whose earlier measurement found no zero drift.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decision {
    /// Events after the cut hide the drift. The counter must be watched.
    Busy,
    Exact,
    /// This is the counter's first drift. The counter must be measured again.
    Suspect,
    /// This is the second drift. The amount must be added to the counter. Zero if the drifts have opposite directions.
    Confirmed(i64),
}

pub fn decide(earlier: Option<Judgement>, newest: Judgement) -> Decision {
    match (earlier, newest) {
        (_, Judgement::Busy) => Decision::Busy,
        (Some(Judgement::Drift(first)), Judgement::Drift(second)) => {
            Decision::Confirmed(confirmed_delta(first, second))
        }
        (_, Judgement::Drift(0)) => Decision::Exact,
        (_, Judgement::Drift(_)) => Decision::Suspect,
    }
}

/// The smaller drift if both have the same sign, otherwise zero: an event in flight can appear as drift at one of the
/// instants, but not at both.
pub fn confirmed_delta(first: i64, second: i64) -> i64 {
    match (first.signum(), second.signum()) {
        (1, 1) => -first.min(second),
        (-1, -1) => -first.max(second),
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_agreeing_drifts_are_repaired_and_only_by_the_smaller() {
        for (first, second, added) in [(3, 2, -2), (2, 3, -2), (-3, -1, 1), (3, -1, 0), (0, 2, 0), (2, 0, 0)] {
            assert_eq!(confirmed_delta(first, second), added, "{first}, {second}");
        }
    }

    #[test]
    fn it_holds_what_is_too_much_and_lets_the_rest_through() {
        let limits = RepairLimits { targets_max_percent: 5, abs_max: 1_000, command: "it", reload: Some("load") };
        for (checked, drifted, largest, holds) in [
            (10, 10, 1_000, false),
            (10, 1, 1_001, true),
            (10, 100, 1, false),
            (2_000, 101, 1, true),
            (1_000_000, 50_000, 1, false),
            (1_000_000, 50_001, 1, true),
        ] {
            assert_eq!(limits.check(checked, drifted, largest).is_err(), holds, "{checked}, {drifted}, {largest}");
        }
        for (drifted, offered) in [(500, false), (501, true)] {
            let LimitExceeded(reason) = limits.check(1_000, drifted, 1).unwrap_err();
            assert_eq!(reason.contains("run load instead"), offered, "{reason}");
        }
    }
}
