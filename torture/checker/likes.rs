//! Checks like records: the newest event of each target and user wins.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use super::letters::Aside;
use super::{About, Class, LIKE, State, Violation};
use crate::history::{Answer, History, Micros, What};

/// The newer of two events wins. If both events have the same `at`, the unlike wins.
type Version = (Micros, bool);

#[derive(Default)]
struct Known {
    /// The newest event that must be in the table.
    confirmed: Option<Version>,
    /// All events that can be in the table.
    sent: BTreeSet<Version>,
}

pub fn check(history: &History, state: &State, aside: &Aside, found: &mut Vec<Violation>) {
    let mut known: HashMap<(u64, u64), Known> = HashMap::new();
    for call in &history.calls {
        let What::Like { target, user, liked } = call.what else { continue };
        let pair = known.entry((target, user)).or_default();
        let is_del = !liked;
        match call.answer {
            Answer::Done { at } => {
                pair.sent.insert((at, is_del));
                if !history.may_lose(call) && !aside.has(&call.what, at) {
                    pair.confirmed = pair.confirmed.max(Some((at, is_del)));
                }
            }
            Answer::NotConfirmed { at } => drop(pair.sent.insert((at, is_del))),
            // Nothing was published.
            Answer::Nothing | Answer::NotCounted | Answer::Unknown => {}
        }
    }
    let none = Known::default();
    let pairs: BTreeSet<(u64, u64)> = known.keys().chain(state.rows.keys()).copied().collect();
    for pair in pairs {
        let row = state.rows.get(&pair).map(|(at, liked)| (*at, !liked));
        if let Some((class, says)) = judge(known.get(&pair).unwrap_or(&none), row) {
            let (target, user) = pair;
            found.push(Violation::new(class, About::Pair { target, user }, says));
        }
    }
    check_counters(state, found);
}

fn judge(known: &Known, row: Option<Version>) -> Option<(Class, String)> {
    let say = |version: Version| format!("the {} of {}", if version.1 { "unlike" } else { "like" }, version.0);
    match (row, known.confirmed) {
        (None, None) => None,
        (None, Some(newest)) => Some((Class::Lost, format!("{} is confirmed, but there is no row", say(newest)))),
        (Some(row), _) if !known.sent.contains(&row) => {
            Some((Class::Invented, format!("the row says {}, but no user sent that", say(row))))
        }
        (Some(row), Some(newest)) if row < newest => {
            Some((Class::Reordered, format!("the row says {}, but {} is confirmed", say(row), say(newest))))
        }
        _ => None,
    }
}

/// Checks that each target's counter equals the number of its rows.
fn check_counters(state: &State, found: &mut Vec<Violation>) {
    let mut liked: BTreeMap<u64, i64> = BTreeMap::new();
    for ((target, _), (_, likes)) in &state.rows {
        *liked.entry(*target).or_default() += i64::from(*likes);
    }
    let counted = state.counters.keys().filter(|(_, metric)| *metric == LIKE).map(|(target, _)| *target);
    let targets: BTreeSet<u64> = liked.keys().copied().chain(counted).collect();
    for target in targets {
        let rows = liked.get(&target).copied().unwrap_or(0);
        let counter = state.counters.get(&(target, LIKE)).copied().unwrap_or(0);
        if rows != counter {
            let says = format!("`counter` says {counter} likes of target {target}, but the target has {rows} rows");
            found.push(Violation::new(Class::of(counter, rows), About::Likes { target }, says));
        }
    }
}
