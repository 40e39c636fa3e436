//! Puts a snapshot or an archive back into Redis.
//!
//! # The way
//!
//! ```text
//! claim the board -> fill a zset beside it, page by page -> note that it is whole (RENAME)
//!   a board that is open, or was never frozen: move into it what was added since the loss -> RENAME it to the live one, and mark it
//!   a frozen one: RENAME it to that -> note "done", so that it stays for `expire_after`
//! ```
//!
//! A restore that dies while it fills begins anew. From the first member that is moved on nothing else has what was added since, so
//! the next one goes on with what is there. The last page is moved, and the zset renamed, in one script: nothing that is added
//! meanwhile is lost, nothing twice. What was taken away since the loss from a member that the live zset didn't have is not known.

use anyhow::Result;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tracing::info;

use super::Archiver;
use super::progress::Progress;
use super::report::{Outcome, PeriodReport, Report};
use super::scope::{Candidate, candidate_named, instant};
use super::settle::{Halt, Run, Step};
use super::snapshot::PAGE_MEMBERS;
use crate::cache::boards::Changed;
use crate::cache::snapshots::RestoreKeys;
use crate::model::{BoardMember, BoardPeriod, Micros};
use crate::runtime::fault;
use crate::runtime::show::{self, Show};
use crate::store::boards::{PeriodRow, PeriodState};
use crate::store::snapshots::Snapshot;

/// The mode of such a run.
pub const RESTORE_MODE: &str = "restore";

/// A board can't be restored, or need not be: a sentence that says why.
#[derive(Debug, thiserror::Error)]
#[error("{at} is not restored: {reason}")]
pub struct NotRestored {
    at: BoardPeriod,
    reason: String,
}

/// What is put back, and where.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Source {
    /// The snapshot, as the live zset.
    Live(Snapshot),
    /// The snapshot, as the frozen zset, which is archived next.
    Frozen(Snapshot),
    /// The archive, as the frozen zset.
    Archive(PeriodRow),
}

impl Archiver {
    /// Puts one period of a board back, as the run that holds the job's lock.
    ///
    /// # Errors
    /// [`NotRestored`]; [`super::ScopeError`]; a server is away; another run took over.
    pub async fn restore(
        &self,
        run: u64,
        (name, period): (&str, &str),
        dry_run: bool,
        now: Micros,
        to: Show,
        stop: &CancellationToken,
    ) -> Result<Report> {
        let candidate = candidate_named(&self.boards, name, period)?;
        let at = candidate.at.clone();
        self.store.check_archive_run(run).await?;
        if !dry_run {
            self.cache.claim_board(&at.board, run).await?;
        }
        let (progress, shown) = watch::channel(Progress::default());
        let run = Run { archiver: self, number: run, now, stop, progress };
        let restored = tokio::select! {
            restored = run.restore(&candidate, dry_run) => restored,
            () = show::show(to, shown) => anyhow::bail!("nobody is shown the run any longer"),
        };
        match restored {
            Ok(restored) => Ok(Report { dry_run, periods: vec![restored], ..Report::default() }),
            Err(Halt::Stopped) => Ok(Report { dry_run, stopped: true, ..Report::default() }),
            Err(Halt::Kept(reason)) => Err(NotRestored { at, reason }.into()),
            Err(Halt::Failed(error)) => Err(error.context(format!("restore {at}"))),
        }
    }
}

impl Run<'_> {
    async fn restore(&self, candidate: &Candidate, dry_run: bool) -> Step<PeriodReport> {
        let Archiver { store, cache, .. } = self.archiver;
        let at = &candidate.at;
        let keys = cache.restore_keys(at).await?;
        let source = self.source(at, keys).await?;
        let from = match source {
            Source::Live(snapshot) | Source::Frozen(snapshot) => {
                let taken_at = snapshot.taken_at.map_or_else(|| "an unknown time".to_owned(), instant);
                format!("from its snapshot of {taken_at}")
            }
            Source::Archive(row) => format!("from its archive of {}", row.done_at.map_or_else(String::new, instant)),
        };
        if dry_run {
            return Ok(PeriodReport::new(at, Outcome::WouldRestore).because(from));
        }
        if !keys.restored {
            self.fill(at, source).await?;
            fault::point("restore:filled");
        }
        let mut late_members = 0;
        match source {
            Source::Live(snapshot) => late_members = self.put_live(candidate, snapshot.number).await?,
            Source::Frozen(_) | Source::Archive(_) => {
                self.present(cache.put_frozen(at, self.number).await?)?;
            }
        }
        fault::point("restore:put");
        if matches!(source, Source::Archive(_)) {
            store.note_restored(self.number, at, self.now).await?;
        }
        let (live, frozen) = cache.count_board(at).await?;
        let members = if matches!(source, Source::Live(_)) { live } else { frozen };
        let BoardPeriod { board, period } = at;
        info!(
            event = "board-restored",
            board, period, members, late_members, "{board} {period}: {members} members are in Redis again, {from}"
        );
        Ok(PeriodReport { members, late_members, ..PeriodReport::new(at, Outcome::Restored) }.because(from))
    }

    /// What there is to put back; or why nothing is.
    async fn source(&self, at: &BoardPeriod, keys: RestoreKeys) -> Step<Source> {
        let Archiver { store, cache, .. } = self.archiver;
        let row = store.held_board_period(self.number, at).await?;
        let snapshot = store.snapshot(at).await?;
        let zsets = cache.find_boards(std::slice::from_ref(at)).await?.pop().unwrap_or_default();
        let no = |reason: &str| Err(Halt::Kept(reason.to_owned()));
        match (row.map(|row| row.state), row, snapshot) {
            (Some(PeriodState::Pruned), ..) => no("its archive was pruned, by archive_keep"),
            (Some(PeriodState::Done), ..) if zsets.frozen => {
                no("its frozen zset is in Redis, and its archive is whole")
            }
            // The last restore died before it noted that it was through.
            (Some(PeriodState::Ended), Some(_), _) if zsets.frozen => {
                store.note_restored(self.number, at, self.now).await?;
                no("its frozen zset is in Redis again, which is noted now")
            }
            (Some(PeriodState::Done | PeriodState::Ended), Some(row), _) => Ok(Source::Archive(row)),
            (Some(PeriodState::Frozen), ..) | (None, ..) if zsets.frozen => {
                no("it is frozen, and not archived yet: `tallyd archive` goes on with it")
            }
            (Some(PeriodState::Frozen), _, Some(snapshot)) if snapshot.taken_at.is_some() => {
                Ok(Source::Frozen(snapshot))
            }
            (None, _, Some(snapshot)) if keys.restored => Ok(Source::Live(snapshot)),
            (None, _, Some(snapshot)) if snapshot.taken_at.is_some() => {
                let (live, _) = cache.count_board(at).await?;
                match keys.mark {
                    Some(_) if snapshot.is_marked(keys.mark) && live * 2 >= snapshot.members => no(&format!(
                        "Redis has it, with {live} members, and has not lost it since its last snapshot, of {}",
                        snapshot.members
                    )),
                    Some(mark) if !snapshot.is_marked(keys.mark) => no(&format!(
                        "Redis has an older state of it, of snapshot {mark} and not {}, as after the restart from a backup. What is \
                         missing from it nobody can tell from what was added since: to take the snapshot alone, unlink the zset and \
                         its mark {}",
                        snapshot.number,
                        cache.keys.board_mark(&at.board, &at.period)
                    )),
                    _ => Ok(Source::Live(snapshot)),
                }
            }
            _ => no("MySQL has neither a snapshot nor an archive of it"),
        }
    }

    /// Makes a zset of all that MySQL has of the board.
    async fn fill(&self, at: &BoardPeriod, source: Source) -> Step<()> {
        let Archiver { store, cache, .. } = self.archiver;
        let total = match source {
            Source::Live(snapshot) | Source::Frozen(snapshot) => snapshot.members,
            Source::Archive(row) => row.tally.members,
        };
        self.show(at, "restored", total);
        self.present(cache.fill_board(at, self.number, &[]).await?)?;
        let (mut after, mut filled): (Option<Vec<u8>>, u64) = (None, 0);
        loop {
            self.check_stop()?;
            let page: Vec<BoardMember> = match source {
                Source::Archive(_) => {
                    let rows = store.archived_page(at, filled, PAGE_MEMBERS).await?;
                    rows.into_iter().map(|(_, member)| member).collect()
                }
                Source::Live(_) | Source::Frozen(_) => store.saved_page(at, after.as_deref(), PAGE_MEMBERS).await?,
            };
            let Some(last) = page.last() else { break };
            after = Some(last.member.clone());
            let members = self.present(cache.fill_board(at, self.number, &page).await?)?;
            filled += page.len() as u64;
            if members != filled {
                return Err(Halt::Kept(format!("{filled} members were added, and Redis has {members}: try again")));
            }
            fault::point("restore:filled-page");
            self.show_done(filled);
        }
        if filled == 0 || (matches!(source, Source::Archive(_)) && filled != total) {
            return Err(Halt::Kept(format!("MySQL has {filled} members of it, and should have {total}")));
        }
        self.present(cache.end_filling(at, self.number).await?).map(drop)
    }

    /// Moves what was added since the loss into the restored zset until it is the live one; says how many were.
    async fn put_live(&self, candidate: &Candidate, mark: u64) -> Step<u64> {
        let Archiver { cache, page_members, .. } = self.archiver;
        let mut moved = 0;
        loop {
            self.check_stop()?;
            match cache.put_live(&candidate.at, self.number, *page_members, candidate.rule, mark).await? {
                Changed::Put(last) => return Ok(moved + last),
                changed => moved += self.present(changed)?,
            }
            fault::point("restore:merged-page");
        }
    }
}
