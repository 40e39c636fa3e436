//! Decides from everything that was counted and published whether a repair was right. Does no I/O.

use std::collections::{BTreeSet, HashMap};

use crate::common::target;
use tallyd_core::event::LikeEvent;
use tallyd_core::model::{Micros, UserId};

/// A count in Redis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Act {
    /// The counted event. The event's `at` is the time when Redis counted it, by Redis' clock.
    pub event: LikeEvent,
    /// The broker got the event at this time or earlier. `None` if it was never published.
    pub published: Option<Micros>,
}

/// A row of `repair`: the amount that a run added, or wanted to add, to a target in Redis.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Row {
    /// Redis' count at the cut of the measurement.
    pub before: i64,
    pub added: i64,
    /// `None` if the run was killed before it noted an outcome.
    pub outcome: Option<String>,
    /// The time when the run began, and the time when it wrote the row.
    pub began: Micros,
    pub noted: Micros,
}

/// Both counts of a target from this instant on, without any repair and without events in flight.
#[derive(Clone, Copy, Debug)]
struct Step {
    at: Micros,
    redis: i64,
    mysql: i64,
}

/// Returns the first wrong repair of a target, if there is one. The repairs must be in order.
///
/// A repair is right if one instant explains the repair. This instant is the repair's cut. At the cut Redis had the
/// count in the repair's row. This count was wrong by at least the added amount, and in the same direction. Then the
/// repair can't have made a right counter wrong. The repair also can't have made a wrong counter wrong in the other
/// direction.
///
/// * The cut is after the run's begin, and at least `grace` before the row was written. A run waits for `grace` between
///   the last sample and its fence, and repairs after the fence.
/// * Redis' count at an instant is the sum of all earlier counts and repairs. If a run was killed, it is unknown
///   whether Redis has added the run's repair. So the proof keeps every possible sum that explains all repairs so far.
///   A rejected repair added nothing, but its measurement is checked, too.
/// * MySQL's count at an instant comes from all published events whose `at` is not later. The repair must lead towards
///   this count, with one exception. If an event reached the broker later than `grace` after the cut, it can have been
///   behind the fence. For such a like Redis can look too high by one. For such an unlike it can look too low by one.
///   The exception does not apply to events that were published within `grace` after their `at`.
pub fn first_wrong<'a>(acts: &[Act], rows: &'a [Row], grace: i64) -> Option<&'a Row> {
    let steps = steps(acts);
    let mut sums = BTreeSet::from([0]);
    for row in rows {
        let right: BTreeSet<i64> =
            sums.into_iter().filter(|sum| is_explained(acts, &steps, row, *sum, grace)).collect();
        if right.is_empty() {
            return Some(row);
        }
        let added = right.iter().map(|sum| sum + row.added);
        sums = match row.outcome.as_deref() {
            Some("done") => added.collect(),
            Some(_) => right,
            None => right.iter().copied().chain(added).collect(),
        };
    }
    None
}

/// Tells whether there is a cut that explains the repair, if `sum` was added before.
fn is_explained(acts: &[Act], steps: &[Step], row: &Row, sum: i64, grace: i64) -> bool {
    let until = Micros(row.noted.0 - grace);
    let ends = steps.iter().skip(1).map(|step| step.at).chain([Micros(i64::MAX)]);
    steps.iter().zip(ends).any(|(step, end)| {
        let cut = step.at.max(row.began);
        if end <= row.began || cut > until || step.redis + sum != row.before {
            return false;
        }
        let late = |liked| {
            let is_late =
                |act: &&Act| act.event.at <= cut && act.published.is_some_and(|published| published.0 > cut.0 + grace);
            acts.iter().filter(is_late).filter(|act| act.event.liked == liked).count() as i64
        };
        let drift = row.before - step.mysql;
        match row.added {
            ..=-1 => -row.added <= drift + late(true),
            0 => false,
            1.. => row.added <= late(false) - drift,
        }
    })
}

/// Returns both counts after each act.
fn steps(acts: &[Act]) -> Vec<Step> {
    let mut acts: Vec<&Act> = acts.iter().collect();
    acts.sort_by_key(|act| act.event.at);
    let mut last = Step { at: Micros(0), redis: 0, mysql: 0 };
    let mut liked: HashMap<UserId, bool> = HashMap::new();
    let mut steps = vec![last];
    for Act { event, published } in acts {
        last.at = event.at;
        last.redis += if event.liked { 1 } else { -1 };
        if published.is_some() {
            let before = liked.insert(event.user, event.liked).unwrap_or(false);
            last.mysql += i64::from(event.liked) - i64::from(before);
        }
        steps.push(last);
    }
    steps
}

const GRACE: i64 = 100;

/// Makes a user's like or unlike at the time `at`. The event is published `later` microseconds after `at`, or never.
fn act(user: u64, at: i64, liked: bool, later: Option<i64>) -> Act {
    let event = LikeEvent { target: target(1), user: UserId(user), at: Micros(at), liked };
    Act { event, published: later.map(|later| Micros(at + later)) }
}

/// Makes a repair by a run that began at 1,000 and wrote the row at 1,500. The latest possible cut of this repair is
/// 1,400.
fn row(before: i64, added: i64, outcome: Option<&str>) -> Row {
    Row { before, added, outcome: outcome.map(str::to_owned), began: Micros(1_000), noted: Micros(1_500) }
}

fn is_right(acts: &[Act], rows: &[Row]) -> bool {
    first_wrong(acts, rows, GRACE).is_none()
}

#[test]
fn a_repair_is_right_where_something_was_lost_and_wrong_where_nothing_was() {
    let done = Some("done");
    let lost = [act(1, 10, true, Some(5)), act(2, 20, true, None), act(3, 30, true, Some(5))];
    assert!(is_right(&lost, &[row(3, -1, done)]));
    assert!(!is_right(&lost, &[row(3, -2, done)]), "too much");
    assert!(!is_right(&lost, &[row(3, 1, done)]), "the wrong direction");
    assert!(!is_right(&lost, &[row(2, -1, done)]), "Redis never had this count during the run");
    assert!(!is_right(&lost, &[row(3, -1, done), row(2, -1, done)]), "twice");
    assert!(is_right(&lost, &[row(3, -1, Some("stale")), row(3, -1, done)]), "the first repair was rejected");
    assert!(
        is_right(&lost, &[row(3, -1, None), row(3, -1, done)]),
        "the first run was killed before its repair was added"
    );
    assert!(!is_right(&lost, &[row(3, -1, None), row(3, -1, done), row(2, -1, done)]));
    assert!(!is_right(&[act(1, 10, true, Some(5))], &[row(1, -1, done)]), "nothing was lost");
    // First the retry of a like that had counted. Then a lost publish between two publishes that arrived.
    assert!(is_right(&[act(1, 10, true, None), act(1, 20, true, Some(5))], &[row(2, -1, done)]));
    let flips = [act(1, 10, true, Some(5)), act(1, 20, false, None), act(1, 30, true, Some(5))];
    assert!(!is_right(&flips, &[row(1, -1, done)]), "Redis is right again");
}

#[test]
fn a_late_like_explains_a_repair_only_if_it_came_later_than_the_grace_after_the_cut() {
    let done = Some("done");
    for (at, later, expected) in [
        (1_200, Some(50), false),
        (1_390, Some(100), false),
        (1_200, Some(101), true),
        (1_000, Some(501), true),
        // The first like is counted after the cut. The second like is counted before the run begins, and is published
        // in time.
        (1_401, Some(500), false),
        (500, Some(599), false),
    ] {
        assert_eq!(is_right(&[act(1, at, true, later)], &[row(1, -1, done)]), expected, "{at} {later:?}");
    }
    // The like arrived in the end, so exactly the subtracted amount must be added again.
    let late = [act(1, 1_200, true, Some(400))];
    let back = Row { began: Micros(2_000), noted: Micros(2_500), ..row(0, 1, done) };
    assert!(is_right(&late, &[row(1, -1, done), back.clone()]));
    assert!(!is_right(&late, &[row(1, -1, done), back.clone(), back]));
    let unlike = [act(1, 10, true, Some(5)), act(1, 1_200, false, Some(300))];
    assert!(is_right(&unlike, &[row(0, 1, done)]));
    assert!(!is_right(&unlike, &[row(0, -1, done)]));
}
