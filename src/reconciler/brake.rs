//! What is too much to be true: a run that would change more than that stops before it changes anything more. Pure.

/// Up to so many targets may drift, whatever the percentage: of ten targets one is ten percent.
const TARGETS_MIN: u64 = 100;

/// The limits of one run.
#[derive(Clone, Copy, Debug)]
pub(super) struct Brake {
    /// Of the checked targets at most so many percent may have drifted.
    pub targets_max_percent: u8,
    /// No counter may be off by more.
    pub abs_max: i64,
    /// What repairs all the same.
    pub command: &'static str,
}

/// The brake has been tripped.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Braked(pub String);

impl Brake {
    /// Whether `drifted` of `checked` targets may be repaired, the largest drift being `largest` without its sign.
    ///
    /// # Errors
    /// [`Braked`] with the reason.
    pub(super) fn check(self, checked: u64, drifted: u64, largest: u64) -> Result<(), Braked> {
        if largest > self.abs_max.unsigned_abs() {
            return Err(Braked(format!(
                "a counter is off by {largest}, more than [reconcile] repair_abs_max = {}; if that is right, run {}",
                self.abs_max, self.command
            )));
        }
        if drifted > TARGETS_MIN && drifted * 100 > checked * u64::from(self.targets_max_percent) {
            return Err(Braked(format!(
                "{drifted} of {checked} targets have drifted, more than [reconcile] repair_targets_max_percent = {}; if that is right, \
                 run {}",
                self.targets_max_percent, self.command
            )));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_holds_what_is_too_much_and_lets_the_rest_through() {
        let brake = Brake { targets_max_percent: 5, abs_max: 1_000, command: "it" };
        for (checked, drifted, largest, holds) in [
            (10, 10, 1_000, false),
            (10, 1, 1_001, true),
            (2_000, 100, 1, false),
            (2_000, 101, 1, true),
            (1_000_000, 50_000, 1, false),
            (1_000_000, 50_001, 1, true),
        ] {
            assert_eq!(brake.check(checked, drifted, largest).is_err(), holds, "{checked}, {drifted}, {largest}");
        }
    }
}
