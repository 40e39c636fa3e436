//! The state of a closed period of a board in MySQL and in Redis.

use crate::model::{Freeze, Micros};
use crate::tally::Tally;

/// The state of a closed period.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PeriodState {
    /// The zset is frozen. In MySQL, rows can be missing or can belong to an earlier copy.
    Frozen,
    /// The archive contains the whole board, and its rows are verified.
    Done,
    /// The board is archived and verified, and was deleted from Redis.
    Ended,
    /// The rows were deleted or are being deleted, because MySQL has kept them for the configured time.
    Pruned,
}

/// A row of `leaderboard_period`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PeriodRow {
    pub state: PeriodState,
    /// The tally (number and checksum) of the rows at the last verification. Before the first verification, all numbers
    /// in the tally are zero.
    pub tally: Tally,
    /// The number of the board's members that are not archived.
    pub left_out: u64,
    /// The time when the rows were last verified.
    pub done_at: Option<Micros>,
    /// The time when the frozen zset was restored from the rows. The value is `None` if the zset is still the original
    /// board.
    pub restored_at: Option<Micros>,
    /// The verified copy of the rows, or `None` before the first verification.
    pub copy: Option<u8>,
    /// The archiver compared the rows in MySQL with a frozen zset in Redis. This field identifies that frozen zset.
    pub frozen: Freeze,
    /// At the time of the verification, Redis had moved this number of late members into the frozen zset. A higher number
    /// than Redis has means that the frozen zset lacks late members of the verified copy. A raise of the zset counts as one.
    pub late_members: u64,
}

/// More late members than any zset has. A row has this number until the next copy is verified.
pub const LATE_MEMBERS_MISSING: u64 = u64::MAX;

/// The result of a verification, which becomes a part of [`PeriodRow`].
#[derive(Clone, Copy, Debug)]
pub struct Done {
    /// The tally (number and checksum) of the rows.
    pub tally: Tally,
    /// The number of members that are not archived.
    pub left_out: u64,
    pub copy: u8,
    /// The identity of the frozen zset that is in Redis.
    pub frozen: Freeze,
    /// The number of late members that Redis has moved into the frozen zset.
    pub late_members: u64,
}

impl PeriodRow {
    /// Returns a tag. When a run restores the zset from the archive to Redis, this tag becomes a part of the zset's
    /// name.
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

/// The existing zsets of a period, and Redis' notes about the period's freeze.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct BoardKeys {
    /// The zset that clients write to.
    pub live: bool,
    /// The zset that is archived.
    pub frozen: bool,
    /// Redis' notes about the freeze.
    pub freeze: Freeze,
    /// How many late members were moved into the frozen zset. A raise of the zset counts as one.
    pub late_members: u64,
}

/// Whether MySQL has a snapshot of a period, and whether Redis has lost the period's board since the snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backup {
    None,
    /// MySQL has a snapshot, and Redis has lost no part of the board since then.
    Intact,
    /// MySQL has a snapshot. After the snapshot was taken, Redis lost the board or a part of the board.
    Lost,
}

/// Whether Redis went back to a state from before the freeze, although MySQL has recorded the freeze. After a flush,
/// the data in Redis gets a newer generation than the recorded one, so the result is false.
pub fn went_back(keys: BoardKeys, row: PeriodRow) -> bool {
    keys.freeze < row.frozen
}
