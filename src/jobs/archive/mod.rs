//! One run of the archiver: closed boards are frozen, copied to MySQL, verified, and only then leave Redis.
//!
//! # The way
//!
//! ```text
//! periods that have ended, from Redis -.
//! rows that are not ended, from MySQL -+-> claim the board -> decide (plan.rs)
//!   archive:  freeze (RENAME), and note that in Redis in the same script -> note "frozen" in MySQL -> merge what came late -> copy in
//!             rank order beside what was verified before, reading back what is written -> trim -> verify the end -> note "done", and
//!             which copy -> EXPIRE, as the safety net -> delete the other copy
//!   raise:    give the live zset what the archive has more -> note "frozen" -> as above
//!   end:      verify once more -> UNLINK -> note "ended"
//! ```
//!
//! A run has no input but the truth: it looks at every closed period and does what is missing, so that the next run is
//! the retry of this one, wherever it died. What must hold: a zset leaves Redis only after its rows are committed and
//! were read back equal, place by place; memory holds 15,000 members, however large the board.
//!
//! # The races
//!
//! *A, a writer that comes late; B, a run; C, another run.* Writers know nothing of the archiver: they add to the live
//! key, which they make anew when it was taken away.
//!
//! * A before B's freeze: it is part of the frozen zset. A after it: the live key comes back, and is no board but what
//!   came late. B moves it into the frozen zset page by page, each member added and removed in one script, so that a
//!   script that runs twice, or after its timeout, adds nothing twice. A during the merge: its member is moved, or waits
//!   for the next run. A after "done": the next run makes the zset stay (PERSIST), notes "frozen" again, merges, and copies beside
//!   the archive, which readers have until the new copy is verified. A just before UNLINK: the script that unlinks looks
//!   for the live key itself, and leaves the zset.
//! * A after the frozen zset is gone: what came late alone must not be taken for the board. A live key is frozen only
//!   where MySQL has no row of the period, or Redis has gone back (below); otherwise it stays where it is, and every report names it with its
//!   reason.
//! * A takes away from a member that only the frozen zset has: `board.lua` removes what falls to zero, so the archive
//!   keeps the higher score. Known, and only possible after `archive_grace`.
//! * B dies between any two steps ([`FAULT_POINTS`]): after the RENAME the frozen key without a row says that it is the
//!   board; the copy begins again and writes the same places; a zset that is done has its EXPIRE set by each run.
//! * B and C at once: the job's lock lets one in. B's lease runs out while it is frozen (a stopped machine, a long
//!   pause), C takes over, B wakes up: MySQL refuses each of B's writes, because each holds the lock's row and finds
//!   C's number there. Redis does not know that lock, so a run claims a board before it reads how far the board is (with a random
//!   number, because MySQL may give C's number away twice after a failover), and
//!   every script that changes a closed period finds the claim to be its run's, or refuses. B claiming after C: C's
//!   scripts are refused and C's run fails, B's next read of MySQL finds it overtaken; the run after them does it all.
//! * Redis is flushed: the claim is gone with the rest, so what is in flight does nothing. The board is found gone before
//!   it was verified: reported, never "done", nothing is frozen in its place. Gone once it is done: nothing is lost, it
//!   is noted as ended. Gone in the middle of a second copy (late writes): the first archive is whole, and the late writes are reported as lost.
//! * A replica that lacks the last seconds takes over, or a server starts from an old dump: what it lacks is a step that was not done yet, and
//!   the next run does it. Where it has a live zset that MySQL says was frozen, and Redis' older notes don't, that is no late write but the board as it was
//!   (rollback_recovery.rs): added to its archive it would count twice. A mark that is undone looks like a board that was lost, and is reported.
//! * MySQL goes back to a backup: a row that is missing, or says "frozen", is archived as ever. One that says "done" may be of before late
//!   writes were archived. Redis counts what it moved into a frozen zset, and where it has moved more than MySQL has noted, the board is
//!   archived again. A zset that has ended since the backup is gone, and what was late in it.
//! * A clock is wrong: a period is over by MySQL's clock, and where the host's or Redis' differs by minutes the run does nothing (clock.rs).
//! * Something else changes the frozen zset, or the rows, between copy and verification, or until it is ended: the pages
//!   differ; the zset is kept without an end, and the report names the first place that differs. The other boards go on.

mod board_health;
mod candidates;
pub mod clock;
mod copy;
mod plan;
mod progress;
mod prune;
mod report;
mod restore;
mod rollback_recovery;
mod snapshot;
mod steps;

use std::collections::{BTreeMap, BTreeSet};

use anyhow::Result;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

pub use candidates::{MODE, Scope, ScopeError};
pub use report::{Outcome, PeriodReport, Report};
pub use restore::{NotRestored, RESTORE_MODE, Restore};
pub use snapshot::SNAPSHOT_MODE;

pub use crate::store::boards::JOB;

use crate::cache::Cache;
use crate::cache::boards::BoardKeys;
use crate::config::{Board, Config};
use crate::model::{BoardPeriod, Micros};
use crate::runtime::fault;
use crate::runtime::progress::{ProgressSink, follow};
use crate::store::Store;
use candidates::{Candidate, instant};
use period::PeriodKind;
use plan::Plan;
use progress::Progress;
use steps::{Halt, Run};
pub use tallyd_core::period;

/// Where a test may end the process: between any two steps, in their order.
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

/// The same where Redis has a board as it was before it was frozen.
pub const RAISE_FAULT_POINTS: [&str; 3] = ["archive:raised-page", "archive:raised", "archive:noted-again"];

/// The same for what is deleted, saved and put back.
pub const SAVE_FAULT_POINTS: [&str; 13] = [
    "archive:pruning",
    "archive:forgetting",
    "snapshot:marked",
    "snapshot:noted",
    "snapshot:saved-page",
    "snapshot:saved",
    "snapshot:looked",
    "restore:filled-page",
    "restore:filled",
    "restore:noted",
    "restore:merged-page",
    "restore:raised-page",
    "restore:put",
];

/// The archiver and what it works with.
#[derive(Clone)]
pub struct Archiver {
    store: Store,
    cache: Cache,
    boards: Vec<Board>,
    page_members: usize,
}

impl Archiver {
    /// For the boards and the page size of `config`.
    pub fn new(config: &Config, store: Store, cache: Cache) -> Self {
        Self { store, cache, boards: config.boards.clone(), page_members: config.archive.page_members }
    }

    /// Does what is due at `now`, as the run that holds the lock of [`JOB`]. A dry run says what that would be; it
    /// changes nothing, and needs neither lock nor run.
    ///
    /// # Errors
    /// [`ScopeError`]; a server is away; another run took over.
    pub async fn run(
        &self,
        run: u64,
        scope: &Scope,
        now: Micros,
        to: ProgressSink,
        stop: &CancellationToken,
    ) -> Result<Report> {
        if !scope.dry_run {
            self.store.check_archive_run(run).await?;
        }
        let (progress, shown) = watch::channel(Progress::default());
        let run = Run { archiver: self, number: run, now, stop, progress };
        tokio::select! {
            report = self.archive_all(&run, scope, now) => report,
            () = follow(to, shown) => anyhow::bail!("nobody is shown the run any longer"),
        }
    }

    async fn archive_all(&self, run: &Run<'_>, scope: &Scope, now: Micros) -> Result<Report> {
        let mut report = Report { dry_run: scope.dry_run, ..Report::default() };
        for (board, candidates) in self.candidates(scope, now, &mut report).await? {
            if !scope.dry_run {
                run.claim(&board).await?;
                fault::point("archive:claimed");
            }
            for candidate in candidates {
                let taken = match scope.dry_run {
                    true => self.foresee(&candidate, now).await,
                    false => run.take_steps(&candidate).await,
                };
                match taken {
                    Ok(taken) if taken.outcome == Outcome::Nothing && scope.period.is_none() => {}
                    Ok(taken) => report.periods.push(taken),
                    Err(Halt::Kept(reason)) => {
                        report.periods.push(PeriodReport::new(&candidate.at, Outcome::Kept).because(reason));
                    }
                    Err(Halt::Stopped) => {
                        report.stopped = true;
                        return Ok(report);
                    }
                    Err(Halt::Failed(error)) => return Err(error.context(format!("archive {}", candidate.at))),
                }
            }
        }
        match run.clear(scope, &mut report).await {
            Err(Halt::Stopped) => report.stopped = true,
            Err(Halt::Kept(reason)) => anyhow::bail!("delete what is over: {reason}"),
            Err(Halt::Failed(error)) => return Err(error.context("delete what is over")),
            Ok(()) => {}
        }
        Ok(report)
    }

    /// What there is to look at, by board: closed periods that are in Redis, and what MySQL says is not finished. A dry
    /// run's report names what is still open, too.
    async fn candidates(
        &self,
        scope: &Scope,
        now: Micros,
        report: &mut Report,
    ) -> Result<BTreeMap<String, Vec<Candidate>>> {
        let candidates = scope.candidates(&self.boards, now)?;
        let closed = self.find(candidates.closed, |candidate| candidate.at.clone()).await?;
        let unfinished = self.store.unfinished_periods().await?;
        let open: BTreeSet<&BoardPeriod> = candidates.open.iter().map(|(candidate, _)| &candidate.at).collect();
        // Of a board that Redis has lost nothing else may tell that it was there.
        let saved = self.store.snapshots().await?.into_iter().map(|(at, _)| at).filter(|at| !open.contains(at));
        let saved = saved.filter(|at| at.period != PeriodKind::Total.to_string());
        let saved = saved.filter_map(|at| scope.known(&self.boards, at)).filter(|saved| saved.expire_after.is_some());
        let unfinished = unfinished.into_iter().filter_map(|at| scope.known(&self.boards, at)).chain(saved);
        let closed = closed.into_iter().filter(|(_, keys)| keys.live || keys.frozen || scope.period.is_some());
        let mut seen = BTreeSet::new();
        let mut boards: BTreeMap<String, Vec<Candidate>> = BTreeMap::new();
        for candidate in closed.map(|(candidate, _)| candidate).chain(unfinished) {
            if seen.insert(candidate.at.clone()) {
                boards.entry(candidate.at.board.clone()).or_default().push(candidate);
            }
        }
        // Those that have nothing to do, too: what is noted of a board must be there before its first period is frozen.
        for board in self.boards.iter().filter(|board| scope.has_board(&board.name)) {
            boards.entry(board.name.clone()).or_default();
        }
        if scope.dry_run {
            let open = self.find(candidates.open, |(candidate, _)| candidate.at.clone()).await?;
            report.periods.extend(open.into_iter().filter(|(_, keys)| keys.live).map(|((candidate, closes), _)| {
                let until =
                    if closes >= Micros::MAX { "for ever".to_owned() } else { format!("until {}", instant(closes)) };
                PeriodReport::new(&candidate.at, Outcome::Open).because(until)
            }));
        }
        Ok(boards)
    }

    async fn find<T>(&self, candidates: Vec<T>, at: impl Fn(&T) -> BoardPeriod) -> Result<Vec<(T, BoardKeys)>> {
        let periods: Vec<BoardPeriod> = candidates.iter().map(at).collect();
        let keys = self.cache.find_boards(&periods).await?;
        Ok(candidates.into_iter().zip(keys).collect())
    }

    /// What would become of a period.
    async fn foresee(&self, candidate: &Candidate, now: Micros) -> Result<PeriodReport, Halt> {
        let at = &candidate.at;
        let row = self.store.board_period(at).await?;
        let keys = self.cache.find_boards(std::slice::from_ref(at)).await?.pop().unwrap_or_default();
        let archived = row.map_or(0, |row| row.tally.members);
        let report = |outcome| PeriodReport { members: archived, ..PeriodReport::new(at, outcome) };
        let saved = self.saved(at, candidate.rule).await?;
        Ok(match plan::decide(keys, row, saved, candidate.expire_after, now) {
            Plan::Nothing => report(Outcome::Nothing),
            Plan::Archive => {
                let (live, frozen) = self.cache.count_board(at).await?;
                match keys.frozen {
                    true => PeriodReport { members: frozen, late_members: live, ..report(Outcome::WouldArchive) },
                    false => PeriodReport { members: live, ..report(Outcome::WouldArchive) },
                }
            }
            Plan::Wait(left) => report(Outcome::Waiting).because(format!("until {}", instant(now.after(left)))),
            Plan::End => report(Outcome::WouldEnd),
            Plan::NoteEnded => report(Outcome::WouldEnd).because("it is gone from Redis already"),
            Plan::Raise => {
                let (live, _) = self.cache.count_board(at).await?;
                PeriodReport { members: live, ..report(Outcome::WouldArchive) }.because(plan::WENT_BACK)
            }
            Plan::Keep(reason) => report(Outcome::Kept).because(reason),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_fault_point_is_listed_once() {
        let sources = [
            include_str!("mod.rs"),
            include_str!("steps.rs"),
            include_str!("rollback_recovery.rs"),
            include_str!("copy.rs"),
            include_str!("prune.rs"),
            include_str!("snapshot.rs"),
            include_str!("restore.rs"),
        ]
        .concat();
        for point in FAULT_POINTS.into_iter().chain(RAISE_FAULT_POINTS).chain(SAVE_FAULT_POINTS) {
            assert_eq!(sources.matches(&format!("fault::point(\"{point}\")")).count(), 1, "{point}");
        }
        let call = ["fault::", "point(\""].concat();
        let points = FAULT_POINTS.len() + RAISE_FAULT_POINTS.len() + SAVE_FAULT_POINTS.len();
        assert_eq!(sources.matches(&call).count(), points);
    }
}
