//! Decides what to do with a closed period of a board. Pure.

mod frozen;
mod period;
mod reason;
mod snapshot;

use std::time::Duration;

pub use frozen::{Frozen, Note};
pub use period::{Backup, BoardKeys, Done, LATE_MEMBERS_MISSING, PeriodRow, PeriodState, went_back};
pub use reason::Reason;
pub use snapshot::{Snapshot, are_of_board, members_min};

use crate::model::Micros;

#[derive(Clone, Copy, Debug)]
pub struct Facts {
    pub keys: BoardKeys,
    pub row: Option<PeriodRow>,
    pub backup: Backup,
    /// The time that the period's zset stays in Redis; `None` if the configuration no longer has the board.
    pub expire_after: Option<Duration>,
    pub now: Micros,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Plan {
    /// The board does not exist, or all steps for its period are done.
    Nothing,
    /// The board has no members left, so the run must delete its snapshot.
    Forget,
    /// The run must freeze, merge, copy and verify the board, or continue with these steps.
    Archive {
        expire_after: Duration,
    },
    /// Redis went back to the board's state before the freeze. The run must raise the scores to the archive's scores,
    /// and archive the board again.
    Raise {
        row: PeriodRow,
        expire_after: Duration,
    },
    Wait {
        left: Duration,
    },
    End {
        row: PeriodRow,
    },
    NoteEnded,
    /// A problem that only an operator can resolve.
    Keep(Reason),
}

pub fn decide(facts: Facts) -> Plan {
    match facts.row {
        None => decide_first(facts),
        Some(row) => decide_next(facts, row),
    }
}

fn decide_first(Facts { keys: BoardKeys { live, frozen, .. }, backup, expire_after, .. }: Facts) -> Plan {
    // A part of a board must not be archived as the complete board. A frozen zset was complete when it was frozen.
    match (live || frozen, backup, expire_after) {
        (_, Backup::Lost, Some(_)) if !frozen => Plan::Keep(Reason::LostLive),
        (true, _, Some(expire_after)) => Plan::Archive { expire_after },
        (true, ..) | (false, Backup::Lost, _) => Plan::Keep(Reason::Unknown),
        (false, Backup::Intact, _) => Plan::Forget,
        (false, Backup::None, _) => Plan::Nothing,
    }
}

fn decide_next(Facts { keys, backup, expire_after, now, .. }: Facts, row: PeriodRow) -> Plan {
    let BoardKeys { live, frozen, late_members, .. } = keys;
    match (row.state, frozen, expire_after) {
        // This Redis server has an older state, from before the freeze. So the live zset contains the whole board, and
        // not only late writes.
        (PeriodState::Frozen | PeriodState::Done | PeriodState::Ended, false, Some(expire_after))
            if live && went_back(keys, row) =>
        {
            Plan::Raise { row, expire_after }
        }
        // The copied rows are verified, so if the zset is lost, only late writes are lost.
        (PeriodState::Frozen | PeriodState::Done, false, _) if row.copy.is_some() => Plan::NoteEnded,
        // The frozen zset is lost. A live zset can contain only late writes, so the run does not freeze the live zset a
        // second time.
        (PeriodState::Frozen | PeriodState::Done, false, _) => {
            Plan::Keep(if backup == Backup::None { Reason::Lost } else { Reason::LostWithBackup })
        }
        (PeriodState::Frozen | PeriodState::Done, true, None) => Plan::Keep(Reason::Unknown),
        (PeriodState::Frozen, true, Some(expire_after)) => Plan::Archive { expire_after },
        // If Redis has more `late_members` than the row, MySQL went back to an older state. In that state, the late
        // writes are not archived. If Redis has fewer, Redis went back, and its frozen zset lacks late writes.
        (PeriodState::Done, true, Some(expire_after)) if live || late_members != row.late_members => {
            Plan::Archive { expire_after }
        }
        (PeriodState::Done, true, Some(expire_after)) => {
            match left(row.restored_at.max(row.done_at), expire_after, now) {
                Duration::ZERO => Plan::End { row },
                left => Plan::Wait { left },
            }
        }
        (PeriodState::Ended | PeriodState::Pruned, true, _) => Plan::Keep(Reason::CameBack),
        (PeriodState::Ended, false, _) if live => Plan::Keep(Reason::Late),
        (PeriodState::Pruned, false, _) if live => Plan::Keep(Reason::LatePruned),
        (PeriodState::Ended | PeriodState::Pruned, false, _) => Plan::Nothing,
    }
}

/// For an archived zset that is no longer in Redis: returns a problem if late writes were lost, or if late writes are
/// left over. Otherwise returns `None`.
pub fn left_over(row: Option<PeriodRow>, live: bool) -> Option<Reason> {
    let is_lost = row.is_some_and(|row| row.state == PeriodState::Frozen);
    match (is_lost, live) {
        (true, true) => Some(Reason::LostLateAndLate),
        (true, false) => Some(Reason::LostLate),
        (false, true) => Some(Reason::Late),
        (false, false) => None,
    }
}

fn left(done_at: Option<Micros>, expire_after: Duration, now: Micros) -> Duration {
    let gone_by = now.before(expire_after);
    let left = done_at.map_or(0, |done_at| done_at.0.saturating_sub(gone_by.0));
    Duration::from_micros(u64::try_from(left).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::Freeze;
    use crate::tally::Tally;

    pub(super) const DONE_AT: Micros = Micros(1_000_000_000);
    const STAY: Duration = Duration::from_secs(60);

    pub(super) const FROZEN: Freeze = Freeze { generation: 5, note: Some(0) };

    /// The row of a period that a run has archived. In the state "done" and in later states, the row's copy is
    /// verified.
    pub(super) fn row(state: PeriodState) -> PeriodRow {
        let copy = (state != PeriodState::Frozen).then_some(0);
        let (tally, done_at) = (Tally::default(), Some(DONE_AT));
        PeriodRow { state, tally, left_out: 0, done_at, restored_at: None, copy, frozen: FROZEN, late_members: 4 }
    }

    const ARCHIVE: Plan = Plan::Archive { expire_after: STAY };

    /// The input of `decide` for a period that has no data.
    pub(super) const FACTS: Facts = Facts {
        keys: BoardKeys { live: false, frozen: false, freeze: FROZEN, late_members: 4 },
        row: None,
        backup: Backup::None,
        expire_after: Some(STAY),
        now: DONE_AT,
    };

    fn decided(live: bool, frozen: bool, state: Option<PeriodState>, facts: Facts) -> Plan {
        decide(Facts { keys: BoardKeys { live, frozen, ..facts.keys }, row: state.map(row), ..facts })
    }

    #[test]
    fn what_redis_has_from_before_the_freeze_is_raised_and_not_taken_for_what_came_late() {
        use PeriodState::{Done, Ended, Frozen, Pruned};
        let keys = |freeze| BoardKeys { live: true, freeze, late_members: 0, ..FACTS.keys };
        let before = Facts { keys: keys(Freeze { note: None, ..FROZEN }), ..FACTS };
        for backup in [Backup::None, Backup::Intact, Backup::Lost] {
            for state in [Frozen, Done, Ended] {
                let raise = Plan::Raise { row: row(state), expire_after: STAY };
                assert_eq!(
                    decided(true, false, Some(state), Facts { backup, ..before }),
                    raise,
                    "{state:?} {backup:?}"
                );
            }
        }
        // The period was archived after run 7 had restored it.
        let frozen = Freeze { note: Some(7), ..FROZEN };
        let ended = PeriodRow { frozen, ..row(Ended) };
        let late = || Plan::Keep(Reason::Late);
        let raise = || Plan::Raise { row: ended, expire_after: STAY };
        for (generation, note, expected) in [
            (5, Some(7), late()),
            (5, Some(9), late()),
            (5, Some(6), raise()),
            (5, Some(0), raise()),
            (5, None, raise()),
            (6, None, late()),
            (4, Some(7), raise()),
        ] {
            let facts = Facts { keys: keys(Freeze { generation, note }), row: Some(ended), ..FACTS };
            assert_eq!(decide(facts), expected, "{generation} {note:?}");
        }
        // The cases are: Redis has no zset, Redis has both zsets, the archive is deleted, `expire_after` is unknown.
        for (live, frozen, state, expire_after, expected) in [
            (false, false, Done, Some(STAY), Plan::NoteEnded),
            (true, true, Done, Some(STAY), ARCHIVE),
            (true, false, Pruned, Some(STAY), Plan::Keep(Reason::LatePruned)),
            (true, false, Ended, None, Plan::Keep(Reason::Late)),
        ] {
            let facts = Facts { expire_after, ..before };
            assert_eq!(decided(live, frozen, Some(state), facts), expected, "{live} {frozen} {state:?}");
        }
    }

    #[test]
    fn every_case_has_its_plan() {
        use PeriodState::{Done, Ended, Frozen, Pruned};
        for (live, frozen, state, expected) in [
            (false, false, None, Plan::Nothing),
            (true, false, None, ARCHIVE),
            (false, true, None, ARCHIVE),
            (true, true, None, ARCHIVE),
            (false, false, Some(Frozen), Plan::Keep(Reason::Lost)),
            (true, false, Some(Frozen), Plan::Keep(Reason::Lost)),
            (false, true, Some(Frozen), ARCHIVE),
            (true, true, Some(Frozen), ARCHIVE),
            (false, false, Some(Done), Plan::NoteEnded),
            (true, false, Some(Done), Plan::NoteEnded),
            (false, true, Some(Done), Plan::Wait { left: STAY }),
            (true, true, Some(Done), ARCHIVE),
            (false, false, Some(Ended), Plan::Nothing),
            (true, false, Some(Ended), Plan::Keep(Reason::Late)),
            (false, true, Some(Ended), Plan::Keep(Reason::CameBack)),
            (true, true, Some(Ended), Plan::Keep(Reason::CameBack)),
            (false, false, Some(Pruned), Plan::Nothing),
            (true, false, Some(Pruned), Plan::Keep(Reason::LatePruned)),
            (false, true, Some(Pruned), Plan::Keep(Reason::CameBack)),
            (true, true, Some(Pruned), Plan::Keep(Reason::CameBack)),
        ] {
            assert_eq!(decided(live, frozen, state, FACTS), expected, "{live} {frozen} {state:?}");
        }
    }

    #[test]
    fn a_board_of_which_one_store_lacks_late_members_is_archived_again() {
        for (late_members, expected) in [(3, ARCHIVE), (4, Plan::Wait { left: STAY }), (5, ARCHIVE)] {
            let facts = Facts { keys: BoardKeys { late_members, ..FACTS.keys }, ..FACTS };
            assert_eq!(decided(false, true, Some(PeriodState::Done), facts), expected);
        }
    }

    #[test]
    fn a_zset_lost_in_a_second_copy_leaves_the_first_archive() {
        for live in [true, false] {
            let row = PeriodRow { copy: Some(1), ..row(PeriodState::Frozen) };
            let keys = BoardKeys { live, late_members: 0, ..FACTS.keys };
            assert_eq!(decide(Facts { keys, row: Some(row), ..FACTS }), Plan::NoteEnded);
            let text = left_over(Some(row), live).unwrap().to_string();
            assert!(text.contains(&Reason::LostLate.to_string()), "{text}");
            assert_eq!(text.contains(&Reason::Late.to_string()), live, "{text}");
        }
        assert_eq!(left_over(Some(row(PeriodState::Done)), false), None);
    }

    #[test]
    fn what_is_left_of_a_board_that_has_a_snapshot_is_not_taken_for_it() {
        use PeriodState::Frozen;
        for (live, frozen, state, backup, expected) in [
            (true, false, None, Backup::Intact, ARCHIVE),
            (false, false, None, Backup::Intact, Plan::Forget),
            (true, false, None, Backup::Lost, Plan::Keep(Reason::LostLive)),
            (false, false, None, Backup::Lost, Plan::Keep(Reason::LostLive)),
            (false, true, None, Backup::Lost, ARCHIVE),
            (true, true, None, Backup::Lost, ARCHIVE),
            (false, true, Some(Frozen), Backup::Lost, ARCHIVE),
            (true, false, Some(Frozen), Backup::Intact, Plan::Keep(Reason::LostWithBackup)),
            (true, false, Some(Frozen), Backup::Lost, Plan::Keep(Reason::LostWithBackup)),
            (false, false, Some(Frozen), Backup::Intact, Plan::Keep(Reason::LostWithBackup)),
            (false, false, Some(Frozen), Backup::Lost, Plan::Keep(Reason::LostWithBackup)),
        ] {
            let plan = decided(live, frozen, state, Facts { backup, ..FACTS });
            assert_eq!(plan, expected, "{live} {frozen} {state:?} {backup:?}");
        }
    }

    #[test]
    fn a_board_without_configuration_is_left_alone_while_it_is_in_redis() {
        use PeriodState::{Done, Ended, Frozen};
        let unknown = Facts { expire_after: None, ..FACTS };
        for state in [None, Some(Frozen), Some(Done)] {
            assert_eq!(decided(false, true, state, unknown), Plan::Keep(Reason::Unknown), "{state:?}");
        }
        for live in [true, false] {
            let lost = Facts { backup: Backup::Lost, ..unknown };
            assert_eq!(decided(live, false, None, lost), Plan::Keep(Reason::Unknown), "only its snapshot is left");
        }
        assert_eq!(decided(false, false, Some(Done), unknown), Plan::NoteEnded);
        assert_eq!(decided(false, false, Some(Ended), unknown), Plan::Nothing);
    }

    #[test]
    fn an_archived_board_ends_when_its_time_is_over_and_not_before() {
        let at = |seconds: i64| Micros(DONE_AT.0 + seconds * 1_000_000);
        let of = |stay, now| Facts { expire_after: Some(stay), now, ..FACTS };
        let plan = |stay, now| decided(false, true, Some(PeriodState::Done), of(stay, now));
        let end = Plan::End { row: row(PeriodState::Done) };
        assert_eq!(plan(STAY, at(59)), Plan::Wait { left: Duration::from_secs(1) });
        assert_eq!(plan(STAY, at(60)), end);
        assert_eq!(plan(STAY, at(600)), end);
        assert_eq!(plan(Duration::ZERO, DONE_AT), end);
        // If the clock was set back, the period stays in Redis longer, never shorter.
        assert_eq!(plan(STAY, at(-10)), Plan::Wait { left: Duration::from_secs(70) });
    }
}
