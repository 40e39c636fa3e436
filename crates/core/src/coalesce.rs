//! Reduces a batch of events to the newest state of each row and the change of each counter. Pure: no I/O, no clock.
//!
//! Keeps invariants 2 and 3. Invariant 2: for each (target, user), the newest `at` wins, even if events arrive in any
//! order and several times (decision 0006). Invariant 3: each target's difference is computed from the old states of
//! the rows.

use std::collections::HashMap;

use crate::event::{CountEvent, EventId, LikeEvent};
use crate::model::{Difference, Metric, Micros, Target, UserId};

/// A row's key (kind, target, user). Sorted keys are in the order of the primary key.
pub type Pair = (Target, UserId);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LikeState {
    pub at: Micros,
    pub liked: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Before {
    Absent,
    /// An older row existed. The value says whether the user liked the target in that row.
    Older(bool),
    NotOlder,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Entry {
    /// The event's `at` in seconds since the epoch.
    pub second: i64,
    pub id: EventId,
}

impl Entry {
    pub fn of(count: &CountEvent) -> Self {
        Self { second: count.at.0.div_euclid(1_000_000), id: count.id }
    }
}

/// Returns the newest event of each (target, user), sorted by key. If a like and an unlike have the same `at`, the
/// unlike wins, in any order of arrival.
pub fn coalesce<'a>(events: impl IntoIterator<Item = &'a LikeEvent>) -> Vec<(Pair, LikeState)> {
    let states =
        events.into_iter().map(|event| ((event.target, event.user), LikeState { at: event.at, liked: event.liked }));
    let mut winners: Vec<(Pair, LikeState)> = states.collect();
    winners.sort_unstable_by_key(|(pair, state)| (*pair, std::cmp::Reverse(version(state))));
    winners.dedup_by_key(|(pair, _)| *pair);
    winners
}

pub fn before(winners: &[(Pair, LikeState)], old: &HashMap<Pair, LikeState>) -> Vec<Before> {
    let meets = |(pair, new): &(Pair, LikeState)| match old.get(pair) {
        None => Before::Absent,
        Some(old) if version(new) > version(old) => Before::Older(old.liked),
        Some(_) => Before::NotOlder,
    };
    winners.iter().map(meets).collect()
}

/// Sorted by key. A target whose rows changed is included even with a difference of zero, because the `update_at` of
/// its counter must change.
pub fn differences(metric: Metric, winners: &[(Pair, LikeState)], before: &[Before]) -> Vec<Difference> {
    let mut differences: Vec<Difference> = Vec::new();
    for ((pair, new), before) in winners.iter().zip(before) {
        let was_liked = match before {
            Before::Absent => false,
            Before::Older(liked) => *liked,
            Before::NotOlder => continue,
        };
        let delta = i64::from(new.liked) - i64::from(was_liked);
        match differences.last_mut() {
            Some(last) if last.target == pair.0 => {
                last.delta += delta;
                last.at = last.at.max(new.at);
            }
            _ => differences.push(Difference { target: pair.0, metric, delta, at: new.at }),
        }
    }
    differences
}

pub fn new_likers(winners: &[(Pair, LikeState)], before: &[Before]) -> Vec<Pair> {
    let is_new = |before: &Before| matches!(before, Before::Absent | Before::Older(false));
    let new = winners.iter().zip(before).filter(|((_, state), before)| state.liked && is_new(before));
    new.map(|((pair, _), _)| *pair).collect()
}

/// Removes duplicate count events, and sorts the other events by their keys in the ledger. Events with the same id and
/// `at` are duplicates.
pub fn distinct(counts: impl Iterator<Item = CountEvent>) -> Vec<CountEvent> {
    let mut distinct: Vec<CountEvent> = counts.collect();
    distinct.sort_unstable_by_key(Entry::of);
    distinct.dedup_by_key(|count| Entry::of(count));
    distinct
}

pub fn sums(counts: &[CountEvent]) -> Vec<Difference> {
    let mut sums: Vec<Difference> = counts
        .iter()
        .map(|CountEvent { target, metric, delta, at, .. }| Difference {
            target: *target,
            metric: *metric,
            delta: *delta,
            at: *at,
        })
        .collect();
    sums.sort_unstable_by_key(|sum| (sum.target, sum.metric));
    sums.dedup_by(|later, first| {
        let same = (later.target, later.metric) == (first.target, first.metric);
        if same {
            first.delta += later.delta;
            first.at = first.at.max(later.at);
        }
        same
    });
    sums
}

fn version(state: &LikeState) -> (Micros, bool) {
    (state.at, !state.liked)
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, HashSet};

    use proptest::prelude::*;

    use super::*;
    use crate::model::{Kind, Target, TargetId, UserId};

    const LIKE: Metric = Metric(1);

    #[test]
    fn a_target_changes_by_what_its_winners_were_before() {
        let target = |id| Target { kind: Kind(1), id: TargetId(id) };
        let winner = |id, user, at, liked| ((target(id), UserId(user)), LikeState { at: Micros(at), liked });
        let winners = [
            winner(1, 1, 5, true),
            winner(1, 2, 9, true),
            winner(1, 3, 7, false),
            winner(2, 1, 3, true),
            winner(3, 1, 4, true),
            winner(4, 1, 2, false),
        ];
        let before = [
            Before::Absent,
            Before::Older(false),
            Before::Older(true),
            Before::Older(true),
            Before::NotOlder,
            Before::Older(true),
        ];
        let of = |id, delta, at| Difference { target: target(id), metric: LIKE, delta, at: Micros(at) };
        assert_eq!(differences(LIKE, &winners, &before), [of(1, 1, 9), of(2, 0, 3), of(4, -1, 2)]);
        let likers = [(target(1), UserId(1)), (target(1), UserId(2))];
        assert_eq!(new_likers(&winners, &before), likers);
    }

    #[derive(Default)]
    struct Tables {
        rows: HashMap<Pair, LikeState>,
        counters: BTreeMap<Target, (i64, Micros)>,
    }

    impl Tables {
        fn write(&mut self, events: &[LikeEvent]) {
            let winners = coalesce(events);
            assert!(winners.is_sorted_by_key(|(pair, _)| *pair));
            let before = before(&winners, &self.rows);
            for ((pair, state), _) in winners.iter().zip(&before).filter(|(_, before)| **before != Before::NotOlder) {
                self.rows.insert(*pair, *state);
            }
            for difference in &differences(LIKE, &winners, &before) {
                let counter = self.counters.entry(difference.target).or_insert((0, Micros(0)));
                *counter = (counter.0 + difference.delta, counter.1.max(difference.at));
            }
        }
    }

    fn event() -> impl Strategy<Value = LikeEvent> {
        (1..4_u64, 1..4_u64, 1..20_i64, any::<bool>()).prop_map(|(target, user, at, liked)| LikeEvent {
            target: Target { kind: Kind(1), id: TargetId(target) },
            user: UserId(user),
            at: Micros(at),
            liked,
        })
    }

    proptest! {
        #[test]
        fn any_batching_redelivery_and_order_end_in_the_same_state(
            events in proptest::collection::vec(event(), 0..60),
            cuts in proptest::collection::vec(1..10_usize, 1..20),
            shuffle in any::<prop::sample::Index>(),
            again in any::<bool>(),
        ) {
            let mut at_once = Tables::default();
            at_once.write(&events);
            let mut arrived = events.clone();
            if again {
                arrived.extend_from_slice(&events);
            }
            if !arrived.is_empty() {
                let by = shuffle.index(arrived.len());
                arrived.rotate_left(by);
            }
            let mut in_batches = Tables::default();
            let mut rest = arrived.as_slice();
            for cut in cuts.iter().cycle() {
                if rest.is_empty() {
                    break;
                }
                let (batch, after) = rest.split_at((*cut).min(rest.len()));
                in_batches.write(batch);
                rest = after;
            }
            prop_assert_eq!(&at_once.rows, &in_batches.rows);
            for (target, (value, update_at)) in &in_batches.counters {
                let rows = || in_batches.rows.iter().filter(|((of, _), _)| of == target);
                prop_assert_eq!(*value, rows().filter(|(_, state)| state.liked).count() as i64);
                prop_assert_eq!(Some(*update_at), rows().map(|(_, state)| state.at).max());
            }
            prop_assert_eq!(at_once.counters, in_batches.counters);
        }

        #[test]
        fn a_count_is_added_once_whatever_the_batches_and_the_order(
            events in proptest::collection::vec((1..4_u64, 2..4_u8, -5..5_i64, 1..3_i64), 0..60),
            cuts in proptest::collection::vec(1..10_usize, 1..20),
            again in proptest::collection::vec(any::<prop::sample::Index>(), 0..40),
        ) {
            let event = |(number, (target, metric, delta, second)): (usize, &(u64, u8, i64, i64))| CountEvent {
                target: Target { kind: Kind(1), id: TargetId(*target) },
                metric: Metric(*metric),
                delta: *delta,
                at: Micros(second * 1_000_000 + 7),
                id: EventId(u128::try_from(number).unwrap().to_be_bytes()),
            };
            let events: Vec<CountEvent> = events.iter().enumerate().map(event).collect();
            let mut expected: BTreeMap<(Target, Metric), i64> = BTreeMap::new();
            for event in &events {
                *expected.entry((event.target, event.metric)).or_default() += event.delta;
            }
            let mut arrived = events.clone();
            for index in again.iter().filter(|_| !events.is_empty()) {
                arrived.insert(index.index(arrived.len()), events[index.index(events.len())]);
            }
            let (mut ledger, mut counters, mut rest) = (HashSet::new(), BTreeMap::new(), arrived.as_slice());
            for cut in cuts.iter().cycle() {
                if rest.is_empty() {
                    break;
                }
                let (batch, after) = rest.split_at((*cut).min(rest.len()));
                let mut batch = distinct(batch.iter().copied());
                batch.retain(|count| !ledger.contains(&Entry::of(count)));
                for sum in sums(&batch) {
                    *counters.entry((sum.target, sum.metric)).or_insert(0) += sum.delta;
                }
                ledger.extend(batch.iter().map(Entry::of));
                rest = after;
            }
            prop_assert_eq!(counters, expected);
        }

        #[test]
        fn a_redelivered_batch_changes_nothing(events in proptest::collection::vec(event(), 0..40)) {
            let mut tables = Tables::default();
            tables.write(&events);
            let winners = coalesce(&events);
            prop_assert_eq!(differences(LIKE, &winners, &before(&winners, &tables.rows)), []);
        }
    }
}
