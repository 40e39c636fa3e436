//! Compares this machine's clock with MySQL's clock. The `at` of events is checked against this machine's clock. If
//! that clock is slow, every event seems to be from the future.

use std::sync::LazyLock;
use std::time::Instant;

use tallyd_core::model::Micros;
use tallyd_mysql::StoreError;

/// Largest accepted difference between the two clocks, in seconds.
const APART_MAX_S: i64 = 60;

/// A clock that never jumps.
static STEADY: LazyLock<Instant> = LazyLock::new(Instant::now);

/// The microseconds by which this machine's clock was ahead of the steady clock: the minimum and the maximum of several
/// readings.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Clock(Option<(i64, i64)>);

impl Clock {
    pub(super) fn note(&mut self, now: Micros) {
        let ahead = ahead_of_steady(now);
        let (least, most) = self.0.unwrap_or((ahead, ahead));
        self.0 = Some((least.min(ahead), most.max(ahead)));
    }

    /// Compares all recorded readings, and this machine's current time, with MySQL's clock.
    pub(super) fn check(mut self, mysql: Micros) -> Result<(), StoreError> {
        self.note(tallyd_base::runtime::clock::now());
        let (least, most) = self.0.unwrap_or_default();
        let apart_s = |ahead: i64| (ahead - ahead_of_steady(mysql)) / 1_000_000;
        match [least, most].map(apart_s).into_iter().find(|apart_s| apart_s.abs() > APART_MAX_S) {
            Some(apart_s) => Err(StoreError::ClocksApart(apart_s)),
            None => Ok(()),
        }
    }
}

fn ahead_of_steady(now: Micros) -> i64 {
    now.0 - i64::try_from(STEADY.elapsed().as_micros()).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_clock_that_was_stepped_while_events_were_decoded_shows() {
        let now = tallyd_base::runtime::clock::now();
        assert!(Clock::default().check(now).is_ok());
        for step in [Duration::from_secs(50), Duration::from_secs(70)] {
            for wrong in [now.before(step), now.after(step)] {
                let mut clock = Clock::default();
                [now, wrong, now].into_iter().for_each(|now| clock.note(now));
                assert_eq!(clock.check(now).is_ok(), step.as_secs() < 60, "{step:?}");
            }
        }
    }
}
