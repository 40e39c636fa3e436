//! The stores, and the steps of a run in the order of `src/jobs/snapshots`. Every decision is a function of the daemon.

use tallyd_core::archive::{Snapshot, are_of_board};
use tallyd_core::model::Micros;

use crate::zsets::{EMPTY, MEMBERS, Zset, both, members};

/// The zset that a restore has filled. Its key contains the snapshot's tag.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Restored {
    pub tag: (u64, Option<Micros>),
    pub zset: Zset,
    /// Whether additions were moved into it.
    pub has_moved: bool,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct Redis {
    pub live: Zset,
    pub mark: Option<u64>,
    /// 0 until a run claims the board.
    pub generation: u64,
    pub claim: u8,
    pub filling: Zset,
    /// The pages that this server received of a raise.
    pub pages: u64,
    pub restored: Option<Restored>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct MySql {
    pub snapshot: Option<Snapshot>,
    pub saved: Zset,
    /// The run that holds the job's lock.
    pub holder: u8,
}

impl MySql {
    pub(super) fn complete(&self) -> Option<Snapshot> {
        self.snapshot.filter(|snapshot| snapshot.taken_at.is_some())
    }
}

/// The next step of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Step {
    // A save.
    FindsSnapshot,
    FindsBoard(Option<Snapshot>),
    Claims(Found),
    HoldsLock(Found),
    ReadsBest(Found),
    Compares(Found, Zset),
    Marks(Found),
    Begins(Found),
    ReadsSaved,
    Looks(Zset),
    Changes(Zset, Zset),
    Scans,
    Adds(Zset),
    Ends(u64),
    // A restore.
    ClaimsLost,
    ReadsGeneration,
    ReadsSnapshot(u64),
    FindsRestored(u64, Snapshot),
    ReadsMark(u64, Snapshot),
    ReadsLostBest(u64, Snapshot, Option<u64>),
    ComparesLost(u64, Snapshot, Option<u64>, Zset),
    ClearsFilling(u64, Snapshot),
    ReadsRows(u64, Snapshot),
    Fills(u64, Snapshot, Zset, usize),
    EndsFilling(u64, Snapshot, Zset),
    Moves(u64, Snapshot),
    ReadsToRaise(u64, Snapshot),
    Raises(u64, Snapshot, Zset, u64),
    ReadsOldMark(u64, Snapshot),
    MarksRaised(u64, Snapshot, Option<u64>),
    NotesGeneration(u64),
}

/// The facts that a save reads before it claims the board.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Found {
    noted: Option<Snapshot>,
    mark: Option<u64>,
    live: bool,
    generation: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Run {
    /// No two runs have the same claim.
    pub id: u8,
    /// Whether the run held the job's lock after it had claimed the board.
    pub was_holder: bool,
    pub step: Step,
}

/// How a run ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    Done,
    /// Redis has lost the board.
    Lost,
    /// Another run has taken over, or Redis has lost the claim.
    Failed,
}

/// Whether the live zset is still the board of the snapshot.
fn has_best(saved: Zset, live: Zset, evicts: bool) -> bool {
    let scores = |zset: Zset| {
        let best = (0..MEMBERS).filter(|member| saved[*member] > 0 && zset[*member] > 0);
        best.map(|member| f64::from(zset[member])).collect::<Vec<_>>()
    };
    are_of_board(&scores(saved), &scores(live), evicts)
}

fn tag(snapshot: Snapshot) -> (u64, Option<Micros>) {
    (snapshot.number, snapshot.taken_at)
}

impl Redis {
    fn is_filled(&self, of: Snapshot) -> bool {
        self.restored.is_some_and(|restored| restored.tag == tag(of))
    }

    /// `board_mark.lua`.
    fn marks(&mut self, former: Option<u64>, new: u64, pages: Option<u64>) -> Result<(), End> {
        if self.mark != former || pages.is_some_and(|pages| pages != self.pages) {
            return Err(End::Lost);
        }
        if former.is_none() && self.live == EMPTY {
            return Err(End::Done);
        }
        self.mark = Some(new);
        Ok(())
    }

    /// `board_raise.lua`.
    fn raises(&mut self, pages: u64, scores: Zset) -> Result<(), End> {
        if pages != 0 && self.pages != pages {
            return Err(End::Failed);
        }
        self.pages = pages + 1;
        self.live = both(self.live, scores, u8::max);
        Ok(())
    }

    /// The check of `board_scan.lua`.
    fn scans(&self, number: u64) -> Result<Zset, End> {
        if self.mark == Some(number) { Ok(self.live) } else { Err(End::Lost) }
    }

    /// `board_merge.lua` for a restored zset, with pages of one member. Returns whether the zset became the live zset.
    fn moves(&mut self, tag: (u64, Option<Micros>), mark: u64) -> Result<bool, End> {
        let Some(restored) = self.restored.as_mut().filter(|restored| restored.tag == tag) else {
            return Err(End::Lost);
        };
        (restored.has_moved, self.mark) = (true, None);
        if let Some(member) = (0..MEMBERS).find(|member| self.live[*member] > 0) {
            restored.zset[member] += self.live[member];
            self.live[member] = 0;
        }
        if self.live != EMPTY {
            return Ok(false);
        }
        (self.live, self.mark, self.restored) = (restored.zset, Some(mark), None);
        Ok(true)
    }
}

impl Run {
    pub(super) fn new(id: u8, step: Step) -> Self {
        Self { id, was_holder: false, step }
    }

    fn number(&self) -> u64 {
        u64::from(self.id)
    }

    /// Whether the next step is a call that can run late.
    pub(super) fn changes(&self) -> bool {
        use Step::{Adds, Begins, Changes, Claims, ClaimsLost, ClearsFilling, Ends, EndsFilling, Fills, Marks};
        use Step::{MarksRaised, Moves, NotesGeneration, Raises};
        matches!(
            self.step,
            Claims(_)
                | Marks(_)
                | Begins(_)
                | Changes(..)
                | Adds(_)
                | Ends(_)
                | ClaimsLost
                | ClearsFilling(..)
                | Fills(..)
                | EndsFilling(..)
                | Moves(..)
                | Raises(..)
                | MarksRaised(..)
                | NotesGeneration(_)
        )
    }

    fn claims(&self, redis: &mut Redis) {
        redis.claim = self.id;
        if redis.generation == 0 {
            redis.generation = self.number();
        }
    }

    /// Does one step. Returns the next one, or how the run ended.
    pub(super) fn does(&mut self, redis: &mut Redis, mysql: &mut MySql) -> Result<Step, End> {
        use Step::*;
        let is_claimed = redis.claim == self.id;
        let script = if is_claimed { Ok(()) } else { Err(End::Failed) };
        let statement = if mysql.holder == self.id { Ok(()) } else { Err(End::Failed) };
        let (number, now) = (self.number(), Micros(i64::from(self.id)));
        let snapshot = |found: Found| found.noted.filter(|noted| noted.taken_at.is_some());
        Ok(match self.step {
            FindsSnapshot => FindsBoard(mysql.snapshot),
            FindsBoard(noted) => Claims(Found { noted, mark: redis.mark, live: redis.live != EMPTY, generation: 0 }),
            Claims(found) => {
                self.claims(redis);
                HoldsLock(Found { generation: redis.generation, ..found })
            }
            HoldsLock(found) => {
                self.was_holder = mysql.holder == self.id;
                statement?;
                ReadsBest(found)
            }
            ReadsBest(found) => Compares(found, mysql.saved),
            Compares(found, saved) => match snapshot(found) {
                Some(taken) if !taken.is_marked(found.mark) || !has_best(saved, redis.live, false) => {
                    return Err(End::Lost);
                }
                None if !found.live => return Err(End::Done),
                _ => Marks(found),
            },
            Marks(found) => {
                script?;
                redis.marks(found.mark, number, None)?;
                Begins(found)
            }
            Begins(Found { generation, .. }) => {
                statement?;
                let new = Snapshot { number, generation, members: 0, began_at: now, taken_at: None };
                let noted = mysql.snapshot.unwrap_or(new);
                mysql.snapshot = Some(Snapshot { number, generation, began_at: now, ..noted });
                ReadsSaved
            }
            ReadsSaved => Looks(mysql.saved),
            Looks(saved) => Changes(saved, redis.scans(number)?),
            Changes(saved, live) => {
                statement?;
                let changed = std::array::from_fn(|member| if saved[member] > 0 { live[member] } else { 0 });
                mysql.saved = changed;
                Scans
            }
            Scans => Adds(redis.scans(number)?),
            Adds(live) => {
                statement?;
                mysql.saved = both(mysql.saved, live, |saved, live| if saved > 0 { saved } else { live });
                Ends(members(mysql.saved))
            }
            Ends(members) => {
                statement?;
                mysql.snapshot = mysql.snapshot.map(|noted| Snapshot { members, taken_at: Some(now), ..noted });
                return Err(End::Done);
            }
            _ => return self.restores(redis, mysql, script, statement),
        })
    }

    fn restores(
        &mut self,
        redis: &mut Redis,
        mysql: &mut MySql,
        script: Result<(), End>,
        statement: Result<(), End>,
    ) -> Result<Step, End> {
        use Step::*;
        Ok(match self.step {
            ClaimsLost => {
                self.claims(redis);
                ReadsGeneration
            }
            ReadsGeneration => ReadsSnapshot(redis.generation),
            ReadsSnapshot(generation) => {
                self.was_holder = mysql.holder == self.id;
                statement?;
                FindsRestored(generation, mysql.complete().ok_or(End::Done)?)
            }
            FindsRestored(generation, of) => match redis.restored {
                Some(restored) if redis.is_filled(of) && restored.has_moved => Moves(generation, of),
                _ => ReadsMark(generation, of),
            },
            ReadsMark(generation, of) => ReadsLostBest(generation, of, redis.mark),
            ReadsLostBest(generation, of, mark) => ComparesLost(generation, of, mark, mysql.saved),
            ComparesLost(generation, of, mark, saved) => {
                if of.is_marked(mark) && redis.live != EMPTY && has_best(saved, redis.live, true) {
                    return Err(End::Done);
                }
                match of.was_flushed(mark, generation) {
                    true if redis.is_filled(of) => Moves(generation, of),
                    true => ClearsFilling(generation, of),
                    false => ReadsToRaise(generation, of),
                }
            }
            _ => return self.restores_from(redis, mysql, script, statement),
        })
    }

    /// Restores from a source.
    fn restores_from(
        &self,
        redis: &mut Redis,
        mysql: &mut MySql,
        script: Result<(), End>,
        statement: Result<(), End>,
    ) -> Result<Step, End> {
        use Step::*;
        Ok(match self.step {
            ClearsFilling(generation, of) => {
                script?;
                redis.filling = EMPTY;
                ReadsRows(generation, of)
            }
            ReadsRows(generation, of) => Fills(generation, of, mysql.saved, 0),
            Fills(generation, of, saved, member) => {
                script?;
                redis.filling[member] = saved[member];
                if members(redis.filling) != members(if member == 0 { [saved[0], 0] } else { saved }) {
                    return Err(End::Failed);
                }
                if member == 0 { Fills(generation, of, saved, 1) } else { EndsFilling(generation, of, saved) }
            }
            EndsFilling(generation, of, saved) => {
                script?;
                if members(redis.filling) != members(saved) {
                    return Err(End::Lost);
                }
                if !redis.is_filled(of) {
                    redis.restored = Some(Restored { tag: tag(of), zset: redis.filling, has_moved: false });
                    redis.filling = EMPTY;
                }
                Moves(generation, of)
            }
            Moves(generation, of) => {
                script?;
                if redis.moves(tag(of), of.number)? { NotesGeneration(generation) } else { Moves(generation, of) }
            }
            ReadsToRaise(generation, of) => Raises(generation, of, mysql.saved, 0),
            Raises(generation, of, saved, page) => {
                script?;
                redis.raises(page, if page == 0 { EMPTY } else { saved })?;
                if page == 0 { Raises(generation, of, saved, 1) } else { ReadsOldMark(generation, of) }
            }
            ReadsOldMark(generation, of) => MarksRaised(generation, of, redis.mark),
            MarksRaised(generation, of, mark) => {
                script?;
                redis.marks(mark, of.number, Some(2))?;
                NotesGeneration(generation)
            }
            NotesGeneration(generation) => {
                statement?;
                mysql.snapshot = mysql.snapshot.map(|noted| Snapshot { generation, ..noted });
                return Err(End::Done);
            }
            _ => return Err(End::Failed),
        })
    }
}
