//! Checks whether a repair was right, with the help of all counted and published events. Does no I/O.

use std::collections::{BTreeSet, HashMap};

use crate::common::target;
use tallyd_core::event::LikeEvent;
use tallyd_core::model::{Micros, UserId};

/// A count in Redis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Act {
    /// The counted event. The event's `at` is the time on Redis' clock when Redis counted the event.
    pub event: LikeEvent,
    /// The latest time at which the broker can have got the event, or `None` if the event was never published.
    pub published: Option<Micros>,
}

/// A row of `repair`, with the amount that a run added to a counter in Redis, or wanted to add.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Row {
    /// The count that Redis had at the time of the measurement, the cut.
    pub before: i64,
    pub added: i64,
    /// The noted outcome, or `None` if the run was killed before it noted an outcome.
    pub outcome: Option<String>,
    /// The time when the run began, and the time when it wrote the row.
    pub began: Micros,
    pub noted: Micros,
}

/// The counts of a target in Redis and in MySQL from the time `at` on. Repairs are not included. MySQL's count already
/// includes the events in flight.
#[derive(Clone, Copy, Debug)]
struct Step {
    at: Micros,
    redis: i64,
    mysql: i64,
}

/// Returns the first wrong repair of a target, or `None` if all repairs were right. The repairs must be in order.
///
/// The cut is the time at which the run measured the counter. Several cuts can be possible. A repair is right if two
/// conditions hold for at least one possible cut. At this cut, Redis had the count that the repair's row contains. And
/// the added amount moved this count towards the right count, but not beyond it. So a right repair never changes a
/// right counter. If the counter was too low, a right repair does not make it too high. If the counter was too high, a
/// right repair does not make it too low.
///
/// * The cut is after the start of the run, and at least `grace` before the row was written. A run first waits for
///   `grace` after the last sample, then publishes its fence message, and repairs only after the fence has passed.
/// * At any time, Redis' count is the sum of all earlier counts and repairs. If a run was killed, it is unknown whether
///   Redis added its repair. So this function keeps all possible sums. If Redis rejects a repair, Redis adds nothing.
///   This function also checks what the run measured for a rejected repair.
/// * At any time, MySQL's count is the result of all published events with an `at` up to this time. This is the right
///   count, with one exception. If an event reached the broker more than `grace` after the cut, the event may be behind
///   the fence message in the queue. Then the run did not see this event in MySQL. Compared with MySQL, Redis was then
///   too high by one because of a like, or too low by one because of an unlike. If an event was published within
///   `grace` after its `at`, the exception does not apply.
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

/// Returns true if there is a cut for which the repair was right. `sum` is the sum of the earlier repairs.
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

/// Returns the counts in Redis and in MySQL after each act.
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

/// Returns a like or an unlike of this user at the time `at`. The event is published `later` microseconds after `at`,
/// or never.
fn act(user: u64, at: i64, liked: bool, later: Option<i64>) -> Act {
    let event = LikeEvent { target: target(1), user: UserId(user), at: Micros(at), liked };
    Act { event, published: later.map(|later| Micros(at + later)) }
}

/// Returns the row of a repair. The run began at the time 1,000, and wrote this row at 1,500. So the cut of this repair
/// can't be later than 1,400.
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
    assert!(!is_right(&lost, &[row(3, -2, done)]), "the run added too much");
    assert!(!is_right(&lost, &[row(3, 1, done)]), "the run added in the wrong direction");
    assert!(!is_right(&lost, &[row(2, -1, done)]), "Redis never had this count during the run");
    assert!(!is_right(&lost, &[row(3, -1, done), row(2, -1, done)]), "two runs made the same repair");
    assert!(is_right(&lost, &[row(3, -1, Some("stale")), row(3, -1, done)]), "the first repair was rejected");
    assert!(
        is_right(&lost, &[row(3, -1, None), row(3, -1, done)]),
        "the first run was killed before its repair was added"
    );
    assert!(!is_right(&lost, &[row(3, -1, None), row(3, -1, done), row(2, -1, done)]));
    assert!(!is_right(&[act(1, 10, true, Some(5))], &[row(1, -1, done)]), "no event was lost");
    // In the first case, Redis counted a like, but the client did not publish it, and the user then repeated the like.
    // In the second case, Redis counted three events, but the client did not publish the second event.
    assert!(is_right(&[act(1, 10, true, None), act(1, 20, true, Some(5))], &[row(2, -1, done)]));
    let flips = [act(1, 10, true, Some(5)), act(1, 20, false, None), act(1, 30, true, Some(5))];
    assert!(!is_right(&flips, &[row(1, -1, done)]), "Redis already has the right count");
}

#[test]
fn a_late_like_explains_a_repair_only_if_it_came_later_than_the_grace_after_the_cut() {
    let done = Some("done");
    for (at, later, expected) in [
        (1_200, Some(50), false),
        (1_390, Some(100), false),
        (1_200, Some(101), true),
        (1_000, Some(501), true),
        // The first like is counted after the latest possible cut. The second like is counted before the run, and is
        // published within `grace` after the start of the run.
        (1_401, Some(500), false),
        (500, Some(599), false),
    ] {
        assert_eq!(is_right(&[act(1, at, true, later)], &[row(1, -1, done)]), expected, "{at} {later:?}");
    }
    // The late like reached MySQL in the end. So a later repair must add the subtracted amount again, but only once.
    let late = [act(1, 1_200, true, Some(400))];
    let back = Row { began: Micros(2_000), noted: Micros(2_500), ..row(0, 1, done) };
    assert!(is_right(&late, &[row(1, -1, done), back.clone()]));
    assert!(!is_right(&late, &[row(1, -1, done), back.clone(), back]));
    let unlike = [act(1, 10, true, Some(5)), act(1, 1_200, false, Some(300))];
    assert!(is_right(&unlike, &[row(0, 1, done)]));
    assert!(!is_right(&unlike, &[row(0, -1, done)]));
}
