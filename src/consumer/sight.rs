//! Drift seen at once: what events say of Redis against what MySQL counts, batch by batch. Pure.
//!
//! An event may carry its number in Redis after it. Once the event is applied, and none newer was, `counter` must
//! say the same, but for events that are still on their way: API servers overtake each other, and partitions do. Such
//! differences come and go. One that stays the same over several batches, for longer than events are on their way, is drift.
//! Nothing is repaired by it: it only has a reconcile look there first.

use std::collections::HashMap;
use std::time::Duration;

use crate::model::{Micros, Number};
use crate::store::likes::{Counted, Difference};

/// Numbers that one batch compares at most: a fiftieth of what a full batch costs.
const COMPARED_MAX: usize = 100;

/// Differences that are remembered at most: less than a megabyte.
const REMEMBERED_MAX: usize = 10_000;

/// How often a difference must be seen before it is called drift.
const TIMES_MIN: u32 = 3;

/// What is remembered of the numbers that differ.
pub struct Sights {
    known: HashMap<Number, Sight>,
    /// Where a batch with too many numbers begins to compare.
    turn: usize,
    /// How long a difference must stay.
    stays: Duration,
}

/// One number's difference.
struct Sight {
    drift: i64,
    since: Micros,
    times: u32,
    told: bool,
}

impl Sights {
    /// Where events are on their way for no longer than `stays`.
    pub fn new(stays: Duration) -> Self {
        Self { known: HashMap::new(), turn: 0, stays }
    }

    /// Which of a batch's numbers are compared, sorted by key, with the `at` of the event that is: those that differed
    /// before, and some others in turn.
    pub fn choose(&mut self, differences: &[Difference]) -> Vec<(Number, Micros)> {
        let newest = |difference: &Difference| ((difference.target, difference.metric), difference.at);
        if differences.len() <= COMPARED_MAX {
            return differences.iter().map(newest).collect();
        }
        let differed = differences.iter().filter(|difference| self.known.contains_key(&newest(difference).0));
        let mut chosen: Vec<_> = differed.take(COMPARED_MAX / 2).map(newest).collect();
        let others = COMPARED_MAX - chosen.len();
        let from = self.turn % differences.len();
        self.turn = from + others;
        chosen.extend(differences.iter().cycle().skip(from).take(others).map(newest));
        chosen.sort_unstable();
        chosen.dedup();
        chosen
    }

    /// Notes what the event at `at` said of its number, and what MySQL counts. The drift where it is one, the first time.
    pub fn note(&mut self, (number, at): (Number, Micros), said: i64, counted: Counted) -> Option<i64> {
        if counted.update_at != at {
            // Something newer was applied: the two are not of one instant.
            return None;
        }
        // Whoever publishes may say any number.
        let drift = said.saturating_sub(counted.value);
        if drift == 0 {
            self.known.remove(&number);
            return None;
        }
        if self.known.len() >= REMEMBERED_MAX
            && !self.known.contains_key(&number)
            && let Some(other) = self.known.keys().next().copied()
        {
            self.known.remove(&other);
        }
        let new = || Sight { drift, since: at, times: 0, told: false };
        let sight = self.known.entry(number).or_insert_with(new);
        if sight.drift != drift {
            *sight = new();
        }
        sight.times += 1;
        let is_drift = sight.times >= TIMES_MIN && at > sight.since.after(self.stays) && !sight.told;
        sight.told |= is_drift;
        is_drift.then_some(drift)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{Kind, Metric, Target, TargetId};

    fn target(id: u64) -> Target {
        Target { kind: Kind(1), id: TargetId(id) }
    }

    fn number(id: u64) -> Number {
        (target(id), Metric(1))
    }

    fn note(sights: &mut Sights, at: i64, said: i64, value: i64) -> Option<i64> {
        sights.note((number(1), Micros(at)), said, Counted { value, update_at: Micros(at) })
    }

    #[test]
    fn a_difference_that_stays_is_told_once() {
        let mut sights = Sights::new(Duration::from_micros(20));
        let seen = [(100, 7), (110, 8), (121, 9), (130, 10)].map(|(at, said)| note(&mut sights, at, said, said - 2));
        assert_eq!(seen, [None, None, Some(2), None]);
    }

    #[test]
    fn whatever_an_event_says_the_difference_can_be_held() {
        let mut sights = Sights::new(Duration::from_micros(20));
        for (at, said, value) in [(100, i64::MIN, 1), (110, i64::MAX, -1), (120, i64::MIN, i64::MAX)] {
            assert_eq!(note(&mut sights, at, said, value), None, "{said}");
        }
    }

    #[test]
    fn a_difference_that_changes_or_goes_is_none() {
        let mut sights = Sights::new(Duration::from_micros(20));
        for (at, said, counted) in [(100, 7, 6), (130, 7, 6), (160, 7, 5), (190, 7, 6), (220, 7, 6), (250, 7, 7)] {
            assert_eq!(note(&mut sights, at, said, counted), None, "{at}");
        }
        assert_eq!((note(&mut sights, 280, 7, 6), note(&mut sights, 310, 7, 6)), (None, None));
    }

    #[test]
    fn a_difference_that_is_seen_often_and_not_for_long_is_none() {
        let mut sights = Sights::new(Duration::from_micros(20));
        for at in 100..=120 {
            assert_eq!(note(&mut sights, at, 7, 6), None, "{at}");
        }
        assert_eq!(note(&mut sights, 121, 7, 6), Some(1));
    }

    #[test]
    fn an_event_that_something_newer_followed_says_nothing() {
        let mut sights = Sights::new(Duration::ZERO);
        for at in 1..10 {
            let counted = Counted { value: 5, update_at: Micros(at + 1) };
            assert_eq!(sights.note((number(1), Micros(at)), 7, counted), None);
        }
        assert!(sights.known.is_empty());
    }

    #[test]
    fn numbers_of_one_target_are_told_apart() {
        let mut sights = Sights::new(Duration::from_micros(20));
        let mut note = |metric, at, drift: i64| {
            let counted = Counted { value: 5, update_at: Micros(at) };
            sights.note(((target(1), Metric(metric)), Micros(at)), 5 + drift, counted)
        };
        for at in [100, 110] {
            assert_eq!((note(1, at, 2), note(3, at, 0), note(4, at, -1)), (None, None, None));
        }
        assert_eq!((note(1, 130, 2), note(3, 130, 0), note(4, 130, -1)), (Some(2), None, Some(-1)));
    }

    #[test]
    fn large_batches_are_compared_in_turn_and_those_that_differed_first() {
        let mut sights = Sights::new(Duration::ZERO);
        assert_eq!(note(&mut sights, 1, 7, 6), None);
        let batch: Vec<Difference> = (1..=1_000)
            .map(|id| Difference { target: target(id), metric: Metric(1), delta: 1, at: Micros(5) })
            .collect();
        let mut compared = std::collections::BTreeSet::new();
        for _ in 0..20 {
            let chosen = sights.choose(&batch);
            assert!(chosen.len() <= COMPARED_MAX && chosen.is_sorted(), "{}", chosen.len());
            assert!(chosen.contains(&(number(1), Micros(5))));
            compared.extend(chosen);
        }
        assert_eq!(compared.len(), 1_000);
    }

    #[test]
    fn no_more_is_remembered_than_allowed() {
        let mut sights = Sights::new(Duration::ZERO);
        for id in 0..20_000 {
            sights.note((number(id), Micros(1)), 2, Counted { value: 1, update_at: Micros(1) });
        }
        assert_eq!(sights.known.len(), REMEMBERED_MAX);
    }
}
