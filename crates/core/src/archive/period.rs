//! The state of a closed period of a board in MySQL and in Redis.

use crate::model::{Freeze, Micros};
use crate::tally::Tally;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PeriodState {
    /// The zset is frozen. In MySQL, rows can be missing or can belong to an earlier copy.
    Frozen,
    Done,
    Ended,
    Pruned,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PeriodRow {
    pub state: PeriodState,
    pub tally: Tally,
    pub left_out: u64,
    pub done_at: Option<Micros>,
    /// The time when the frozen zset was restored from the rows. The value is `None` if the zset is still the original
    /// board.
    pub restored_at: Option<Micros>,
    pub copy: Option<u8>,
    pub frozen: Freeze,
    /// At the time of the verification, Redis had moved this number of late members into the frozen zset. A higher number
    /// than Redis has means that the frozen zset lacks late members of the verified copy. A raise of the zset counts as one.
    pub late_members: u64,
}

/// More late members than any zset has. A row has this number until the next copy is verified.
pub const LATE_MEMBERS_MISSING: u64 = u64::MAX;

#[derive(Clone, Copy, Debug)]
pub struct Done {
    pub tally: Tally,
    pub left_out: u64,
    pub copy: u8,
    pub frozen: Freeze,
    pub late_members: u64,
}

impl PeriodRow {
    pub fn tag(&self) -> String {
        format!("a{}", self.done_at.map_or(0, |at| at.0))
    }
}

impl From<Done> for PeriodRow {
    fn from(Done { tally, left_out, copy, frozen, late_members }: Done) -> Self {
        let (state, copy) = (PeriodState::Done, Some(copy));
        Self { state, tally, left_out, copy, frozen, late_members, done_at: None, restored_at: None }
    }
}

impl PeriodState {
    pub fn text(self) -> &'static str {
        match self {
            Self::Frozen => "frozen",
            Self::Done => "done",
            Self::Ended => "ended",
            Self::Pruned => "pruned",
        }
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct BoardKeys {
    pub live: bool,
    pub frozen: bool,
    pub freeze: Freeze,
    pub late_members: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backup {
    None,
    Intact,
    Lost,
}

/// Whether Redis went back to a state from before the freeze, although MySQL has recorded the freeze. After a flush,
/// the data in Redis gets a newer generation than the recorded one, so the result is false.
pub fn went_back(keys: BoardKeys, row: PeriodRow) -> bool {
    keys.freeze < row.frozen
}

#[cfg(test)]
mod tests {
    use super::*;

    fn done() -> PeriodRow {
        let frozen = Freeze { generation: 5, note: Some(7) };
        let tally = Tally { members: 2, checksum: 3 };
        PeriodRow::from(Done { tally, left_out: 1, copy: 1, frozen, late_members: 4 })
    }

    #[test]
    fn a_row_of_a_verified_copy_is_done_and_named_by_its_time() {
        let row = done();
        assert_eq!((row.state, row.copy, row.left_out, row.late_members), (PeriodState::Done, Some(1), 1, 4));
        assert_eq!((row.tally.members, row.frozen.generation, row.restored_at), (2, 5, None));
        assert_eq!(
            (row.tag(), PeriodRow { done_at: Some(Micros(9)), ..row }.tag()),
            ("a0".to_owned(), "a9".to_owned())
        );
        let states = [PeriodState::Frozen, PeriodState::Done, PeriodState::Ended, PeriodState::Pruned];
        assert_eq!(states.map(PeriodState::text), ["frozen", "done", "ended", "pruned"]);
    }

    #[test]
    fn redis_went_back_if_its_freeze_is_older_than_the_row() {
        for (generation, note, expected) in
            [(5, Some(7), false), (5, Some(6), true), (5, None, true), (4, Some(8), true), (6, None, false)]
        {
            let keys = BoardKeys { freeze: Freeze { generation, note }, ..BoardKeys::default() };
            assert_eq!(went_back(keys, done()), expected, "{generation} {note:?}");
        }
    }
}
