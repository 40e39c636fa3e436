//! The steps for one period. Each step can run again, so that the next run can continue where this run ended.
//!
//! The run claims the board, keeps or makes the frozen zset, and records "frozen". It merges late writes, copies the
//! zset, deletes surplus rows, and checks that rows and zset are equal. It records "done", and lets the zset expire.

use std::time::{Duration, Instant};

use tracing::{info, warn};

use super::copy::Copier;
use super::rollback_recovery::{raise_frozen, raise_to_archive};
use crate::jobs::board_run::backup::{backup_of, forget};
use crate::jobs::board_run::periods::{Candidate, instant};
use crate::jobs::board_run::{BoardRun, Halt, Outcome, PeriodReport, Reason, Step};
use tallyd_base::runtime::fault;
use tallyd_core::archive::{Facts, Frozen, Note, PeriodRow, Plan, decide, left_over};
use tallyd_core::model::BoardPeriod;
use tallyd_redis::boards::Changed;
use tallyd_redis::score::Rule;

/// If no run removes a frozen zset after `expire_after`, Redis removes the zset when this additional time is over.
const SAFETY_NET: Duration = Duration::from_secs(86_400);

pub(super) struct Steps<'a> {
    run: &'a BoardRun<'a>,
    copier: Copier<'a>,
    page_members: usize,
}

impl<'a> Steps<'a> {
    pub(super) fn new(run: &'a BoardRun<'a>, page_members: usize) -> Self {
        Self { run, copier: Copier::new(run, page_members), page_members }
    }

    /// A run must claim the board before it reads the board. From then on, no earlier run can change the board.
    pub(super) async fn claim(&self, board: &str) -> Step<()> {
        self.run.claim(board).await?;
        fault::point("archive:claimed");
        Ok(())
    }

    pub(super) async fn take(&self, candidate: &Candidate) -> Step<PeriodReport> {
        let started = Instant::now();
        let taken = self.do_what_is_missing(candidate).await.map(|taken| taken.after(started.elapsed()));
        let BoardPeriod { board, period } = &candidate.at;
        let seconds = started.elapsed().as_secs_f32();
        match &taken {
            Ok(PeriodReport { outcome: Outcome::Archived, members, late_members, .. }) => {
                let text = format!("{members} members archived in {seconds:.1} s, including {late_members} late ones");
                info!(
                    event = "board-archived",
                    board, period, members, late_members, seconds, "{board} {period}: {text}"
                );
            }
            Ok(PeriodReport { outcome: Outcome::Ended, members, late_members, .. }) => {
                let text = format!("{members} members are in MySQL and no longer in Redis");
                info!(event = "board-ended", board, period, members, late_members, seconds, "{board} {period}: {text}");
            }
            Err(Halt::Kept(reason)) => {
                let reason = reason.to_string();
                warn!(
                    event = "board-kept",
                    board, period, reason, seconds, "{board} {period} was not changed: {reason}"
                );
            }
            Ok(_) | Err(Halt::Stopped | Halt::Failed(_)) => {}
        }
        taken
    }

    async fn do_what_is_missing(&self, candidate: &Candidate) -> Step<PeriodReport> {
        self.run.check_stop()?;
        let BoardRun { store, cache, number, now, .. } = *self.run;
        let at = &candidate.at;
        let row = store.fenced_board_period(number, at).await?;
        let facts = self.facts(candidate, row).await?;
        let keys = facts.keys;
        let report = |outcome| PeriodReport {
            members: row.map_or(0, |row| row.tally.members),
            ..PeriodReport::new(at, outcome)
        };
        match decide(facts) {
            Plan::Nothing => Ok(report(Outcome::Nothing)),
            Plan::Forget => {
                forget(self.run, at).await?;
                Ok(report(Outcome::Forgotten))
            }
            Plan::Keep(reason) => Err(Halt::Kept(reason)),
            Plan::Archive { expire_after } if keys.frozen => {
                // Removes the zset's expiry, because the expiry would delete data that has not been archived yet.
                self.run.present(cache.keep_frozen(at, number).await?)?;
                self.archive(candidate, Frozen::found(keys, row), expire_after).await
            }
            Plan::Archive { expire_after } => {
                let frozen = self.freeze(at, Frozen::first(keys), None).await?;
                self.archive(candidate, frozen, expire_after).await
            }
            Plan::Raise { row, expire_after } => {
                let pages = raise_to_archive(self.run, at, keys.freeze.generation, row).await?;
                let frozen = self.freeze(at, Frozen::raised(keys, row), Some(pages)).await?;
                self.archive(candidate, frozen, expire_after).await
            }
            Plan::End { row } => self.end(at, row).await,
            Plan::NoteEnded => {
                self.trim_other(at, row.and_then(|row| row.copy)).await?;
                store.note_ended(number, at, now).await?;
                match left_over(row, keys.live) {
                    Some(reason) => Err(Halt::Kept(reason)),
                    None => Ok(report(Outcome::Ended).because("Redis no longer had its zset")),
                }
            }
            Plan::Wait { left } => {
                // Each run repeats this step, because the run that recorded "done" can have crashed before this step.
                self.let_expire(at, row.and_then(|row| row.copy), left).await?;
                Ok(report(Outcome::Waiting).because(format!("until {}", instant(now.after(left)))))
            }
        }
    }

    async fn facts(&self, candidate: &Candidate, row: Option<PeriodRow>) -> Step<Facts> {
        let keys = self.run.keys(&candidate.at).await?;
        let backup = backup_of(self.run, &candidate.at, candidate.rule).await?;
        Ok(Facts { keys, row, backup, expire_after: candidate.expire_after, now: self.run.now })
    }

    /// `pages` is the number of pages whose scores the run has raised to MySQL's scores.
    async fn freeze(&self, at: &BoardPeriod, frozen: Frozen, pages: Option<u64>) -> Step<Frozen> {
        let note = frozen.freeze.note.unwrap_or(0);
        let changed = self.run.cache.freeze_board(at, self.run.number, note, pages).await?;
        if changed == Changed::Lost {
            return Err(Halt::Kept(Reason::WentBackAgain));
        }
        self.run.present(changed)?;
        fault::point("archive:frozen");
        Ok(frozen)
    }

    async fn archive(
        &self,
        Candidate { at, rule, top, .. }: &Candidate,
        frozen: Frozen,
        expire_after: Duration,
    ) -> Step<PeriodReport> {
        let BoardRun { store, number, now, .. } = *self.run;
        match frozen.note() {
            Note::LateMembersMissing => store.note_late_members_missing(number, at).await?,
            Note::Nothing => {}
            Note::Frozen => store.note_frozen(number, at, frozen.freeze.generation, now).await?,
        }
        if frozen.note() != Note::Nothing {
            fault::point("archive:noted");
        }
        let late_members = self.merge_late(at, *rule, frozen).await?;
        fault::point("archive:merged");
        if let Some(row) = frozen.lacks_late_members_of() {
            raise_frozen(self.run, at, row, frozen.late_members + late_members).await?;
        }
        let copy = frozen.copy();
        let copied = self.copier.copy(at, copy, *top).await?;
        fault::point("archive:copied");
        self.copier.trim(at, copy, copied.tally.members).await?;
        fault::point("archive:trimmed");
        self.copier.verify_end(at, copy, copied).await?;
        fault::point("archive:verified");
        let done = frozen.done(copied.tally, copied.left_out, late_members);
        store.note_done(number, at, done, now).await?;
        fault::point("archive:done");
        self.let_expire(at, Some(copy), expire_after).await?;
        let (members, left_out) = (done.tally.members, done.left_out);
        let report = |outcome| PeriodReport { members, left_out, late_members, ..PeriodReport::new(at, outcome) };
        if expire_after.is_zero() {
            return self.end(at, done.into()).await.map(|_| report(Outcome::Ended));
        }
        let until = instant(now.after(expire_after));
        Ok(report(Outcome::Archived).because(format!("stays in Redis until {until}")))
    }

    async fn merge_late(&self, at: &BoardPeriod, rule: Rule, frozen: Frozen) -> Step<u64> {
        let BoardRun { cache, number, .. } = *self.run;
        let mut merged = 0;
        loop {
            self.run.check_stop()?;
            let moved = self.run.present(cache.merge_late(at, number, self.page_members, rule).await?)?;
            merged += moved;
            if moved > 0 {
                fault::point("archive:merged-page");
            }
            if !frozen.has_more_late(moved, self.page_members as u64) {
                return Ok(merged);
            }
        }
    }

    /// Also deletes the older copy, which the new archive has replaced.
    async fn let_expire(&self, at: &BoardPeriod, copy: Option<u8>, stay: Duration) -> Step<()> {
        let stay = stay.saturating_add(SAFETY_NET);
        self.run.taken(self.run.cache.expire_frozen(at, self.run.number, stay).await?)?;
        fault::point("archive:expiring");
        self.trim_other(at, copy).await
    }

    async fn trim_other(&self, at: &BoardPeriod, copy: Option<u8>) -> Step<()> {
        let Some(copy) = copy else { return Ok(()) };
        self.copier.trim(at, copy ^ 1, 0).await
    }

    /// Removes an archived zset from Redis, if the zset and the rows are still equal to the verified data.
    async fn end(&self, at: &BoardPeriod, row: PeriodRow) -> Step<PeriodReport> {
        let verified = match self.copier.verify_again(at, row).await {
            Ok(tally) if tally == row.tally => Ok(tally),
            Ok(_) => Err(Halt::Kept(Reason::NotAsVerified)),
            Err(halt) => Err(halt),
        };
        let verified = match verified {
            Err(Halt::Kept(reason)) => {
                // Removes the zset's expiry, because the zset is no longer proven to be equal to the rows.
                self.run.taken(self.run.cache.keep_frozen(at, self.run.number).await?)?;
                return Err(Halt::Kept(Reason::ArchivedBefore(Box::new(reason))));
            }
            verified => verified?,
        };
        self.trim_other(at, row.copy).await?;
        self.unlink(at).await?;
        Ok(PeriodReport { members: verified.members, ..PeriodReport::new(at, Outcome::Ended) })
    }

    async fn unlink(&self, at: &BoardPeriod) -> Step<()> {
        let BoardRun { store, cache, number, now, .. } = *self.run;
        if self.run.present(cache.end_frozen(at, number).await?)? == 0 {
            return Err(Halt::Kept(Reason::WrittenJustNow));
        }
        fault::point("archive:unlinked");
        store.note_ended(number, at, now).await?;
        fault::point("archive:ended");
        Ok(())
    }

    pub(super) async fn foresee(&self, candidate: &Candidate) -> Step<PeriodReport> {
        let BoardRun { store, cache, now, .. } = *self.run;
        let at = &candidate.at;
        let row = store.board_period(at).await?;
        let facts = self.facts(candidate, row).await?;
        let archived = row.map_or(0, |row| row.tally.members);
        let report = |outcome| PeriodReport { members: archived, ..PeriodReport::new(at, outcome) };
        Ok(match decide(facts) {
            Plan::Nothing | Plan::Forget => report(Outcome::Nothing),
            Plan::Archive { .. } => {
                let (live, frozen) = cache.count_board(at).await?;
                if facts.keys.frozen {
                    PeriodReport { members: frozen, late_members: live, ..report(Outcome::WouldArchive) }
                } else {
                    PeriodReport { members: live, ..report(Outcome::WouldArchive) }
                }
            }
            Plan::Wait { left } => report(Outcome::Waiting).because(format!("until {}", instant(now.after(left)))),
            Plan::End { .. } => report(Outcome::WouldEnd),
            Plan::NoteEnded => report(Outcome::WouldEnd).because("Redis no longer has the zset of the board"),
            Plan::Raise { .. } => {
                let (live, _) = cache.count_board(at).await?;
                PeriodReport { members: live, ..report(Outcome::WouldArchive) }.because(Reason::WentBack)
            }
            Plan::Keep(reason) => PeriodReport { members: archived, ..PeriodReport::kept(at, &reason) },
        })
    }
}
