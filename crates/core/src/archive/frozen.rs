//! A frozen zset with what MySQL has of it: what a run must note, copy and count. Pure.

use super::period::{BoardKeys, Done, PeriodRow, PeriodState};
use crate::model::Freeze;
use crate::tally::Tally;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Frozen {
    row: Option<PeriodRow>,
    pub freeze: Freeze,
    pub late_members: u64,
}

/// A note that MySQL must have before a run changes a frozen zset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Note {
    Nothing,
    Frozen,
    LateMembersMissing,
}

impl Frozen {
    pub fn found(keys: BoardKeys, row: Option<PeriodRow>) -> Self {
        Self { row, freeze: keys.freeze, late_members: keys.late_members }
    }

    pub fn first(keys: BoardKeys) -> Self {
        Self { row: None, freeze: Freeze { note: Some(0), ..keys.freeze }, late_members: 0 }
    }

    pub fn raised(keys: BoardKeys, row: PeriodRow) -> Self {
        let freeze = Freeze { generation: keys.freeze.generation, ..row.frozen };
        let row = PeriodRow { state: PeriodState::Frozen, late_members: 0, ..row };
        Self { row: Some(row), freeze, late_members: 0 }
    }

    pub fn lacks_late_members_of(&self) -> Option<PeriodRow> {
        self.row.filter(|row| row.copy.is_some() && row.late_members > self.late_members)
    }

    pub fn note(&self) -> Note {
        match self.lacks_late_members_of() {
            Some(_) => Note::LateMembersMissing,
            None if self.row.is_some_and(|row| row.state == PeriodState::Frozen) => Note::Nothing,
            None => Note::Frozen,
        }
    }

    /// Whether late members can be left after a page of `moved` members. The next run moves those that arrive later. But
    /// the zset can be raised only if no late members are left.
    pub fn has_more_late(&self, moved: u64, page_members: u64) -> bool {
        moved > 0 && (moved == page_members || self.lacks_late_members_of().is_some())
    }

    /// The copy to write. Readers get the verified copy until the new copy is verified, too.
    pub fn copy(&self) -> u8 {
        self.row.and_then(|row| row.copy).map_or(0, |copy| copy ^ 1)
    }

    pub fn done(&self, tally: Tally, left_out: u64, merged: u64) -> Done {
        // If the zset was restored from the archive's rows, the zset has no members that the first archive left out.
        let restored = self.row.filter(|row| row.restored_at.is_some());
        let left_out = restored.map_or(left_out, |row| row.left_out.max(left_out));
        // A raise of the zset counts as one.
        let late_members = self.late_members + merged + u64::from(self.lacks_late_members_of().is_some());
        Done { tally, left_out, copy: self.copy(), frozen: self.freeze, late_members }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{DONE_AT, FACTS, FROZEN, row};
    use super::*;

    /// A frozen zset with so many late members, of a row with four.
    fn found(state: PeriodState, late_members: u64) -> Frozen {
        Frozen::found(BoardKeys { late_members, ..FACTS.keys }, Some(row(state)))
    }

    #[test]
    fn what_a_run_must_note_depends_on_the_row_that_mysql_has() {
        use PeriodState::{Done, Ended, Frozen as IsFrozen};
        assert_eq!(Frozen::first(FACTS.keys).note(), Note::Frozen);
        for (state, late_members, expected) in [
            (IsFrozen, 3, Note::Nothing),
            (IsFrozen, 4, Note::Nothing),
            (Done, 3, Note::LateMembersMissing),
            (Done, 4, Note::Frozen),
            (Done, 5, Note::Frozen),
            (Ended, 3, Note::LateMembersMissing),
        ] {
            assert_eq!(found(state, late_members).note(), expected, "{state:?} {late_members}");
        }
    }

    #[test]
    fn a_zset_that_begins_again_keeps_no_late_members() {
        let keys = BoardKeys { freeze: Freeze { generation: 6, note: Some(7) }, ..FACTS.keys };
        let first = Frozen::first(keys);
        assert_eq!((first.freeze, first.late_members), (Freeze { generation: 6, note: Some(0) }, 0));
        let raised = Frozen::raised(keys, row(PeriodState::Done));
        assert_eq!((raised.freeze, raised.late_members), (Freeze { generation: 6, note: Some(0) }, 0));
        assert_eq!((raised.note(), raised.lacks_late_members_of()), (Note::Nothing, None));
    }

    #[test]
    fn late_members_can_be_left_after_a_full_page_or_before_a_raise() {
        for (late_members, moved, expected) in
            [(4, 0, false), (4, 1, false), (4, 9, false), (4, 10, true), (3, 0, false), (3, 1, true), (3, 10, true)]
        {
            let has_more = found(PeriodState::Done, late_members).has_more_late(moved, 10);
            assert_eq!(has_more, expected, "{late_members} {moved}");
        }
        assert!(!found(PeriodState::Done, 4).has_more_late(0, 0), "none were moved");
    }

    #[test]
    fn a_copy_takes_the_place_that_the_verified_one_has_not() {
        let done = |frozen: Frozen| frozen.done(Tally::default(), 2, 3);
        let first = done(Frozen::first(FACTS.keys));
        assert_eq!((first.copy, first.left_out, first.late_members, first.frozen), (0, 2, 3, FROZEN));
        let again = done(found(PeriodState::Done, 4));
        assert_eq!((again.copy, again.late_members), (1, 7));
        assert_eq!(done(found(PeriodState::Done, 3)).late_members, 7, "three, three merged ones and the raise");
        let second = PeriodRow { copy: Some(1), ..row(PeriodState::Done) };
        assert_eq!(done(Frozen::found(FACTS.keys, Some(second))).copy, 0);
        for (restored_at, left_out) in [(None, 2), (Some(DONE_AT), 5)] {
            let row = PeriodRow { restored_at, left_out: 5, ..row(PeriodState::Done) };
            assert_eq!(done(Frozen::found(FACTS.keys, Some(row))).left_out, left_out, "{restored_at:?}");
        }
    }
}
