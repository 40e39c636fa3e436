//! Checks boards. The board must contain each addition once, unless Redis has lost the addition. The frozen zset of a
//! closed period must equal the period's archive.

use std::collections::{BTreeMap, BTreeSet};

use super::numbers::{Applied, VIEW};
use super::{About, Archive, Class, State, Violation};
use crate::history::{Answer, Call, History, Loses, What, period};

/// Users add scores to this board.
pub const HOT: &str = "hot";
/// The daemon adds the counts of views to this board.
pub const SEEN: &str = "seen";
/// The periods of this board are days in the past.
pub const PAST: &str = "past";

/// The lowest and the highest score that a member can have.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Range {
    least: i64,
    most: i64,
}

impl Range {
    pub(super) fn add(&mut self, delta: i64, is_certain: bool) {
        self.least += if is_certain { delta } else { 0 };
        self.most += delta;
    }

    /// The score can lack this addition.
    pub(super) fn may_lack(&mut self, delta: i64) {
        self.least -= delta.max(0);
        self.most -= delta.min(0);
    }

    fn judge(self, is: i64) -> Option<Class> {
        match is {
            is if is < self.least => Some(Class::Lost),
            is if is > self.most => Some(if self.most == 0 { Class::Invented } else { Class::Doubled }),
            _ => None,
        }
    }
}

pub fn check(history: &History, state: &State, applied: &Applied, found: &mut Vec<Violation>) {
    let mut hot: BTreeMap<u64, Range> = BTreeMap::new();
    let mut past: BTreeMap<i32, BTreeMap<u64, Range>> = BTreeMap::new();
    for call in &history.calls {
        let is_certain = matches!(call.answer, Answer::Done { .. }) && !history.excuses(Loses::Boards, call);
        let range = match call.what {
            What::Gain { member, .. } => hot.entry(member).or_default(),
            What::Late { day, member, .. } => past.entry(day).or_default().entry(member).or_default(),
            _ => continue,
        };
        if !matches!(call.answer, Answer::Nothing | Answer::NotCounted)
            && let What::Gain { delta, .. } | What::Late { delta, .. } = call.what
        {
            range.add(delta, is_certain);
        }
    }
    let mut seen: BTreeMap<u64, Range> = BTreeMap::new();
    for event in applied.values().filter(|event| event.metric == VIEW) {
        let of = until_added(&Call { begin: event.began, end: event.ended, ..NOBODY });
        let is_certain = ![Loses::Boards, Loses::BoardOfViews].iter().any(|loses| history.excuses(*loses, &of));
        seen.entry(event.target).or_default().add(event.delta, is_certain);
    }
    for (target, delta) in undone(history) {
        seen.entry(target).or_default().add(delta, false);
    }
    for (board, ranges) in [(HOT, &hot), (SEEN, &seen)] {
        for (name, scores) in [("total", total(state, board)), ("its days", days(state, board))] {
            compare(ranges, &scores, found, |member| about(board, member), &format!("board {board}, {name}"));
        }
    }
    check_past(&past, state, found);
}

/// Returns the call with the time until the daemon has added its event to the board. The daemon does this after the
/// commit in MySQL.
pub(super) fn until_added(call: &Call) -> Call {
    Call { end: call.end.saturating_add(LATE), ..*call }
}

/// Finds the views that MySQL may have lost after the daemon had added these views to the board. A lost view stays on
/// the board. If the view is sent again, the daemon adds the view to the board a second time.
fn undone(history: &History) -> Vec<(u64, i64)> {
    let (mut before, mut undone) = (BTreeSet::new(), BTreeMap::new());
    for call in &history.calls {
        let What::Add { target, metric: VIEW, delta, event } = call.what else { continue };
        if !history.excuses(Loses::Tables, call) {
            before.extend(matches!(call.answer, Answer::Done { .. }).then_some(event));
        } else if !before.contains(&event) {
            undone.insert(event, (target, delta));
        }
    }
    undone.into_values().collect()
}

/// Without a fault, the daemon adds a count to the board within this time. In microseconds.
const LATE: i64 = 2_000_000;

const NOBODY: Call = Call { begin: 0, end: 0, who: 0, what: What::Read { target: 0 }, answer: Answer::Nothing };

fn about(board: &str, member: u64) -> About {
    if board == HOT { About::Gain { member } } else { About::Views { target: member } }
}

pub(super) fn total(state: &State, board: &str) -> BTreeMap<u64, i64> {
    state.boards.get(&(board.to_owned(), "total".to_owned())).cloned().unwrap_or_default()
}

/// Returns the scores of all days together. If midnight passed during the run, the users added scores to two days, and
/// the first day may already be archived.
fn days(state: &State, board: &str) -> BTreeMap<u64, i64> {
    let mut sum: BTreeMap<u64, i64> = BTreeMap::new();
    let live = state.boards.iter().filter(|((name, period), _)| name == board && period != "total");
    let scores = live.flat_map(|(_, scores)| scores.iter().map(|(member, score)| (*member, *score)));
    let closed = state.archives.iter().filter(|((name, _), _)| name == board);
    for (member, score) in scores.chain(closed.flat_map(|(_, archive)| archive.places.iter().copied())) {
        *sum.entry(member).or_default() += score;
    }
    sum
}

pub(super) fn compare(
    ranges: &BTreeMap<u64, Range>,
    scores: &BTreeMap<u64, i64>,
    found: &mut Vec<Violation>,
    about: impl Fn(u64) -> About,
    of: &str,
) {
    let members: BTreeSet<u64> = ranges.keys().chain(scores.keys()).copied().collect();
    for member in members {
        let range = ranges.get(&member).copied().unwrap_or_default();
        let score = scores.get(&member).copied().unwrap_or(0);
        if let Some(class) = range.judge(score) {
            let Range { least, most } = range;
            let says = format!("{of}: member {member} has the score {score}, but its additions give {least} to {most}");
            found.push(Violation::new(class, about(member), says));
        }
    }
}

fn day_of(period: &str) -> i32 {
    let first = jiff::civil::date(1970, 1, 1);
    let days = period.parse::<jiff::civil::Date>().ok().and_then(|date| date.since(first).ok());
    days.map_or(0, |days| days.get_days())
}

fn check_past(past: &BTreeMap<i32, BTreeMap<u64, Range>>, state: &State, found: &mut Vec<Violation>) {
    let none = Archive::default();
    for ((board, named), archive) in &state.archives {
        if board == PAST && !archive.places.is_empty() && !past.keys().any(|day| period(*day) == *named) {
            let says = format!("board `past`, day {named}: this day is archived, but nothing was added to it");
            let about = About::Late { day: day_of(named), member: None };
            found.push(Violation::new(Class::Invented, about, says));
        }
    }
    for (day, ranges) in past {
        let key = (PAST.to_owned(), period(*day));
        let archive = state.archives.get(&key).unwrap_or(&none);
        let about = About::Late { day: *day, member: None };
        let is_expected = ranges.values().any(|range| range.least > 0);
        let is_done = ["done", "ended"].contains(&archive.state.as_str());
        if !is_done && (is_expected || !archive.state.is_empty()) {
            let says = format!("board `past`, day {}: its archive is \"{}\", not done", key.1, archive.state);
            found.push(Violation::new(Class::Lost, about.clone(), says));
            continue;
        }
        if !archive.is_gapless && !archive.places.is_empty()
            || !archive.places.is_sorted_by(|one, next| one.1 >= next.1)
        {
            let says = format!("board `past`, day {}: the archive has gaps, or is not sorted by score", key.1);
            found.push(Violation::new(Class::Reordered, about.clone(), says));
        }
        let scores: BTreeMap<u64, i64> = archive.places.iter().copied().collect();
        if scores.len() != archive.places.len() {
            let says = format!("board `past`, day {}: the archive has a member twice", key.1);
            found.push(Violation::new(Class::Doubled, about, says));
        }
        let of = format!("archive of board `past`, day {}", key.1);
        compare(ranges, &scores, found, |member| About::Late { day: *day, member: Some(member) }, &of);
        if let Some(frozen) = state.frozen.get(&key)
            && *frozen != scores
        {
            let says = format!("board `past`, day {}: the archive differs from the board's copy in Redis", key.1);
            found.push(Violation::new(Class::Lost, About::Late { day: *day, member: None }, says));
        }
        if state.boards.get(&key).is_some_and(|live| !live.is_empty()) {
            let says = format!("board `past`, day {}: a late addition is missing in the archive", key.1);
            found.push(Violation::new(Class::Lost, About::Late { day: *day, member: None }, says));
        }
    }
}
