//! What is to be done about a closed period, from what is seen of it. Pure: the whole table of cases in one place.

use std::time::Duration;

use crate::cache::boards::BoardKeys;
use crate::model::Micros;
use crate::store::boards::{PeriodRow, PeriodState};

/// What is to be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Plan {
    /// Nothing: it never was, or it is all over.
    Nothing,
    /// Freeze, merge, copy, verify; or go on with it.
    Archive,
    /// Redis has it as it was before it was frozen: raise that to what the archive has, and archive it once more.
    Raise,
    /// It is archived and stays in Redis so long.
    Wait(Duration),
    /// It is archived and its time in Redis is over.
    End,
    /// It is archived and gone from Redis already.
    NoteEnded,
    /// Nothing can be done without a person; this says why.
    Keep(&'static str),
}

/// Whether the period has a snapshot, and whether Redis still has the board that it is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Saved {
    /// There is no snapshot.
    None,
    /// Redis has its mark: nothing was lost since.
    Marked,
    /// Redis has another mark or none.
    Lost,
}

const LOST_AGAIN: &str = "Redis lost its frozen zset before late writes were archived: these are lost, and leaderboard_archive is whole as it \
    was before";

pub(super) const LOST: &str = "Redis lost its frozen zset before the copy was verified: leaderboard_archive may hold a \
    part of it; what the live zset holds, if there is one, came late: delete its row of leaderboard_period to have that archived as the whole board";

pub(super) const LOST_SAVED: &str = "Redis lost its frozen zset before the copy was verified, but there is a snapshot: \
    `tallyd board restore` puts that in its place";

pub(super) const LOST_LIVE: &str = "Redis has lost it since its snapshot, wholly or in part, and what the live zset holds, if \
    there is one, is not the board: `tallyd board restore` puts the snapshot back with what was added since; or, if what Redis has is \
    right, `tallyd board snapshot NAME PERIOD --force` takes that";

pub(super) const LATE: &str = "it was written to after its zset had ended: what came late is in the live zset and not in \
    leaderboard_archive; `tallyd board restore` puts the archive back, and the next run merges it";

pub(super) const LATE_PRUNED: &str = "it was written to after its archive had been pruned: the live zset holds that, and \
    can be unlinked";

pub(super) const CAME_BACK: &str = "Redis went back in time, and its frozen zset is there again after it had ended: leaderboard_archive is whole \
    and stays as it is, the zset can be unlinked, and a live one beside it";

pub(super) const WENT_BACK_AGAIN: &str =
    "another server has taken over while it was raised to its archive: the next run does that";

pub(super) const WENT_BACK: &str = "Redis has it as it was before it was frozen: `tallyd archive` raises that to its archive, and archives it once more";

pub(super) const UNKNOWN: &str = "the configuration has no such board any more, so it can't say how long its zset stays: \
    put the board back, or delete its row of leaderboard_period";

/// Decides. `expire_after` is the board's; none where the configuration no longer has it.
pub(super) fn decide(
    keys: BoardKeys,
    row: Option<PeriodRow>,
    saved: Saved,
    expire_after: Option<Duration>,
    now: Micros,
) -> Plan {
    let BoardKeys { live, frozen, late_members, .. } = keys;
    let Some(row) = row else {
        return match (live || frozen, expire_after) {
            // What is left of a board must not be taken for it. One that is frozen was whole when it was.
            _ if !frozen && saved == Saved::Lost => Plan::Keep(LOST_LIVE),
            (true, Some(_)) => Plan::Archive,
            (true, None) => Plan::Keep(UNKNOWN),
            (false, _) => Plan::Nothing,
        };
    };
    match (row.state, frozen, expire_after) {
        // The live zset is no late write: a server has taken over, or was started, with what it knew before the freeze.
        (PeriodState::Frozen | PeriodState::Done | PeriodState::Ended, false, Some(_))
            if live && went_back(keys, row) =>
        {
            Plan::Raise
        }
        // Its rows are whole, so no more is lost with it than what came late.
        (PeriodState::Frozen | PeriodState::Done, false, _) if row.copy.is_some() => Plan::NoteEnded,
        // A live zset alone is what came late, never the board: it is not frozen a second time.
        (PeriodState::Frozen | PeriodState::Done, false, _) => {
            Plan::Keep(if saved == Saved::None { LOST } else { LOST_SAVED })
        }
        (PeriodState::Frozen | PeriodState::Done, true, None) => Plan::Keep(UNKNOWN),
        (PeriodState::Frozen, true, Some(_)) => Plan::Archive,
        // MySQL went back to before what came late was archived.
        (PeriodState::Done, true, Some(_)) if live || late_members > row.late_members => Plan::Archive,
        (PeriodState::Done, true, Some(expire_after)) => {
            match left(row.restored_at.max(row.done_at), expire_after, now) {
                Duration::ZERO => Plan::End,
                left => Plan::Wait(left),
            }
        }
        (PeriodState::Ended | PeriodState::Pruned, true, _) => Plan::Keep(CAME_BACK),
        (PeriodState::Ended, false, _) if live => Plan::Keep(LATE),
        (PeriodState::Pruned, false, _) if live => Plan::Keep(LATE_PRUNED),
        (PeriodState::Ended | PeriodState::Pruned, false, _) => Plan::Nothing,
    }
}

/// Whether Redis has gone back to before a freeze that MySQL knows of. After a loss of all data its generation is a newer one.
pub(super) fn went_back(keys: BoardKeys, row: PeriodRow) -> bool {
    keys.freeze < row.frozen
}

/// What a person must know of an archived zset that is gone from Redis; none where nothing is lost or left.
pub(super) fn left_over(row: Option<PeriodRow>, live: bool) -> Option<String> {
    let lost = row.filter(|row| row.state == PeriodState::Frozen).map(|_| LOST_AGAIN);
    let said: Vec<&str> = lost.into_iter().chain(live.then_some(LATE)).collect();
    (!said.is_empty()).then(|| said.join("; "))
}

/// How long it still stays in Redis.
fn left(done_at: Option<Micros>, expire_after: Duration, now: Micros) -> Duration {
    let gone_by = now.before(expire_after);
    let left = done_at.map_or(0, |done_at| done_at.0.saturating_sub(gone_by.0));
    Duration::from_micros(u64::try_from(left).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::Freeze;
    use tallyd_core::tally::Tally;

    const DONE_AT: Micros = Micros(1_000_000_000);
    const STAY: Duration = Duration::from_secs(60);

    const FROZEN: Freeze = Freeze { generation: 5, note: Some(0) };

    /// Of a first archive, whose copy is verified from "done" on.
    fn row(state: PeriodState) -> PeriodRow {
        let copy = (state != PeriodState::Frozen).then_some(0);
        let (tally, done_at) = (Tally::default(), Some(DONE_AT));
        PeriodRow { state, tally, left_out: 0, done_at, restored_at: None, copy, frozen: FROZEN, late_members: 4 }
    }

    fn decided(
        live: bool,
        frozen: bool,
        state: Option<PeriodState>,
        expire_after: Option<Duration>,
        at: Micros,
    ) -> Plan {
        decided_saved(live, frozen, state, Saved::None, expire_after, at)
    }

    fn decided_saved(
        live: bool,
        frozen: bool,
        state: Option<PeriodState>,
        saved: Saved,
        expire_after: Option<Duration>,
        at: Micros,
    ) -> Plan {
        let row = state.map(row);
        decide(BoardKeys { live, frozen, freeze: FROZEN, late_members: 4 }, row, saved, expire_after, at)
    }

    #[test]
    fn what_redis_has_from_before_the_freeze_is_raised_and_not_taken_for_what_came_late() {
        use PeriodState::{Done, Ended, Frozen, Pruned};
        let plan = |live, frozen, state, saved, stay| {
            let keys = BoardKeys { live, frozen, freeze: Freeze { note: None, ..FROZEN }, late_members: 0 };
            decide(keys, Some(row(state)), saved, stay, DONE_AT)
        };
        for saved in [Saved::None, Saved::Marked, Saved::Lost] {
            for state in [Frozen, Done, Ended] {
                assert_eq!(plan(true, false, state, saved, Some(STAY)), Plan::Raise, "{state:?} {saved:?}");
            }
        }
        // It was archived after run 7 had put it back.
        let (late, frozen) = (Plan::Keep(LATE), Freeze { note: Some(7), ..FROZEN });
        for (generation, note, expected) in [
            (5, Some(7), late),
            (5, Some(9), late),
            (5, Some(6), Plan::Raise),
            (5, Some(0), Plan::Raise),
            (5, None, Plan::Raise),
            (6, None, late),
            (4, Some(7), Plan::Raise),
        ] {
            let keys = BoardKeys { live: true, frozen: false, freeze: Freeze { generation, note }, late_members: 0 };
            let row = PeriodRow { frozen, ..row(Ended) };
            assert_eq!(decide(keys, Some(row), Saved::None, Some(STAY), DONE_AT), expected, "{generation} {note:?}");
        }
        // Nothing is there, or the frozen zset itself; its archive is deleted; nobody knows how long it should stay.
        for (live, frozen, state, stay, expected) in [
            (false, false, Done, Some(STAY), Plan::NoteEnded),
            (true, true, Done, Some(STAY), Plan::Archive),
            (true, false, Pruned, Some(STAY), Plan::Keep(LATE_PRUNED)),
            (true, false, Ended, None, Plan::Keep(LATE)),
        ] {
            assert_eq!(plan(live, frozen, state, Saved::None, stay), expected, "{live} {frozen} {state:?}");
        }
    }

    #[test]
    fn every_case_has_its_plan() {
        use PeriodState::{Done, Ended, Frozen, Pruned};
        for (live, frozen, state, expected) in [
            (false, false, None, Plan::Nothing),
            (true, false, None, Plan::Archive),
            (false, true, None, Plan::Archive),
            (true, true, None, Plan::Archive),
            (false, false, Some(Frozen), Plan::Keep(LOST)),
            (true, false, Some(Frozen), Plan::Keep(LOST)),
            (false, true, Some(Frozen), Plan::Archive),
            (true, true, Some(Frozen), Plan::Archive),
            (false, false, Some(Done), Plan::NoteEnded),
            (true, false, Some(Done), Plan::NoteEnded),
            (false, true, Some(Done), Plan::Wait(STAY)),
            (true, true, Some(Done), Plan::Archive),
            (false, false, Some(Ended), Plan::Nothing),
            (true, false, Some(Ended), Plan::Keep(LATE)),
            (false, true, Some(Ended), Plan::Keep(CAME_BACK)),
            (true, true, Some(Ended), Plan::Keep(CAME_BACK)),
            (false, false, Some(Pruned), Plan::Nothing),
            (true, false, Some(Pruned), Plan::Keep(LATE_PRUNED)),
            (false, true, Some(Pruned), Plan::Keep(CAME_BACK)),
            (true, true, Some(Pruned), Plan::Keep(CAME_BACK)),
        ] {
            assert_eq!(decided(live, frozen, state, Some(STAY), DONE_AT), expected, "{live} {frozen} {state:?}");
        }
    }

    #[test]
    fn a_board_of_which_mysql_lacks_late_members_is_archived_again() {
        for (late_members, expected) in [(3, Plan::Wait(STAY)), (4, Plan::Wait(STAY)), (5, Plan::Archive)] {
            let keys = BoardKeys { live: false, frozen: true, freeze: FROZEN, late_members };
            assert_eq!(decide(keys, Some(row(PeriodState::Done)), Saved::None, Some(STAY), DONE_AT), expected);
        }
    }

    #[test]
    fn a_zset_lost_in_a_second_copy_leaves_the_first_archive() {
        for live in [true, false] {
            let row = PeriodRow { copy: Some(1), ..row(PeriodState::Frozen) };
            let keys = BoardKeys { live, frozen: false, freeze: FROZEN, late_members: 0 };
            assert_eq!(decide(keys, Some(row), Saved::None, Some(STAY), DONE_AT), Plan::NoteEnded);
            let said = left_over(Some(row), live).unwrap();
            assert!(said.contains(LOST_AGAIN) && said.contains(LATE) == live, "{said}");
        }
        assert_eq!(left_over(Some(row(PeriodState::Done)), false), None);
    }

    #[test]
    fn what_is_left_of_a_board_that_has_a_snapshot_is_not_taken_for_it() {
        use PeriodState::Frozen;
        let plan = |live, frozen, state, saved| decided_saved(live, frozen, state, saved, Some(STAY), DONE_AT);
        for (live, frozen, state, saved, expected) in [
            (true, false, None, Saved::Marked, Plan::Archive),
            (false, false, None, Saved::Marked, Plan::Nothing),
            (true, false, None, Saved::Lost, Plan::Keep(LOST_LIVE)),
            (false, false, None, Saved::Lost, Plan::Keep(LOST_LIVE)),
            (false, true, None, Saved::Lost, Plan::Archive),
            (true, true, None, Saved::Lost, Plan::Archive),
            (false, true, Some(Frozen), Saved::Lost, Plan::Archive),
            (true, false, Some(Frozen), Saved::Marked, Plan::Keep(LOST_SAVED)),
            (true, false, Some(Frozen), Saved::Lost, Plan::Keep(LOST_SAVED)),
            (false, false, Some(Frozen), Saved::Marked, Plan::Keep(LOST_SAVED)),
            (false, false, Some(Frozen), Saved::Lost, Plan::Keep(LOST_SAVED)),
        ] {
            assert_eq!(plan(live, frozen, state, saved), expected, "{live} {frozen} {state:?} {saved:?}");
        }
    }

    #[test]
    fn a_board_without_configuration_is_left_alone_while_it_is_in_redis() {
        use PeriodState::{Done, Ended, Frozen};
        for state in [None, Some(Frozen), Some(Done)] {
            assert_eq!(decided(false, true, state, None, DONE_AT), Plan::Keep(UNKNOWN), "{state:?}");
        }
        assert_eq!(decided(false, false, Some(Done), None, DONE_AT), Plan::NoteEnded);
        assert_eq!(decided(false, false, Some(Ended), None, DONE_AT), Plan::Nothing);
    }

    #[test]
    fn an_archived_board_ends_when_its_time_is_over_and_not_before() {
        let at = |seconds: i64| Micros(DONE_AT.0 + seconds * 1_000_000);
        let plan = |stay, now| decided(false, true, Some(PeriodState::Done), Some(stay), now);
        assert_eq!(plan(STAY, at(59)), Plan::Wait(Duration::from_secs(1)));
        assert_eq!(plan(STAY, at(60)), Plan::End);
        assert_eq!(plan(STAY, at(600)), Plan::End);
        assert_eq!(plan(Duration::ZERO, DONE_AT), Plan::End);
        // A clock that was set back makes it wait longer, never shorter.
        assert_eq!(plan(STAY, at(-10)), Plan::Wait(Duration::from_secs(70)));
    }
}
