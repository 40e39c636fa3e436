//! One run of the archiver: closed boards are frozen, copied to MySQL and verified. After that, the run removes them
//! from Redis.
//!
//! # The way
//!
//! ```text
//! candidates   closed periods, from Redis; unfinished periods, from MySQL
//! steps        claim the board, then for each period: decide (`tallyd_core::archive`)
//!   archive    freeze (RENAME; the same script records it in Redis) -> record "frozen" in MySQL -> merge late writes -> copy in rank order
//!              beside the verified copy, and read back what is written -> trim -> verify the end -> record "done" and the copy -> EXPIRE, as
//!              a safety net -> delete the other copy
//!   raise      raise the live zset to the archive (rollback_recovery) -> record "frozen" -> freeze -> as above
//!   end        verify again -> UNLINK -> record "ended"
//! prune        delete archives and snapshots whose time is over
//! ```
//!
//! A run depends only on the current state: it checks every closed period and does the missing steps, so a run
//! continues after a crash at any step. Two rules always hold. A zset is removed from Redis only after its rows were
//! committed, read back, and found equal to it place by place. At most 15,000 members are in memory.
//!
//! # The races
//!
//! Writers do not check whether the archiver is running. They always add to the live key. A freeze renames the live
//! key, so the next addition creates it again.
//!
//! * A writer adds before the freeze: the write is part of the frozen zset.
//! * A writer adds after the freeze: the live key is new and holds only late writes. The run moves them into the frozen
//!   zset page by page. One script adds a member to the frozen zset and removes it from the live zset, so each member
//!   is added once, even if the script runs twice or after its timeout.
//! * A writer adds a member during the merge: this merge or the next run moves it.
//! * A writer adds a member after "done": the next run stops the expiry of the frozen zset (PERSIST), records "frozen"
//!   again, merges the member, and writes a second copy. Readers get the first copy until the second one is verified.
//! * A writer adds a member just before UNLINK: the script that removes the frozen zset first looks for the live key.
//!   If the live key exists, the frozen zset stays.
//! * A writer adds a member after the frozen zset was removed: the live key holds only late writes. A live key is
//!   frozen only if MySQL has no row of the period, or if Redis went back to an older state (below). Otherwise it
//!   stays, and every report contains the key and the reason.
//! * A writer subtracts from a member that only the frozen zset has: `board.lua` removes a member whose score falls to
//!   zero, so the subtraction is lost, and the archive keeps the higher score. This error is accepted, because it can
//!   only happen after `archive_grace`.
//! * A run crashes between two steps ([`FAULT_POINTS`]): the next run begins the copy again and writes the same places.
//!   If MySQL has no row for a frozen key yet, the key contains the complete board. Each run repeats EXPIRE for a zset
//!   whose archive is done.
//! * Two runs start at the same time: only the run that gets the job's lock continues. If a paused run's lease expires,
//!   a second run takes over, and the first run resumes later. Each transaction locks the row of the job's lock before
//!   its commit, finds the second run's number there, and is rolled back. Redis cannot check that lock, so a run claims
//!   a board in Redis before it reads the board's progress, and every script that changes a closed period does nothing
//!   if another run has claimed the board. The claim contains a random number, because after a failover MySQL can
//!   assign the number of a run a second time. If the first run claims the board after the second run, the second run's
//!   scripts are refused, and it fails. The first run detects the takeover at its next read from MySQL, and stops. The
//!   next run does all remaining work.
//! * Redis is flushed: the claim is lost, too, so scripts in flight do nothing. If a board was not verified before, the
//!   run reports the loss, never records "done" for it, and freezes no other zset as this period's board. If the period
//!   was "done" before, nothing is lost, and the period is recorded as ended. If a second copy (with late writes) was
//!   in progress, the first archive is complete, and the late writes are reported as lost.
//! * A replica that lacks the last seconds takes over, or a server starts from an old dump: the missing step is done
//!   again. Such a server can have a live zset of a period that is frozen according to MySQL, but not according to this
//!   server. This live zset is the whole board in an older state. Added to its archive, its scores would count twice,
//!   so they are raised to the archive's scores instead (`rollback_recovery`). The same is done with a frozen zset that
//!   lacks archived late writes. If the server lacks the mark of a board, the board is reported as lost.
//! * MySQL is restored from a backup: a period whose row is missing, or says "frozen", is archived as usual. A row that
//!   says "done" can be from before the late writes were archived. If Redis has moved more members into the frozen zset
//!   than MySQL says, the board is archived again. A zset that was removed from Redis since the backup is lost, with
//!   its late writes.
//! * A clock is wrong: MySQL's clock decides when a period is over. If the clock of the host or of Redis differs from
//!   it by minutes, the run does nothing.
//! * Another program changes the frozen zset, or the copied rows, during the copy or after it: the last run finds a
//!   page of the zset that differs from its rows. The zset stays without an expiry, and the report contains the first
//!   place that differs. The run continues with the other boards.

mod candidates;
mod copy;
mod rollback_recovery;
mod steps;

use std::borrow::Cow;
use std::collections::BTreeMap;

use anyhow::Result;
use tracing::info;

pub use super::board_run::periods::{MODE, Scope, ScopeError};
pub use super::board_run::{JOB, Outcome, PeriodReport, Report};

use super::board_run::periods::Candidate;
use super::board_run::{BoardRun, Halt, NEEDS, Progress, Reason, Step, backup};
use candidates::Candidates;
use copy::Copier;
use steps::Steps;
use tallyd_base::config::{Board, Config};
use tallyd_base::jobs::run::{Job, Run};
use tallyd_base::runtime::fault;
use tallyd_core::card::Card;
use tallyd_core::control::Task;
use tallyd_core::model::{BoardPeriod, Micros};
use tallyd_core::period::{Period, PeriodKind};
use tallyd_mysql::Store;

pub const FAULT_POINTS: [&str; 13] = [
    "archive:claimed",
    "archive:frozen",
    "archive:noted",
    "archive:merged-page",
    "archive:merged",
    "archive:copied-page",
    "archive:copied",
    "archive:trimmed",
    "archive:verified",
    "archive:done",
    "archive:expiring",
    "archive:unlinked",
    "archive:ended",
];

/// For a Redis server that went back to a state before the freeze. The run raises its scores to the archived ones.
pub const RAISE_FAULT_POINTS: [&str; 3] = ["archive:raised-page", "archive:raised", "archive:noted-again"];

pub const PRUNE_FAULT_POINTS: [&str; 2] = ["archive:pruning", "archive:forgetting"];

const PRUNED_MAX: usize = 100;

pub struct Archiver {
    scope: Scope,
    pub now: Option<Micros>,
    boards: Vec<Board>,
    page_members: usize,
}

impl Job for Archiver {
    const NAME: &'static str = JOB;
    type Report = Report;
    type Progress = Progress;

    fn needs(&self, _: &Config) -> &'static [Task] {
        &NEEDS
    }

    fn mode(&self) -> Cow<'_, str> {
        Cow::Borrowed(self.scope.mode())
    }

    fn begin(&self) -> (Report, Progress) {
        Default::default()
    }

    /// A dry run changes nothing, so it needs no lock. If the clocks differ, the run does nothing and reports it.
    async fn work(&self, run: &mut Run<'_, Self>) -> Result<()> {
        run.report.head.dry_run = self.scope.dry_run;
        let Some(boards) = BoardRun::begin(run, self.now).await? else { return Ok(()) };
        let Candidates { boards: found, open } = Candidates::find(&boards, &self.boards, &self.scope).await?;
        run.report.periods = open;
        match self.take_all(&boards, found, &mut run.report).await {
            Ok(()) => Ok(()),
            Err(Halt::Stopped) => run.check_stop(),
            Err(Halt::Kept(reason)) => anyhow::bail!("delete old archives and snapshots: {reason}"),
            Err(Halt::Failed(error)) => Err(error),
        }
    }
}

impl Archiver {
    pub fn new(config: &Config, scope: Scope) -> Self {
        Self { scope, now: None, boards: config.boards.clone(), page_members: config.archive.page_members }
    }

    /// With an old or wrong configuration, a run would freeze periods that are still open.
    async fn ending_otherwise(&self, store: &Store) -> Step<Vec<(String, PeriodKind)>> {
        let row = store.site_card().await?;
        // A daemon of another version can have written the card.
        let Some(card) = row.and_then(|row| Card::decode(&row.text).ok()) else { return Ok(Vec::new()) };
        let ends_otherwise = |own: &&Board| {
            let mut same = card.boards.iter().filter(|its| (&its.name, its.period) == (&own.name, own.period));
            same.any(|its| (&its.time_zone, its.week_starts) != (&own.time_zone, own.week_starts))
        };
        Ok(self.boards.iter().filter(ends_otherwise).map(|own| (own.name.clone(), own.period)).collect())
    }

    async fn take_all(
        &self,
        run: &BoardRun<'_>,
        boards: BTreeMap<String, Vec<Candidate>>,
        report: &mut Report,
    ) -> Step<()> {
        let scope = &self.scope;
        let others = self.ending_otherwise(run.store).await?;
        let steps = Steps::new(run, self.page_members);
        let is_reported = |outcome| match outcome {
            Outcome::Nothing => scope.period.is_some(),
            Outcome::Waiting => scope.mode() != MODE,
            _ => true,
        };
        for (board, candidates) in boards {
            let claimed = match scope.dry_run {
                true => Ok(()),
                false => match steps.claim(&board).await {
                    Err(Halt::Kept(reason)) => Err(reason),
                    claimed => Ok(claimed?),
                },
            };
            for candidate in candidates {
                let kind = candidate.at.period.parse().map(Period::kind);
                let ends_otherwise = others.iter().any(|(name, of)| *name == board && kind == Ok(*of));
                let taken = match &claimed {
                    _ if ends_otherwise => Err(Halt::Kept(Reason::EndsOtherwise)),
                    Err(reason) => Err(Halt::Kept(reason.clone())),
                    Ok(()) if scope.dry_run => steps.foresee(&candidate).await,
                    Ok(()) => steps.take(&candidate).await,
                };
                match taken {
                    Ok(taken) if is_reported(taken.outcome) => report.periods.push(taken),
                    Ok(_) => {}
                    Err(Halt::Kept(reason)) => report.periods.push(PeriodReport::kept(&candidate.at, &reason)),
                    Err(Halt::Failed(error)) => {
                        return Err(Halt::Failed(error.context(format!("archive {}", candidate.at))));
                    }
                    Err(Halt::Stopped) => return Err(Halt::Stopped),
                }
            }
        }
        // A board's blocks have different `archive_keep`s, so a run for one board or one period deletes nothing.
        if scope.board.is_some() || scope.period.is_some() {
            return Ok(());
        }
        prune(run, &Copier::new(run, self.page_members), &self.boards, report).await
    }
}

async fn prune(run: &BoardRun<'_>, copier: &Copier<'_>, boards: &[Board], report: &mut Report) -> Step<()> {
    for board in boards {
        let keep = board.archive_keep.0;
        // Zero keeps archives forever. If an earlier run has begun to delete an archive, its rest is deleted, too.
        let until = if keep.is_zero() { Micros(0) } else { run.now.before(keep) };
        for at in run.store.prunable_periods(&board.name, board.period.like(), until, PRUNED_MAX).await? {
            if report.head.dry_run {
                report.periods.push(PeriodReport::new(&at, Outcome::WouldPrune));
                continue;
            }
            prune_archive(run, copier, &at).await?;
            report.periods.push(PeriodReport::new(&at, Outcome::Pruned));
        }
    }
    if report.head.dry_run {
        return Ok(());
    }
    for at in run.store.obsolete_snapshots().await? {
        match forget(run, &at).await {
            Err(Halt::Kept(reason)) => report.periods.push(PeriodReport::kept(&at, &reason)),
            forgotten => forgotten?,
        }
    }
    Ok(())
}

async fn forget(run: &BoardRun<'_>, at: &BoardPeriod) -> Step<()> {
    run.claim(&at.board).await?;
    backup::forget(run, at).await
}

/// The period's row is changed first, so that readers do not take a partly deleted archive for a complete one.
async fn prune_archive(run: &BoardRun<'_>, copier: &Copier<'_>, at: &BoardPeriod) -> Step<()> {
    run.store.note_pruned(run.number, at, run.now).await?;
    fault::point("archive:pruning");
    for copy in 0..2 {
        copier.trim(at, copy, 0).await?;
    }
    run.cache.forget_freeze(at).await?;
    let BoardPeriod { board, period } = at;
    info!(
        event = "board-pruned",
        board, period, "{board} {period}: the period's archive was deleted, because it was older than archive_keep"
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_fault_point_is_listed_once() {
        let sources = [
            include_str!("steps.rs"),
            include_str!("rollback_recovery.rs"),
            include_str!("copy.rs"),
            include_str!("mod.rs"),
            include_str!("../board_run/backup.rs"),
        ];
        let points = [FAULT_POINTS.as_slice(), &RAISE_FAULT_POINTS, &PRUNE_FAULT_POINTS].concat();
        fault::assert_points(&points, &sources);
    }
}
