//! Orders likes whose times have a coarse unit: within one unit, the order of arrival decides.
//!
//! These races are possible:
//!
//! * A is a like. B is an unlike of the same user and target in the same second. The daemon writes A and then B, and
//!   crashes before it acknowledges the two events. The broker delivers both again. If an event has the same second as
//!   the row, the event wins. The row's time then grows by one microsecond. So A wins again for a moment. But the
//!   broker redelivers events in the order of the queue, so B arrives after A and wins.
//! * The broker redelivers only A. The row already has A's state, so the second delivery changes nothing.
//! * A is a like. B is an event from an earlier second, but B arrives after A. A wins, because the newer version wins
//!   for all events.

use std::collections::{BTreeMap, HashMap};

use crate::coalesce::{Before, LikeState, Pair};
use crate::event::LikeEvent;
use crate::model::Micros;
use crate::unit::Unit;

/// Returns the new row states, sorted by key, and the former state of each row. `events` are in the order of arrival.
/// The `at` of each event is rounded down to a whole `unit`. If a row does not exist, `old` has no entry for it.
pub fn in_order_of_arrival(
    events: &[LikeEvent],
    unit: Unit,
    old: &HashMap<Pair, LikeState>,
) -> (Vec<(Pair, LikeState)>, Vec<Before>) {
    let mut states: BTreeMap<Pair, Option<LikeState>> = BTreeMap::new();
    for event in events {
        let pair = (event.target, event.user);
        let state = states.entry(pair).or_insert_with(|| old.get(&pair).copied());
        *state = Some(after(*state, event, unit));
    }
    let last = states.into_iter().filter_map(|(pair, state)| Some((pair, state?)));
    let meets = |(pair, state): (Pair, LikeState)| match old.get(&pair) {
        None => ((pair, state), Before::Absent),
        Some(old) if *old == state => ((pair, state), Before::NotOlder),
        Some(old) => ((pair, state), Before::Older(old.liked)),
    };
    last.map(meets).unzip()
}

fn after(state: Option<LikeState>, event: &LikeEvent, unit: Unit) -> LikeState {
    let (from, until) = (event.at, unit.end(event.at));
    match state {
        Some(state) if state.at > until || (state.at >= from && state.liked == event.liked) => state,
        Some(state) if state.at >= from => LikeState { at: Micros(state.at.0 + 1).min(until), liked: event.liked },
        _ => LikeState { at: from, liked: event.liked },
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::model::{Kind, Target, TargetId, UserId};

    fn event(user: u64, at_s: i64, liked: bool) -> LikeEvent {
        let target = Target { kind: Kind(1), id: TargetId(42) };
        LikeEvent { target, user: UserId(user), at: Micros(at_s * 1_000_000), liked }
    }

    /// Writes each batch as a transaction would write it.
    fn write<'a>(rows: &mut HashMap<Pair, LikeState>, batches: impl IntoIterator<Item = &'a [LikeEvent]>) {
        for batch in batches {
            let (winners, before) = in_order_of_arrival(batch, Unit::S, rows);
            for ((pair, state), before) in winners.iter().zip(before) {
                let is = rows.insert(*pair, *state);
                assert_eq!(before == Before::Absent, is.is_none());
                assert_eq!(before == Before::NotOlder, is == Some(*state));
            }
        }
    }

    fn liked(rows: &HashMap<Pair, LikeState>) -> BTreeMap<u64, bool> {
        rows.iter().map(|((_, user), state)| (user.0, state.liked)).collect()
    }

    #[test]
    fn a_version_never_leaves_the_unit_of_its_event() {
        let events: Vec<LikeEvent> =
            (0..2_501).map(|number| LikeEvent { at: Micros(7_000), ..event(1, 0, number % 2 == 0) }).collect();
        let (winners, _) = in_order_of_arrival(&events, Unit::Ms, &HashMap::new());
        assert_eq!(winners[0].1, LikeState { at: Micros(7_999), liked: true });
    }

    proptest! {
        /// The model expects one winner for each user: of the events with the latest `at`, the event that arrived last.
        #[test]
        fn the_later_arrival_wins_within_a_second_in_any_batches_and_redelivery(
            events in prop::collection::vec((1..4_u64, 1..4_i64, any::<bool>()), 1..30),
            cuts in prop::collection::vec(1..6_usize, 30),
            redelivered in 0..30_usize,
        ) {
            let events: Vec<LikeEvent> = events.into_iter().map(|(user, at, liked)| event(user, at, liked)).collect();
            let mut model: BTreeMap<u64, (i64, bool)> = BTreeMap::new();
            for event in &events {
                let newest = model.entry(event.user.0).or_insert((event.at.0, event.liked));
                if event.at.0 >= newest.0 {
                    *newest = (event.at.0, event.liked);
                }
            }
            let expected: BTreeMap<u64, bool> = model.into_iter().map(|(user, (_, liked))| (user, liked)).collect();
            let mut batches: Vec<&[LikeEvent]> = Vec::new();
            let mut rest = events.as_slice();
            for cut in cuts {
                let (batch, others) = rest.split_at(cut.min(rest.len()));
                batches.push(batch);
                rest = others;
            }
            let mut rows = HashMap::new();
            write(&mut rows, batches.iter().copied().filter(|batch| !batch.is_empty()));
            prop_assert_eq!(&liked(&rows), &expected);
            // The broker redelivers this event and all later events, in other batches.
            let again = &events[redelivered.min(events.len() - 1)..];
            write(&mut rows, again.chunks(2));
            prop_assert_eq!(&liked(&rows), &expected);
        }
    }
}
