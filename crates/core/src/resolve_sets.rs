//! Counters with set events: which events of a batch are valid, and how they change the table `counter`. Pure: no I/O,
//! no clock.
//!
//! A counter's value is that of its newest set event, plus all count events with a later `at`, in any order of arrival.
//! If a set event arrives after newer count events, these are added to its value (table `recent_delta`).

use std::collections::{BTreeMap, HashMap};

use crate::event::{CountEvent, SetEvent};
use crate::model::{CounterKey, Difference, Micros};

/// The last set event of a counter. The derived order compares `at` first, then the value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct LastSet {
    /// The event's `at`, or 0 if no event has set the counter.
    pub at: Micros,
    pub value: i64,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Standing {
    pub counted: i128,
    /// The sum of the changes that have a later `at` than the event that sets the counter.
    pub since: i128,
    pub update_at: Option<Micros>,
}

#[derive(Debug, Default, PartialEq, Eq)]
pub struct Resolved {
    /// Sorted by key. Without counters whose newest set event MySQL already has.
    pub won: Vec<(CounterKey, LastSet)>,
    /// The valid count events, sorted by their keys in the ledger. A set event makes the older count events of its
    /// counter void.
    pub live: Vec<CountEvent>,
}

/// Returns the newest set event of each counter. If two set events have the same `at`, the event with the larger value
/// wins. The order of arrival does not matter.
pub fn newest(sets: impl Iterator<Item = SetEvent>) -> BTreeMap<CounterKey, LastSet> {
    let mut newest = BTreeMap::new();
    for SetEvent { target, metric, value, at } in sets {
        let set = LastSet { at, value };
        let last = newest.entry((target, metric)).or_insert(set);
        *last = set.max(*last);
    }
    newest
}

pub fn resolve(
    sets: &BTreeMap<CounterKey, LastSet>,
    mut counts: Vec<CountEvent>,
    known: &HashMap<CounterKey, LastSet>,
) -> Resolved {
    let is_newer = |(number, set): &(&CounterKey, &LastSet)| known.get(*number).is_none_or(|last| *set > last);
    let won: Vec<(CounterKey, LastSet)> = sets.iter().filter(is_newer).map(|(number, set)| (*number, *set)).collect();
    counts.retain(|count| {
        let number = (count.target, count.metric);
        let last = known.get(&number).max(sets.get(&number));
        last.is_none_or(|last| count.at > last.at)
    });
    Resolved { won, live: counts }
}

impl Resolved {
    /// Sorted by key. `None` if a difference does not fit into 64 bits.
    pub fn differences(&self, standing: &HashMap<CounterKey, Standing>) -> Option<Vec<Difference>> {
        let mut gains: BTreeMap<CounterKey, (i128, Micros)> = BTreeMap::new();
        for (number, set) in &self.won {
            let Standing { counted, since, .. } = standing.get(number).copied().unwrap_or_default();
            gains.insert(*number, (i128::from(set.value) + since - counted, set.at));
        }
        for CountEvent { target, metric, delta, at, .. } in &self.live {
            let gain = gains.entry((*target, *metric)).or_insert((0, *at));
            *gain = (gain.0 + i128::from(*delta), gain.1.max(*at));
        }
        let difference = |((target, metric), (delta, at)): (CounterKey, (i128, Micros))| {
            Some(Difference { target, metric, delta: i64::try_from(delta).ok()?, at })
        };
        gains.into_iter().map(difference).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeSet, HashSet};

    use proptest::prelude::*;

    use super::*;
    use crate::coalesce::{Entry, distinct};
    use crate::event::{EventId, Message};
    use crate::model::{Kind, Metric, Target, TargetId};

    #[test]
    fn a_set_event_that_mysql_already_has_is_not_written_again() {
        let number = (Target { kind: Kind(1), id: TargetId(1) }, Metric(3));
        let set = |at, value| LastSet { at: Micros(at), value };
        for (event, is_won) in [(set(5, 7), false), (set(5, 8), true), (set(5, 6), false), (set(6, 0), true)] {
            let resolved = resolve(&[(number, event)].into(), Vec::new(), &[(number, set(5, 7))].into());
            assert_eq!(resolved.won, if is_won { vec![(number, event)] } else { Vec::new() });
        }
    }

    /// The tables of the test, which the test writes by the consumer's rules.
    #[derive(Default)]
    struct Tables {
        counter: BTreeMap<CounterKey, (i64, Micros)>,
        ledger: HashSet<Entry>,
        number_set: HashMap<CounterKey, LastSet>,
        recent: BTreeMap<(CounterKey, Micros, EventId), i64>,
    }

    impl Tables {
        fn write(&mut self, events: &[Message]) {
            let counts =
                events.iter().filter_map(|event| if let Message::Count(count) = event { Some(*count) } else { None });
            let mut counts = distinct(counts);
            counts.retain(|count| self.ledger.insert(Entry::of(count)));
            let sets =
                newest(events.iter().filter_map(|event| if let Message::Set(set) = event { Some(*set) } else { None }));
            let resolved = resolve(&sets, counts, &self.number_set);
            let standing = |(number, set): &(CounterKey, LastSet)| {
                let counter = self.counter.get(number);
                let counted = i128::from(counter.map_or(0, |(value, _)| *value));
                let after = |((of, at, _), _): &(&(CounterKey, Micros, EventId), &i64)| of == number && *at > set.at;
                let since = self.recent.iter().filter(after).map(|(_, delta)| i128::from(*delta)).sum();
                (*number, Standing { counted, since, update_at: counter.map(|(_, at)| *at) })
            };
            let standing: HashMap<CounterKey, Standing> = resolved.won.iter().map(standing).collect();
            for Difference { target, metric, delta, at } in resolved.differences(&standing).expect("small numbers") {
                let counter = self.counter.entry((target, metric)).or_insert((0, at));
                *counter = (counter.0 + delta, counter.1.max(at));
            }
            self.number_set.extend(resolved.won);
            self.recent.extend(resolved.live.iter().map(|it| (((it.target, it.metric), it.at, it.id), it.delta)));
        }

        fn values(&self) -> BTreeMap<CounterKey, i64> {
            self.counter.iter().map(|(number, (value, _))| (*number, *value)).filter(|(_, value)| *value != 0).collect()
        }
    }

    fn number_of(event: &Message) -> CounterKey {
        match event {
            Message::Count(event) => (event.target, event.metric),
            Message::Set(event) => (event.target, event.metric),
            other => panic!("neither a count nor a set: {other:?}"),
        }
    }

    /// Computes the expected counters from all events, independent of their order.
    fn model(events: &[Message]) -> BTreeMap<CounterKey, i64> {
        let numbers: BTreeSet<CounterKey> = events.iter().map(number_of).collect();
        let value = |number: &CounterKey| {
            let of = || events.iter().filter(|event| number_of(event) == *number);
            let set = of()
                .filter_map(|event| if let Message::Set(set) = event { Some((set.at, set.value)) } else { None })
                .max();
            let (since, value) = set.unwrap_or((Micros(0), 0));
            let added = of().filter_map(|event| match event {
                Message::Count(count) if count.at > since => Some(count.delta),
                _ => None,
            });
            value + added.sum::<i64>()
        };
        numbers.iter().map(|number| (*number, value(number))).filter(|(_, value)| *value != 0).collect()
    }

    fn event(number: usize, (target, at, is_set, amount): (u64, i64, bool, i64)) -> Message {
        let (target, metric, at) = (Target { kind: Kind(1), id: TargetId(target) }, Metric(3), Micros(at));
        match is_set {
            true => Message::Set(SetEvent { target, metric, value: amount, at }),
            false => {
                let id = EventId(u128::try_from(number).expect("a few").to_be_bytes());
                Message::Count(CountEvent { target, metric, delta: amount, at, id })
            }
        }
    }

    proptest! {
        #[test]
        fn numbers_that_are_set_end_the_same_in_any_order_batching_and_redelivery(
            events in proptest::collection::vec((1..3_u64, 1..12_i64, prop::bool::weighted(0.3), -5..9_i64), 1..40),
            order in proptest::collection::vec(any::<prop::sample::Index>(), 0..80),
            cuts in proptest::collection::vec(1..7_usize, 1..20),
        ) {
            let events: Vec<Message> = events.into_iter().enumerate().map(|(number, it)| event(number, it)).collect();
            // Each event arrives at least once. Some events arrive more than once, at any positions.
            let mut arrived = events.clone();
            for (place, index) in order.iter().enumerate() {
                match place % 2 {
                    0 => arrived.insert(index.index(arrived.len()), events[index.index(events.len())]),
                    _ => { let by = index.index(arrived.len()); arrived.rotate_left(by); }
                }
            }
            let mut tables = Tables::default();
            let mut rest = arrived.as_slice();
            for cut in cuts.iter().cycle() {
                if rest.is_empty() {
                    break;
                }
                let (batch, after) = rest.split_at((*cut).min(rest.len()));
                tables.write(batch);
                rest = after;
            }
            prop_assert_eq!(tables.values(), model(&events));
            let before = tables.counter.clone();
            tables.write(&arrived);
            prop_assert_eq!(tables.counter, before, "a redelivered batch changes nothing");
        }
    }

    fn set(at: i64, value: i64) -> Message {
        event(0, (1, at, true, value))
    }

    #[test]
    fn at_equal_times_the_larger_value_wins_and_a_count_is_void() {
        for batches in [
            vec![vec![set(5, 3)], vec![set(5, 7)]],
            vec![vec![set(5, 7)], vec![set(5, 3)]],
            vec![vec![set(5, 7), set(5, 3)]],
        ] {
            let mut tables = Tables::default();
            for batch in &batches {
                tables.write(batch);
            }
            tables.write(&[event(1, (1, 5, false, 100)), event(2, (1, 6, false, 1))]);
            assert_eq!(tables.values().into_values().collect::<Vec<_>>(), [8], "{batches:?}");
        }
    }

    #[test]
    fn a_difference_that_no_slot_holds_is_none() {
        let Message::Set(SetEvent { target, metric, .. }) = set(5, 7) else { panic!("a set") };
        let resolved =
            Resolved { won: vec![((target, metric), LastSet { at: Micros(5), value: 7 })], live: Vec::new() };
        let differences = |counted: i128| {
            resolved.differences(&HashMap::from([((target, metric), Standing { counted, ..Standing::default() })]))
        };
        assert_eq!(differences(i128::from(i64::MIN)), None);
        let least = i128::from(i64::MIN) + 8;
        assert_eq!(differences(least), Some(vec![Difference { target, metric, delta: i64::MAX, at: Micros(5) }]));
    }
}
