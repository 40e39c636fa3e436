//! Decides which boards can be saved, which boards are due, and which boards Redis has lost.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::Result;

use crate::jobs::board_run::periods::{Candidate, Scope, candidate_named};
use tallyd_base::config::Board;
use tallyd_core::archive::Snapshot;
use tallyd_core::model::{BoardPeriod, Micros};
use tallyd_core::period::{Period, PeriodKind};
use tallyd_mysql::Store;
use tallyd_redis::Cache;
use tallyd_redis::score::Rule;

/// For an incomplete snapshot, or `every` if that is shorter.
const AGAIN_AFTER: Duration = Duration::from_secs(300);

#[derive(Clone, Debug)]
pub(super) struct Savable {
    pub at: BoardPeriod,
    pub rule: Rule,
    pub every: Duration,
    pub noted: Option<Snapshot>,
    pub mark: Option<u64>,
    pub live: bool,
    members: u64,
}

impl Savable {
    pub(super) fn snapshot(&self) -> Option<Snapshot> {
        self.noted.filter(|snapshot| snapshot.taken_at.is_some())
    }

    pub(super) fn is_lost(&self) -> bool {
        self.snapshot().is_some_and(|snapshot| !snapshot.is_marked(self.mark))
    }

    pub(super) fn is_on(&self) -> bool {
        !self.every.is_zero()
    }

    /// A board without a complete snapshot has waited since `seen_at`. A lost board is reported elsewhere.
    pub(super) fn is_late(&self, seen_at: Micros, now: Micros) -> bool {
        let last = self.snapshot().and_then(|snapshot| snapshot.taken_at).unwrap_or(seen_at);
        !self.is_lost() && last.after(self.every * 2) < now
    }

    pub(super) fn has_members(&self) -> bool {
        self.live || self.snapshot().is_some()
    }

    pub(super) fn is_due(&self, now: Micros) -> bool {
        let Some(Snapshot { began_at, taken_at, members, .. }) = self.noted else { return self.live };
        let is_complete = taken_at == Some(began_at);
        let pause = if is_complete { self.every } else { self.every.min(AGAIN_AFTER) };
        // A young board grows fast: a snapshot of its first seconds lacks most of it.
        let has_doubled = is_complete && self.members > members * 2;
        let is_time = has_doubled || began_at > now || began_at.after(pause) <= now;
        is_time && !self.is_lost() && self.has_members()
    }
}

/// The open periods, in the order of the configuration. A period in the scope is returned even if it is closed, but not
/// if it is frozen.
pub(super) async fn savable(
    store: &Store,
    cache: &Cache,
    boards: &[Board],
    scope: &Scope,
    now: Micros,
) -> Result<Vec<Savable>> {
    let named: Vec<Candidate> = match &scope.period {
        Some(period) => vec![candidate_named(boards, scope.board.as_deref().unwrap_or_default(), period)?],
        None => {
            let open = scope.blocks(boards)?.into_iter().map(|block| scope.open_of(block, now));
            open.collect::<Result<Vec<_>>>()?.into_iter().flatten().map(|open| open.candidate).collect()
        }
    };
    let snapshots: BTreeMap<BoardPeriod, Snapshot> = store.snapshots().await?.into_iter().collect();
    let periods: Vec<BoardPeriod> = named.iter().map(|candidate| candidate.at.clone()).collect();
    let marks = cache.board_marks(&periods).await?;
    let keys = cache.find_boards(&periods).await?;
    let members = cache.board_members(&periods).await?;
    let savable = named.into_iter().zip(marks).zip(members).zip(keys).filter(|(_, keys)| !keys.frozen);
    let every: BTreeMap<(&str, PeriodKind), Duration> =
        boards.iter().map(|board| ((board.name.as_str(), board.period), board.snapshot_every.0)).collect();
    let every = |at: &BoardPeriod| every.get(&(at.board.as_str(), at.period.parse::<Period>().ok()?.kind())).copied();
    let savable = savable.map(|(((Candidate { at, rule, .. }, mark), members), keys)| Savable {
        every: every(&at).unwrap_or_default(),
        noted: snapshots.get(&at).copied(),
        at,
        rule,
        mark,
        live: keys.live,
        members,
    });
    Ok(savable.collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn savable(snapshot: Option<(u64, i64, Option<i64>)>, mark: Option<u64>, live: bool) -> Savable {
        let snapshot = snapshot.map(|(number, began_at, taken_at)| Snapshot {
            number,
            generation: 1,
            members: 10,
            began_at: Micros(began_at * 1_000_000),
            taken_at: taken_at.map(|at| Micros(at * 1_000_000)),
        });
        let at = BoardPeriod { board: "likes".to_owned(), period: "total".to_owned() };
        Savable { at, rule: Rule::PLAIN, every: Duration::from_secs(3_600), noted: snapshot, mark, live, members: 10 }
    }

    #[test]
    fn a_snapshot_is_due_when_its_time_has_come_and_the_board_is_there() {
        let due = |savable: &Savable, seconds: i64| savable.is_due(Micros(seconds * 1_000_000));
        assert!(due(&savable(None, None, true), 0), "the first one");
        assert!(!due(&savable(None, None, false), 0), "without a board in Redis");
        let taken = savable(Some((7, 100, Some(100))), Some(7), true);
        assert!(!due(&taken, 3_699) && due(&taken, 3_700));
        let ahead = savable(Some((7, 900, Some(900))), Some(7), true);
        assert!(due(&ahead, 899) && !due(&ahead, 900), "the clock was ahead at that snapshot");
        assert!(!due(&savable(Some((7, 900, Some(900))), None, true), 0), "Redis has lost the board");
        let died = savable(Some((8, 100, Some(50))), Some(8), true);
        assert!(!due(&died, 399) && due(&died, 400), "an incomplete snapshot must be repeated after 300 seconds");
        let lost = savable(Some((7, 100, Some(100))), None, true);
        assert!(lost.is_lost() && !due(&lost, 1_000_000), "a new snapshot would overwrite the saved board");
        assert!(savable(Some((7, 100, Some(100))), Some(6), true).is_lost(), "an old backup");
        assert!(!savable(Some((7, 100, Some(50))), Some(8), true).is_lost(), "run 8 wrote its mark and then stopped");
        let never = savable(Some((7, 100, None)), None, true);
        assert!(!never.is_lost() && !due(&never, 399) && due(&never, 400), "the first snapshot was never completed");
    }

    #[test]
    fn a_board_that_has_doubled_is_saved_before_its_time() {
        let taken = savable(Some((7, 100, Some(100))), Some(7), true);
        for (members, expected) in [(0, false), (20, false), (21, true)] {
            assert_eq!(Savable { members, ..taken.clone() }.is_due(Micros(101_000_000)), expected, "{members}");
        }
        let tried = Savable { members: 21, ..savable(Some((7, 100, Some(50))), Some(7), true) };
        assert!(!tried.is_due(Micros(101_000_000)), "a snapshot that failed is repeated after a pause");
    }

    #[test]
    fn a_snapshot_is_late_however_often_it_was_tried() {
        let late = |savable: &Savable, seconds: i64| savable.is_late(Micros(100_000_000), Micros(seconds * 1_000_000));
        for live in [true, false] {
            let tried = savable(Some((7, 7_200, Some(200))), Some(7), live);
            assert!(!late(&tried, 7_400) && late(&tried, 7_401));
        }
        assert!(!late(&savable(Some((7, 100, Some(100))), None, true), 9_000), "a lost board is reported as lost");
        for never in [None, Some((7, 7_200, None))] {
            let never = savable(never, Some(7), true);
            assert!(!late(&never, 7_300) && late(&never, 7_301), "there is no complete snapshot");
        }
    }
}
