//! Checks counters other than likes: each count event is applied once, and each counter that was set has the newest
//! value.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use tallyd_core::event::EventId;
use tallyd_core::model::{Kind, Metric, Target, TargetId};

use super::letters::Aside;
use super::{About, Class, LIKE, State, Violation};
use crate::history::{Answer, History, Loses, Micros, What, Window, event_id};

/// The metric whose counts the daemon adds to Redis and to a board.
pub const VIEW: u8 = 2;

/// While no fault lasts, a confirmed view is in Redis within this time.
const SHOWN_WITHIN: Micros = 5_000_000;

/// A count event that a user sent.
#[derive(Clone, Copy, Debug)]
pub struct Event {
    pub target: u64,
    pub metric: u8,
    pub delta: i64,
    pub at: Micros,
    /// True if MySQL must contain the count event.
    is_confirmed: bool,
    /// The start of the first call that sent the event. `ended` is the end of the last call that sent the event.
    pub began: Micros,
    pub ended: Micros,
}

/// Maps an event's number to the event. The map contains the count events that are in MySQL.
pub type Applied = BTreeMap<u64, Event>;

/// Returns the count events that are in the ledger (the table of applied events).
pub fn check(history: &History, state: &State, aside: &Aside, found: &mut Vec<Violation>) -> Applied {
    let sent = sent(history, aside);
    let mut named: HashMap<(i64, [u8; 16]), u64> = HashMap::new();
    let mut applied = Applied::new();
    for (event, it) in &sent {
        let key = ledger_key(*event, it);
        named.insert(key, *event);
        if state.ledger.contains(&key) {
            applied.insert(*event, *it);
        } else if it.is_confirmed {
            let says = format!("count event {event} of target {} is confirmed, but is not in the ledger", it.target);
            found.push(Violation::new(Class::Lost, About::Event { event: *event }, says));
        }
    }
    let unknown = state.ledger.iter().filter(|key| !named.contains_key(*key)).count();
    if unknown > 0 {
        let says = format!("the ledger has {unknown} count events that no user sent");
        found.push(Violation::new(Class::Invented, About::Nothing, says));
    }
    check_values(&sets(history, aside), state, &applied, found);
    check_zeros(history, &sent, found);
    applied
}

/// Checks that no client read zero views after Redis had a view. A number that Redis has lost must be unknown, or come from
/// MySQL.
fn check_zeros(history: &History, sent: &BTreeMap<u64, Event>, found: &mut Vec<Violation>) {
    let mut shown_from: HashMap<u64, Micros> = HashMap::new();
    for it in sent.values().filter(|it| it.is_confirmed && it.metric == VIEW) {
        let is_met = |window: &Window| window.begin <= it.ended + SHOWN_WITHIN && window.end >= it.began;
        if !history.windows.iter().any(is_met) {
            let from = shown_from.entry(it.target).or_insert(Micros::MAX);
            *from = (*from).min(it.ended + SHOWN_WITHIN);
        }
    }
    for call in &history.calls {
        let What::Zero { target } = call.what else { continue };
        let is_shown = shown_from.get(&target).is_some_and(|from| *from < call.begin);
        let went_back = |window: &Window| window.loses == Loses::Tables && window.begin <= call.end;
        if is_shown && !history.windows.iter().any(went_back) {
            let says = format!("a client read that target {target} has no views, although it had views before");
            found.push(Violation::new(Class::Lost, About::Views { target }, says));
        }
    }
}

fn ledger_key(event: u64, it: &Event) -> (i64, [u8; 16]) {
    let target = Target { kind: Kind(1), id: TargetId(it.target) };
    (it.at.div_euclid(1_000_000), EventId::of(target, Metric(it.metric), &event_id(event)).0)
}

/// Returns all count events that the broker may have received.
fn sent(history: &History, aside: &Aside) -> BTreeMap<u64, Event> {
    let mut sent: BTreeMap<u64, Event> = BTreeMap::new();
    for call in &history.calls {
        let What::Add { target, metric, delta, event } = call.what else { continue };
        let (at, is_confirmed) = match call.answer {
            Answer::Done { at } => (at, !history.may_lose(call) && !aside.has(&call.what, at)),
            Answer::NotConfirmed { at } => (at, false),
            Answer::Nothing | Answer::NotCounted | Answer::Unknown => continue,
        };
        let (began, ended) = (call.begin, call.end);
        let it = sent.entry(event).or_insert(Event { target, metric, delta, at, is_confirmed, began, ended });
        it.is_confirmed |= is_confirmed;
        it.began = it.began.min(call.begin);
        it.ended = it.ended.max(call.end);
    }
    sent
}

/// Events that give one counter a new value. The broker may have received each of these events.
#[derive(Default)]
struct Sets {
    confirmed: Option<(Micros, i64)>,
    sent: BTreeSet<(Micros, i64)>,
}

fn sets(history: &History, aside: &Aside) -> BTreeMap<(u64, u8), Sets> {
    let mut sets: BTreeMap<(u64, u8), Sets> = BTreeMap::new();
    for call in &history.calls {
        let What::Set { target, metric, value } = call.what else { continue };
        let (at, is_confirmed) = match call.answer {
            Answer::Done { at } => (at, !history.may_lose(call) && !aside.has(&call.what, at)),
            Answer::NotConfirmed { at } => (at, false),
            Answer::Nothing | Answer::NotCounted | Answer::Unknown => continue,
        };
        let of = sets.entry((target, metric)).or_default();
        of.sent.insert((at, value));
        if is_confirmed {
            of.confirmed = of.confirmed.max(Some((at, value)));
        }
    }
    sets
}

fn check_values(sets: &BTreeMap<(u64, u8), Sets>, state: &State, applied: &Applied, found: &mut Vec<Violation>) {
    let none = Sets::default();
    let mut counts: BTreeMap<(u64, u8), Vec<&Event>> = BTreeMap::new();
    for event in applied.values() {
        counts.entry((event.target, event.metric)).or_default().push(event);
    }
    let others = state.counters.keys().filter(|(_, metric)| *metric != LIKE);
    let set = state.sets.keys().filter(|of| state.sets[of].0 != 0);
    let all: BTreeSet<(u64, u8)> = counts.keys().chain(sets.keys()).chain(others).chain(set).copied().collect();
    for of in all {
        let (target, metric) = of;
        let about = About::Number { target, metric };
        let newest = state.sets.get(&of).copied().filter(|(at, _)| *at != 0);
        if let Some((class, says)) = judge_set(sets.get(&of).unwrap_or(&none), newest) {
            found.push(Violation::new(class, about.clone(), says));
        }
        let (since, base) = newest.unwrap_or((Micros::MIN, 0));
        let after = counts.get(&of).into_iter().flatten().filter(|event| event.at > since);
        let should = base + after.map(|event| event.delta).sum::<i64>();
        let is = state.counters.get(&of).copied().unwrap_or(0);
        if is != should {
            let says = format!(
                "`counter` has {is} for metric {metric} of target {target}, but the applied events result in {should}"
            );
            found.push(Violation::new(Class::of(is, should), about, says));
        }
    }
}

fn judge_set(sets: &Sets, row: Option<(Micros, i64)>) -> Option<(Class, String)> {
    match (row, sets.confirmed) {
        (None, Some((at, value))) => Some((Class::Lost, format!("it was set to {value} at {at}, but there is no row"))),
        (Some((at, value)), _) if !sets.sent.contains(&(at, value)) => {
            Some((Class::Invented, format!("its row says that it was set to {value} at {at}, but no user did that")))
        }
        (Some(row), Some(newest)) if row < newest => Some((
            Class::Reordered,
            format!("its row has {} from {}, but the value {} from {} is confirmed", row.1, row.0, newest.1, newest.0),
        )),
        _ => None,
    }
}

/// Checks that Redis has the same counters as MySQL, which must be true after a reconcile.
pub fn compare_with_redis(state: &State, found: &mut Vec<Violation>) {
    if state.unloaded > 0 {
        let says = format!("Redis has {} buckets that are not loaded", state.unloaded);
        found.push(Violation::new(Class::Lost, About::Nothing, says));
    }
    let all: BTreeSet<(u64, u8)> = state.counters.keys().chain(state.redis.keys()).copied().collect();
    for (target, metric) in all {
        let number = |of: &BTreeMap<(u64, u8), i64>| of.get(&(target, metric)).copied().unwrap_or(0);
        let (is, should) = (number(&state.redis), number(&state.counters));
        if is != should {
            let about = if metric == LIKE { About::Likes { target } } else { About::Number { target, metric } };
            let says = format!("Redis has {is} for metric {metric} of target {target}, but `counter` has {should}");
            found.push(Violation::new(Class::of(is, should), about, says));
        }
    }
}
