//! Detects a writer that raises counters without events. Without this check, each reconcile would lower such counters
//! again, and remove likes that the writer added. Pure.
//!
//! A counter is *raised again* if the last run found it too high, and its drift is now larger than after the last run
//! (zero if that run lowered it). If at least [`RAISED_MIN`] counters of a metric were raised again in the previous run
//! and in this one, this run does not change the metric's counters, and the next run does the same while the drift
//! grows.
//!
//! Likes are sometimes lost or counted twice, but not for the same hundred targets in three runs. So another program
//! writes these counters.

use std::collections::{BTreeMap, HashMap};

use crate::model::{CounterKey, Metric};

/// The counters of a few popular targets can drift between any two runs. So a run repairs the raised counters of a
/// metric if their number is smaller than this minimum.
pub const RAISED_MIN: u64 = 100;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TooHigh {
    pub by: u64,
    /// The drift after the run. If the run lowered the counter, this is zero. If the run did not repair the counter,
    /// this is the same number as `by`.
    pub left: u64,
}

pub type AllTooHigh = HashMap<CounterKey, TooHigh>;

#[derive(Clone, Debug, Default)]
pub struct RaisedAgain {
    last: AllTooHigh,
    by_last: BTreeMap<Metric, u64>,
    by_this: BTreeMap<Metric, u64>,
}

impl RaisedAgain {
    pub fn new(before: &AllTooHigh, last: AllTooHigh) -> Self {
        let mut by_last = BTreeMap::new();
        for (key, TooHigh { by, .. }) in &last {
            note(&mut by_last, before, *key, *by);
        }
        Self { last, by_last, by_this: BTreeMap::new() }
    }

    pub fn note(&mut self, key: CounterKey, by: u64) {
        note(&mut self.by_this, &self.last, key, by);
    }

    /// Returns `None` if this run may repair the metric's counters. Otherwise returns how many of these counters this
    /// run found raised again.
    pub fn stops(&self, metric: Metric) -> Option<u64> {
        let raised = |by: &BTreeMap<Metric, u64>| by.get(&metric).copied().filter(|raised| *raised >= RAISED_MIN);
        raised(&self.by_last).and_then(|_| raised(&self.by_this))
    }
}

fn note(raised: &mut BTreeMap<Metric, u64>, former: &AllTooHigh, key: CounterKey, by: u64) {
    if former.get(&key).is_some_and(|former| by > former.left) {
        *raised.entry(key.1).or_default() += 1;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::model::{Kind, Target, TargetId};

    const LIKE: Metric = Metric(1);
    const SHARE: Metric = Metric(2);

    fn key(id: u64, metric: Metric) -> CounterKey {
        (Target { kind: Kind(1), id: TargetId(id) }, metric)
    }

    /// Simulates a run that finds the counters in `high` too high. `before` and `last` are the results of the two
    /// previous runs. Returns each counter's drift after the run, and whether the run stops its repairs.
    fn run(before: &AllTooHigh, last: &AllTooHigh, high: &[(CounterKey, u64)]) -> (AllTooHigh, bool) {
        let mut raised = RaisedAgain::new(before, last.clone());
        high.iter().for_each(|(key, by)| raised.note(*key, *by));
        let left = |key: &CounterKey, by| if raised.stops(key.1).is_some() { by } else { 0 };
        let all = high.iter().map(|(key, by)| (*key, TooHigh { by: *by, left: left(key, *by) })).collect();
        (all, raised.stops(LIKE).is_some())
    }

    #[test]
    fn the_third_run_stops_and_so_do_those_after_it_until_the_drift_rests() {
        let high = |by: u64| (1..=100).map(|id| (key(id, LIKE), by)).collect::<Vec<_>>();
        let (mut before, mut last) = (AllTooHigh::new(), AllTooHigh::new());
        for (by, stops) in [(1, false), (1, false), (1, true), (2, true), (3, true), (3, false), (1, false), (0, false)]
        {
            let (left, stopped) = run(&before, &last, &high(by));
            assert_eq!(stopped, stops, "{by}");
            (before, last) = (last, left);
        }
    }

    #[test]
    fn each_metric_is_judged_by_itself_and_a_hundred_are_enough() {
        let high = |likes: u64| {
            let likes = (1..=likes).map(|id| (key(id, LIKE), 1));
            likes.chain((1..=99).map(|id| (key(id, SHARE), 1))).collect::<Vec<_>>()
        };
        for (likes, stops) in [(99, false), (100, true)] {
            let (first, _) = run(&AllTooHigh::new(), &AllTooHigh::new(), &high(likes));
            let (second, _) = run(&AllTooHigh::new(), &first, &high(likes));
            let mut third = RaisedAgain::new(&first, second);
            high(likes).iter().for_each(|(key, by)| third.note(*key, *by));
            assert_eq!((third.stops(LIKE).is_some(), third.stops(SHARE)), (stops, None), "{likes}");
        }
    }

    proptest! {
        /// Each run finds drift in fewer than 400 of ten thousand targets, which are chosen at random.
        #[test]
        fn drift_by_chance_never_stops_repairs(seeds in prop::collection::vec(prop::collection::btree_set(1_u64..10_000, 0..400), 3..8)) {
            let (mut before, mut last) = (AllTooHigh::new(), AllTooHigh::new());
            for ids in seeds {
                let high: Vec<(CounterKey, u64)> = ids.into_iter().map(|id| (key(id, LIKE), 1 + id % 3)).collect();
                let (left, stopped) = run(&before, &last, &high);
                prop_assert!(!stopped);
                (before, last) = (last, left);
            }
        }

        /// A writer without events raises some of the counters. The third run stops its repairs. After the writer has
        /// ended, a run repairs the counters.
        #[test]
        fn a_writer_without_events_is_found_in_the_third_run(
            raised in 100_u64..300,
            rates in prop::collection::vec(1_u64..5, 4),
            noise in prop::collection::btree_set(1_000_u64..9_000, 0..200),
        ) {
            let (mut before, mut last) = (AllTooHigh::new(), AllTooHigh::new());
            for (number, rate) in rates.iter().enumerate() {
                let by = |id| last.get(&key(id, LIKE)).map_or(0, |it: &TooHigh| it.left) + rate;
                let mut high: Vec<(CounterKey, u64)> = (1..=raised).map(|id| (key(id, LIKE), by(id))).collect();
                high.extend(noise.iter().map(|id| (key(id + number as u64 * 9_000, LIKE), 1)));
                let (left, stopped) = run(&before, &last, &high);
                prop_assert_eq!(stopped, number >= 2);
                (before, last) = (last, left);
            }
            let rests: Vec<(CounterKey, u64)> = last.iter().map(|(key, it)| (*key, it.left)).filter(|(_, by)| *by > 0).collect();
            prop_assert!(!run(&before, &last, &rests).1);
        }
    }
}
