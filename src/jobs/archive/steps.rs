//! What one period needs, step by step. Each step may run again: the next run begins wherever this one ended.

use std::time::{Duration, Instant};

use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use super::Archiver;
use super::candidates::{Candidate, instant};
use super::plan::{self, Plan};
use super::progress::Progress;
use super::report::{Outcome, PeriodReport};
use crate::cache::CacheError;
use crate::cache::boards::{BoardKeys, Changed};
use crate::cache::score::Rule;
use crate::model::{BoardPeriod, Freeze, Micros};
use crate::runtime::fault;
use crate::store::boards::{Done, PeriodRow, PeriodState};
use crate::store::{Fate, StoreError};

/// How long after its time a zset that no run has ended goes away by itself.
const SAFETY_NET: Duration = Duration::from_secs(86_400);

/// A run that changes things.
pub(super) struct Run<'a> {
    pub(super) archiver: &'a Archiver,
    /// The fencing token, in MySQL and in the boards' claims.
    pub(super) number: u64,
    pub(super) now: Micros,
    pub(super) stop: &'a CancellationToken,
    pub(super) progress: watch::Sender<Progress>,
}

/// Why a period was left before its end.
pub(super) enum Halt {
    /// The daemon stops.
    Stopped,
    /// This period alone can't go on: a sentence that says why.
    Kept(String),
    /// The run can't go on: a server is away, or another run took over.
    Failed(anyhow::Error),
}

pub(super) type Step<T> = Result<T, Halt>;

impl From<StoreError> for Halt {
    fn from(error: StoreError) -> Self {
        match error.fate() {
            Fate::Row => Self::Kept(format!("{:#}", anyhow::Error::from(error))),
            Fate::Passing => Self::Failed(error.into()),
        }
    }
}

impl From<CacheError> for Halt {
    fn from(error: CacheError) -> Self {
        match error.is_of_the_key() {
            true => Self::Kept(format!("{:#}", anyhow::Error::from(error))),
            false => Self::Failed(error.into()),
        }
    }
}

impl Run<'_> {
    /// Looks at one period and does what it needs.
    pub(super) async fn take_steps(&self, candidate: &Candidate) -> Step<PeriodReport> {
        let started = Instant::now();
        let taken = self.do_what_is_missing(candidate).await.map(|taken| taken.after(started.elapsed()));
        let BoardPeriod { board, period } = &candidate.at;
        let seconds = started.elapsed().as_secs_f32();
        match &taken {
            Ok(PeriodReport { outcome: Outcome::Archived, members, late_members, .. }) => info!(
                event = "board-archived",
                board,
                period,
                members,
                late_members,
                seconds,
                "{board} {period}: {members} members archived in {seconds:.1} s, {late_members} of them late"
            ),
            Ok(PeriodReport { outcome: Outcome::Ended, members, late_members, .. }) => info!(
                event = "board-ended",
                board,
                period,
                members,
                late_members,
                seconds,
                "{board} {period}: {members} members are in MySQL and no longer in Redis"
            ),
            Err(Halt::Kept(reason)) => {
                warn!(event = "board-kept", board, period, reason, seconds, "{board} {period} is kept: {reason}");
            }
            Ok(_) | Err(Halt::Stopped | Halt::Failed(_)) => {}
        }
        taken
    }

    async fn do_what_is_missing(&self, candidate: &Candidate) -> Step<PeriodReport> {
        self.check_stop()?;
        let Archiver { store, cache, .. } = self.archiver;
        let at = &candidate.at;
        // After the claim: whatever an overtaken run did to the period, it did before this.
        let row = store.held_board_period(self.number, at).await?;
        let keys = cache.find_boards(std::slice::from_ref(at)).await?.pop().unwrap_or_default();
        let report = |outcome| PeriodReport {
            members: row.map_or(0, |row| row.tally.members),
            ..PeriodReport::new(at, outcome)
        };
        let saved = self.archiver.saved(at, candidate.rule).await?;
        match (plan::decide(keys, row, saved, candidate.expire_after, self.now), row, candidate.expire_after) {
            (Plan::Keep(reason), _, _) => Err(Halt::Kept(reason.to_owned())),
            (Plan::Archive, row, Some(expire_after)) if keys.frozen => {
                // Its EXPIRE would take away what is not archived yet.
                self.present(cache.keep_frozen(at, self.number).await?)?;
                self.archive(candidate, row, keys, expire_after).await
            }
            (Plan::Archive, row, Some(expire_after)) => {
                let freeze = self.freeze(at, Freeze { note: Some(0), ..keys.freeze }, None).await?;
                self.archive(candidate, row, BoardKeys { freeze, late_members: 0, ..keys }, expire_after).await
            }
            (Plan::Raise, Some(row), Some(expire_after)) => {
                let freeze = self.raise_to_archive(at, keys.freeze.generation, row).await?;
                let row = PeriodRow { state: PeriodState::Frozen, ..row };
                self.archive(candidate, Some(row), BoardKeys { freeze, late_members: 0, ..keys }, expire_after).await
            }
            (Plan::End, Some(row), _) => self.end(at, row).await,
            (Plan::NoteEnded, row, _) => {
                self.trim_other(at, row.and_then(|row| row.copy)).await?;
                store.note_ended(self.number, at, self.now).await?;
                match plan::left_over(row, keys.live) {
                    Some(reason) => Err(Halt::Kept(reason)),
                    None => Ok(report(Outcome::Ended).because("it was gone from Redis already")),
                }
            }
            (Plan::Wait(left), row, _) => {
                // Each time: the run that noted "done" may have died before this.
                self.let_expire(at, row.and_then(|row| row.copy), left).await?;
                Ok(report(Outcome::Waiting).because(format!("until {}", instant(self.now.after(left)))))
            }
            (Plan::Nothing | Plan::Archive | Plan::Raise | Plan::End, _, _) => Ok(report(Outcome::Nothing)),
        }
    }

    /// Freezes the live zset, which was raised by so many `pages` if any.
    pub(super) async fn freeze(&self, at: &BoardPeriod, freeze: Freeze, pages: Option<u64>) -> Step<Freeze> {
        let note = freeze.note.unwrap_or(0);
        let frozen = self.archiver.cache.freeze_board(at, self.number, note, pages).await?;
        if frozen == Changed::Lost {
            return Err(Halt::Kept(plan::WENT_BACK_AGAIN.to_owned()));
        }
        self.present(frozen)?;
        fault::point("archive:frozen");
        Ok(freeze)
    }

    async fn archive(
        &self,
        Candidate { at, rule, top, .. }: &Candidate,
        row: Option<PeriodRow>,
        BoardKeys { freeze: frozen, late_members: late_before, .. }: BoardKeys,
        expire_after: Duration,
    ) -> Step<PeriodReport> {
        let store = &self.archiver.store;
        if row.is_none_or(|row| row.state != PeriodState::Frozen) {
            store.note_frozen(self.number, at, frozen.generation, self.now).await?;
            fault::point("archive:noted");
        }
        let late_members = self.merge_late(at, *rule).await?;
        fault::point("archive:merged");
        // Beside what is verified, which stays the archive until this is.
        let copy = row.and_then(|row| row.copy).map_or(0, |copy| copy ^ 1);
        let copied = self.copy(at, copy, *top).await?;
        // A zset that was made from the rows lacks what was left out of them.
        let restored = row.filter(|row| row.restored_at.is_some());
        let (tally, left_out) =
            (copied.tally, restored.map_or(copied.left_out, |row| row.left_out.max(copied.left_out)));
        fault::point("archive:copied");
        self.trim(at, copy, tally.members).await?;
        fault::point("archive:trimmed");
        self.verify_end(at, copy, copied).await?;
        fault::point("archive:verified");
        let done = Done { tally, left_out, copy, frozen, late_members: late_before + late_members };
        store.note_done(self.number, at, done, self.now).await?;
        fault::point("archive:done");
        self.let_expire(at, Some(copy), expire_after).await?;
        let members = tally.members;
        let report = |outcome| PeriodReport { members, left_out, late_members, ..PeriodReport::new(at, outcome) };
        if expire_after.is_zero() {
            let (state, copy) = (PeriodState::Done, Some(copy));
            let late_members = done.late_members;
            let row =
                PeriodRow { state, tally, left_out, copy, frozen, late_members, done_at: None, restored_at: None };
            return self.end(at, row).await.map(|_| report(Outcome::Ended));
        }
        let until = instant(self.now.after(expire_after));
        Ok(report(Outcome::Archived).because(format!("stays in Redis until {until}")))
    }

    /// Lets the zset of an archived board go away by itself after that time, and deletes the copy that is no longer its archive.
    async fn let_expire(&self, at: &BoardPeriod, copy: Option<u8>, stay: Duration) -> Step<()> {
        let stay = stay.saturating_add(SAFETY_NET);
        self.taken(self.archiver.cache.expire_frozen(at, self.number, stay).await?)?;
        fault::point("archive:expiring");
        self.trim_other(at, copy).await
    }

    async fn trim_other(&self, at: &BoardPeriod, copy: Option<u8>) -> Step<()> {
        let Some(copy) = copy else { return Ok(()) };
        self.trim(at, copy ^ 1, 0).await
    }

    /// Moves what came late into the frozen zset, until a page is not full: what comes still later is the next run's.
    async fn merge_late(&self, at: &BoardPeriod, rule: Rule) -> Step<u64> {
        let Archiver { cache, page_members, .. } = self.archiver;
        let mut merged = 0;
        loop {
            self.check_stop()?;
            let moved = self.present(cache.merge_late(at, self.number, *page_members, rule).await?)?;
            merged += moved;
            if moved > 0 {
                fault::point("archive:merged-page");
            }
            if moved < *page_members as u64 {
                return Ok(merged);
            }
        }
    }

    /// Ends an archived zset, if it and the rows are still what was verified.
    async fn end(&self, at: &BoardPeriod, row: PeriodRow) -> Step<PeriodReport> {
        let verified = match self.verify_again(at, row).await {
            Ok(tally) if tally == row.tally => Ok(tally),
            Ok(_) => Err(Halt::Kept("Redis and leaderboard_archive are equal, but not what was verified".to_owned())),
            Err(halt) => Err(halt),
        };
        let verified = match verified {
            Err(Halt::Kept(reason)) => {
                // Or the safety net would end what is no longer proved.
                self.taken(self.archiver.cache.keep_frozen(at, self.number).await?)?;
                let remedy = "it was archived before: delete its row of leaderboard_period to have it archived anew";
                Err(Halt::Kept(format!("{reason}; {remedy}")))
            }
            verified => verified,
        };
        let members = verified?.members;
        self.trim_other(at, row.copy).await?;
        self.unlink(at).await?;
        Ok(PeriodReport { members, ..PeriodReport::new(at, Outcome::Ended) })
    }

    async fn unlink(&self, at: &BoardPeriod) -> Step<()> {
        let Archiver { store, cache, .. } = self.archiver;
        if self.present(cache.end_frozen(at, self.number).await?)? == 0 {
            return Err(Halt::Kept("it was written to just now: the next run merges that".to_owned()));
        }
        fault::point("archive:unlinked");
        store.note_ended(self.number, at, self.now).await?;
        fault::point("archive:ended");
        Ok(())
    }

    /// Where the zset is gone that the step is about, the period is kept.
    pub(super) fn present(&self, changed: Changed) -> Step<u64> {
        self.taken(changed)?.ok_or_else(|| Halt::Kept("its zset is gone from Redis since it was looked for".to_owned()))
    }

    /// Where the claim is gone, the run ends. None where the zset is gone that the step is about.
    pub(super) fn taken(&self, changed: Changed) -> Step<Option<u64>> {
        match changed {
            Changed::Done(times) | Changed::Put(times) => Ok(Some(times)),
            Changed::Absent => Ok(None),
            Changed::Lost => Err(Halt::Kept(plan::LOST_LIVE.to_owned())),
            Changed::Refused => {
                let error = anyhow::Error::from(StoreError::TakenOver("the board".to_owned()));
                Err(Halt::Failed(error.context(
                    "Redis no longer knows this run's claim of the board: another run has begun, or Redis lost its data",
                )))
            }
        }
    }

    pub(super) fn check_stop(&self) -> Step<()> {
        if self.stop.is_cancelled() { Err(Halt::Stopped) } else { Ok(()) }
    }
}
