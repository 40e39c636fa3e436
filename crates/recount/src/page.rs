//! Compares a query's result with `counter`, and decides after two measurements which targets are wrong. Pure.

use std::iter::Peekable;

use crate::sql::Answer;
use tallyd_core::model::{Micros, TargetId};
use tallyd_core::repair_limits::confirmed_delta;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Measured {
    pub id: TargetId,
    pub truth: i64,
    pub counted: i64,
    /// Of the events that were applied to the counter; `None` if there is no row.
    pub update_at: Option<Micros>,
}

impl Measured {
    pub(super) fn drift(&self) -> i64 {
        self.counted.saturating_sub(self.truth)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Recheck {
    Right,
    Changed,
    Off(i64),
}

/// Between the measurements, all events that were in flight have arrived. The second drift is certain if the true value
/// is the same as before, and no newer event has changed the counter. The first condition alone is not enough: one
/// comment can be added and another one removed, while only one of the two events has arrived.
pub(super) fn judge(first: &Measured, second: &Measured) -> Recheck {
    if second.drift() == 0 {
        return Recheck::Right;
    }
    if first.truth != second.truth || first.update_at != second.update_at {
        return Recheck::Changed;
    }
    match confirmed_delta(first.drift(), second.drift()) {
        0 => Recheck::Changed,
        added => Recheck::Off(added),
    }
}

/// In order of id. A target can be in the query's result, in `counter` or in both.
pub(super) fn measured(answer: &Answer) -> impl Iterator<Item = Measured> {
    let mut truths = answer.truths.iter().copied().peekable();
    let mut counters = answer.counters.iter().copied().peekable();
    std::iter::from_fn(move || next(&mut truths, &mut counters))
}

fn next(
    truths: &mut Peekable<impl Iterator<Item = (TargetId, i64)>>,
    counters: &mut Peekable<impl Iterator<Item = (TargetId, i64, Micros)>>,
) -> Option<Measured> {
    let ids = [truths.peek().map(|(id, _)| *id), counters.peek().map(|(id, ..)| *id)];
    let id = ids.into_iter().flatten().min()?;
    let truth = truths.next_if(|(other, _)| *other == id).map_or(0, |(_, truth)| truth);
    let counter = counters.next_if(|(other, ..)| *other == id);
    let (counted, update_at) = counter.map_or((0, None), |(_, counted, at)| (counted, Some(at)));
    Some(Measured { id, truth, counted, update_at })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    fn found(truth: i64, counted: i64, update_at: i64) -> Measured {
        Measured { id: TargetId(1), truth, counted, update_at: Some(Micros(update_at)) }
    }

    #[test]
    fn only_what_rests_and_is_off_twice_is_corrected() {
        for (first, second, expected) in [
            (found(5, 3, 1), found(5, 3, 1), Recheck::Off(2)),
            (found(5, 9, 1), found(5, 8, 1), Recheck::Off(-3)),
            (found(5, 4, 1), found(5, 5, 2), Recheck::Right),
            (found(5, 4, 1), found(6, 6, 2), Recheck::Right),
            (found(5, 4, 1), found(6, 4, 1), Recheck::Changed),
            (found(5, 4, 1), found(5, 4, 2), Recheck::Changed),
            (found(5, 4, 1), found(5, 6, 1), Recheck::Changed),
        ] {
            assert_eq!(judge(&first, &second), expected, "{first:?}, {second:?}");
        }
    }

    #[derive(Clone, Copy, Debug)]
    struct Happening {
        delta: i64,
        at: usize,
        applied: usize,
    }

    proptest! {
        #[test]
        fn nothing_is_left_out_and_nothing_comes_twice(
            truths: BTreeMap<u8, i8>,
            counters: BTreeMap<u8, i8>,
        ) {
            let answer = Answer {
                truths: truths.iter().map(|(id, truth)| (TargetId((*id).into()), (*truth).into())).collect(),
                counters: counters.iter().map(|(id, counted)| (TargetId((*id).into()), (*counted).into(), Micros(1))).collect(),
                until: TargetId(255),
            };
            let seen: Vec<Measured> = measured(&answer).collect();
            prop_assert!(seen.is_sorted_by(|a, b| a.id < b.id));
            for Measured { id, truth, counted, update_at } in &seen {
                let key = &u8::try_from(id.0).unwrap();
                prop_assert_eq!(*truth, truths.get(key).map_or(0, |truth| i64::from(*truth)));
                prop_assert_eq!(*counted, counters.get(key).map_or(0, |counted| i64::from(*counted)));
                prop_assert_eq!(update_at.is_some(), counters.contains_key(key));
            }
            let all: std::collections::BTreeSet<&u8> = truths.keys().chain(counters.keys()).collect();
            prop_assert_eq!(seen.len(), all.len());
        }

        /// Comments are added and removed. Events are applied in any order. The fence ensures that an event from before
        /// the first measurement is applied before the second measurement. The corrections reduce the drift that
        /// existed at the start. A correction is never larger than this drift.
        #[test]
        fn nothing_but_the_true_drift_is_ever_corrected(
            happenings in proptest::collection::vec((prop_oneof![Just(1_i64), Just(-1)], 0..40_usize, 1..20_usize), 0..12),
            drift in -2..3_i64,
            looks in proptest::collection::vec(1..20_usize, 2..5),
        ) {
            let mut at = 0;
            let looks: Vec<usize> = looks.iter().map(|step| { at += step; at }).collect();
            let happenings: Vec<Happening> = happenings.into_iter().map(|(delta, at, lag)| {
                // The second measurement after an event always includes the event.
                let fence = looks.iter().copied().filter(|look| *look >= at).nth(1).unwrap_or(usize::MAX);
                Happening { delta, at, applied: (at + lag).min(fence) }
            }).collect();
            let look = |now: usize| {
                let truth = 100 + happenings.iter().filter(|it| it.at <= now).map(|it| it.delta).sum::<i64>();
                // Each event has a different `at`.
                let applied = happenings.iter().enumerate().filter(|(_, it)| it.applied <= now);
                let (deltas, ats): (Vec<i64>, Vec<i64>) =
                    applied.map(|(place, it)| (it.delta, (it.at * 100 + place) as i64)).unzip();
                let counted = 100 + drift + deltas.iter().sum::<i64>();
                Measured { id: TargetId(1), truth, counted, update_at: Some(Micros(ats.into_iter().max().unwrap_or(-1))) }
            };
            for pair in looks.windows(2) {
                let (first, second) = (look(pair[0]), look(pair[1]));
                if first.drift() != 0 && let Recheck::Off(added) = judge(&first, &second) {
                    // The correction can be smaller than the drift: one measurement can lack an event although newer
                    // events were applied.
                    prop_assert!(added.signum() == -drift.signum() && added.abs() <= drift.abs(), "{:?} {:?}", first, second);
                }
            }
        }
    }
}
