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
