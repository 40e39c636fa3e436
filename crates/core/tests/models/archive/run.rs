//! The steps of a run, in the order of `src/jobs/archive/steps.rs`. Every decision is a function of the daemon.

use std::time::Duration;

use tallyd_core::archive::{Backup, BoardKeys, Facts, Frozen, Note, PeriodRow, Plan, Reason, decide, left_over};
use tallyd_core::model::{Freeze, Micros};

use super::stores::{Changed, MySql, Raised, Redis, tally_of};
use crate::zsets::{EMPTY, Zset, members};

const HOUR: u64 = 3_600;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Run {
    /// No two runs have the same claim.
    pub id: u8,
    /// MySQL can assign a number twice, if it goes back to an older state.
    pub number: u64,
    /// The hour at which the run began.
    pub now: u8,
    pub expire_after: u8,
    /// Whether the run held the job's lock after it had claimed the board.
    pub was_holder: bool,
    pub step: Step,
}

/// How a run ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum End {
    Done,
    Kept(Reason),
    /// Another run has taken over, or Redis has lost the claim.
    Failed,
}

/// The next step of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Step {
    FindsFrozen,
    Claims(Option<Freeze>),
    ReadsRow,
    ReadsKeys(Option<PeriodRow>),
    Keeps(Work),
    RaisesLive(BoardKeys, PeriodRow, u64),
    NotesAgain(BoardKeys, PeriodRow),
    Freezes(Work, Option<u64>),
    Notes(Work),
    Merges(Work),
    Raises(Work, PeriodRow, u64),
    Reads(Work),
    Writes(Work, usize),
    ReadsBack(Work),
    Trims(Work),
    Counts(Work),
    LooksBeyond(Work),
    NotesDone(Work),
    Expires(PeriodRow, Next),
    TrimsOther(PeriodRow, Next),
    ReadsRows(PeriodRow),
    Compares(PeriodRow, Zset),
    KeepsForGood,
    Unlinks,
    NotesEnded(Option<PeriodRow>, bool),
}

/// The work after the deletion of the other copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Next {
    Stop,
    End,
    Unlink,
    /// Redis no longer has the zset. The flag says whether it has a live zset.
    NoteEnded(bool),
}

/// The zset that a run archives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Work {
    frozen: Frozen,
    merged: u64,
    copied: Zset,
}

impl Work {
    fn new(frozen: Frozen) -> Self {
        Self { frozen, merged: 0, copied: EMPTY }
    }

    fn copy(&self) -> usize {
        usize::from(self.frozen.copy())
    }
}

fn kept<T>(reason: Reason) -> Result<T, End> {
    Err(End::Kept(reason))
}

/// Like `BoardRun::taken`.
fn taken(changed: Changed) -> Result<Option<u64>, End> {
    match changed {
        Changed::Done(times) => Ok(Some(times)),
        Changed::Absent => Ok(None),
        Changed::Refused => Err(End::Failed),
        Changed::Lost => kept(Reason::WentBackAgain),
    }
}

/// Like `BoardRun::present`.
fn present(changed: Changed) -> Result<u64, End> {
    taken(changed)?.ok_or(End::Kept(Reason::ZsetGone))
}

impl Run {
    fn now(&self) -> Micros {
        Micros(0).after(Duration::from_secs(HOUR * u64::from(self.now)))
    }

    fn expire_after(&self) -> Duration {
        Duration::from_secs(HOUR * u64::from(self.expire_after))
    }

    /// Whether the next step is a call that can run late.
    pub(super) fn changes(&self) -> bool {
        use Step::{Compares, Counts, FindsFrozen, LooksBeyond, Reads, ReadsBack, ReadsKeys, ReadsRow, ReadsRows};
        !matches!(
            self.step,
            FindsFrozen
                | ReadsRow
                | ReadsKeys(_)
                | Reads(_)
                | ReadsBack(_)
                | Counts(_)
                | LooksBeyond(_)
                | ReadsRows(_)
                | Compares(..)
        )
    }

    /// Changes MySQL in a transaction that checks the job's lock.
    fn writes(&self, mysql: &mut MySql, change: impl FnOnce(&mut MySql)) -> Result<(), End> {
        if mysql.holds(self.id, change) { Ok(()) } else { Err(End::Failed) }
    }

    /// Does one step. Returns the next one, or how the run ended.
    pub(super) fn does(&mut self, redis: &mut Redis, mysql: &mut MySql) -> Result<Step, End> {
        match self.step {
            Step::FindsFrozen => Ok(Step::Claims(mysql.row.map(|row| row.frozen))),
            Step::Claims(frozen) => {
                redis.claims(self.id, self.number, frozen);
                Ok(Step::ReadsRow)
            }
            Step::ReadsRow => {
                self.was_holder = mysql.holder == self.id;
                self.writes(mysql, |_| {})?;
                Ok(Step::ReadsKeys(mysql.row))
            }
            Step::ReadsKeys(row) => self.decides(redis.keys(), row),
            Step::RaisesLive(keys, row, page) => {
                let scores = if page == 0 { EMPTY } else { mysql.rows[usize::from(row.copy.unwrap_or(0))] };
                present(redis.raises(self.id, Raised::Live, page, scores))?;
                Ok(if page == 0 { Step::RaisesLive(keys, row, 1) } else { Step::NotesAgain(keys, row) })
            }
            Step::NotesAgain(keys, row) => {
                self.writes(mysql, |mysql| mysql.notes_frozen(keys.freeze.generation))?;
                Ok(Step::Freezes(Work::new(Frozen::raised(keys, row)), Some(2)))
            }
            Step::Freezes(work, pages) => {
                present(redis.freezes(self.id, work.frozen.freeze.note, pages))?;
                Ok(Step::Notes(work))
            }
            Step::Keeps(work) => present(redis.stays(self.id, false)).map(|_| Step::Notes(work)),
            _ => self.archives(redis, mysql),
        }
    }

    fn decides(&self, keys: BoardKeys, row: Option<PeriodRow>) -> Result<Step, End> {
        let (expire_after, now) = (Some(self.expire_after()), self.now());
        match decide(Facts { keys, row, backup: Backup::None, expire_after, now }) {
            Plan::Nothing | Plan::Forget => Err(End::Done),
            Plan::Keep(reason) => kept(reason),
            Plan::Archive { .. } if keys.frozen => Ok(Step::Keeps(Work::new(Frozen::found(keys, row)))),
            Plan::Archive { .. } => Ok(Step::Freezes(Work::new(Frozen::first(keys)), None)),
            Plan::Raise { row, .. } => Ok(Step::RaisesLive(keys, row, 0)),
            Plan::Wait { .. } => Ok(row.map_or(Step::KeepsForGood, |row| Step::Expires(row, Next::Stop))),
            Plan::End { row } => Ok(Step::ReadsRows(row)),
            Plan::NoteEnded => {
                Ok(row.map_or(Step::KeepsForGood, |row| Step::TrimsOther(row, Next::NoteEnded(keys.live))))
            }
        }
    }

    /// From a frozen zset to a verified copy.
    fn archives(&mut self, redis: &mut Redis, mysql: &mut MySql) -> Result<Step, End> {
        match self.step {
            Step::Notes(work) => {
                match work.frozen.note() {
                    Note::Nothing => {}
                    Note::Frozen => self.writes(mysql, |mysql| mysql.notes_frozen(work.frozen.freeze.generation))?,
                    Note::LateMembersMissing => self.writes(mysql, MySql::notes_late_members_missing)?,
                }
                Ok(Step::Merges(work))
            }
            Step::Merges(work) => {
                let moved = present(redis.merges(self.id))?;
                let work = Work { merged: work.merged + moved, ..work };
                Ok(match work.frozen.lacks_late_members_of() {
                    _ if work.frozen.has_more_late(moved, 1) => Step::Merges(work),
                    Some(row) => Step::Raises(work, row, 0),
                    None => Step::Reads(work),
                })
            }
            Step::Raises(work, row, page) => {
                let to = Raised::Frozen { late_members: work.frozen.late_members + work.merged };
                let scores = if page == 1 { mysql.rows[usize::from(row.copy.unwrap_or(0))] } else { EMPTY };
                present(redis.raises(self.id, to, page, scores))?;
                Ok(if page == 2 { Step::Reads(work) } else { Step::Raises(work, row, page + 1) })
            }
            Step::Reads(_) if redis.frozen == EMPTY => kept(Reason::FrozenGone),
            Step::Reads(work) => Ok(Step::Writes(Work { copied: redis.frozen, ..work }, 0)),
            Step::Writes(work, member) => {
                if work.copied[member] > 0 {
                    self.writes(mysql, |mysql| mysql.rows[work.copy()][member] = work.copied[member])?;
                }
                Ok(if member == 0 { Step::Writes(work, 1) } else { Step::ReadsBack(work) })
            }
            Step::ReadsBack(work) => {
                let rows = mysql.rows[work.copy()].iter().zip(work.copied);
                let differs = rows.into_iter().any(|(row, copied)| copied > 0 && *row != copied);
                if differs { kept(Reason::Differs(0)) } else { Ok(Step::Trims(work)) }
            }
            Step::Trims(work) => {
                let left = |rows: &mut Zset| {
                    rows.iter_mut().zip(work.copied).filter(|(_, copied)| *copied == 0).for_each(|(row, _)| *row = 0);
                };
                self.writes(mysql, |mysql| left(&mut mysql.rows[work.copy()]))?;
                Ok(Step::Counts(work))
            }
            Step::Counts(work) => {
                let (before, now) = (members(work.copied), members(redis.frozen));
                if before == now { Ok(Step::LooksBeyond(work)) } else { kept(Reason::Changed { before, now }) }
            }
            Step::LooksBeyond(work) => {
                let surplus =
                    mysql.rows[work.copy()].iter().zip(work.copied).any(|(row, copied)| copied == 0 && *row > 0);
                if surplus { kept(Reason::Differs(0)) } else { Ok(Step::NotesDone(work)) }
            }
            Step::NotesDone(work) => {
                let done = work.frozen.done(tally_of(work.copied), 0, work.merged);
                let now = self.now();
                self.writes(mysql, |mysql| mysql.notes_done(done, now))?;
                Ok(Step::Expires(done.into(), if self.expire_after == 0 { Next::End } else { Next::Stop }))
            }
            _ => self.ends(redis, mysql),
        }
    }

    /// From a verified copy to its end in Redis.
    fn ends(&mut self, redis: &mut Redis, mysql: &mut MySql) -> Result<Step, End> {
        match self.step {
            Step::Expires(row, next) => {
                taken(redis.stays(self.id, true))?;
                Ok(Step::TrimsOther(row, next))
            }
            Step::TrimsOther(row, next) => {
                if let Some(copy) = row.copy {
                    self.writes(mysql, |mysql| mysql.rows[usize::from(copy ^ 1)] = EMPTY)?;
                }
                match next {
                    Next::Stop => Err(End::Done),
                    Next::End => Ok(Step::ReadsRows(row)),
                    Next::Unlink => Ok(Step::Unlinks),
                    Next::NoteEnded(live) => Ok(Step::NotesEnded(Some(row), live)),
                }
            }
            Step::ReadsRows(row) => Ok(Step::Compares(row, mysql.rows[usize::from(row.copy.unwrap_or(0))])),
            Step::Compares(row, rows) => {
                let is_verified = redis.frozen == rows && rows != EMPTY && tally_of(rows) == row.tally;
                Ok(if is_verified { Step::TrimsOther(row, Next::Unlink) } else { Step::KeepsForGood })
            }
            Step::KeepsForGood => {
                taken(redis.stays(self.id, false))?;
                kept(Reason::NotAsVerified)
            }
            Step::Unlinks if present(redis.ends(self.id))? == 0 => kept(Reason::WrittenJustNow),
            Step::Unlinks => Ok(Step::NotesEnded(None, false)),
            Step::NotesEnded(row, live) => {
                self.writes(mysql, MySql::notes_ended)?;
                left_over(row, live).map_or(Err(End::Done), kept)
            }
            _ => Err(End::Failed),
        }
    }
}
