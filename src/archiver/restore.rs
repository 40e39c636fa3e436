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
//! the next one goes on with what is there: it is named after its source, and no other one takes it for its own; and the mark is
//! gone meanwhile, so that nobody takes what is left for the board. The last page is moved, and the zset renamed, in one script:
//! nothing that is added meanwhile is lost, nothing twice. What was taken away since the loss from a member that the live zset didn't
//! have is not known.
//!
//! Where Redis has the board, but an older state of it, as after a restart from a backup or a failover, nobody can tell what of
//! that is in what was added since. Then each member is raised to what the snapshot has of it, if that is higher: as often as one
//! likes, and nothing counts twice.

use std::time::Instant;

use anyhow::Result;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tracing::info;

use super::Archiver;
use super::plan::{self, Saved};
use super::progress::Progress;
use super::report::{Outcome, PeriodReport, Report};
use super::scope::{Candidate, candidate_named, instant};
use super::settle::{Halt, Run, Step};
use super::snapshot::PAGE_MEMBERS;
use crate::cache::boards::Changed;
use crate::cache::snapshots::Restoring;
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

/// How a board is put back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Restore {
    /// Change nothing, say what would be done.
    pub dry_run: bool,
    /// Add what Redis has now to the snapshot, even where it may be a part of the board and not what came since.
    pub add: bool,
}

/// What is put back, and where.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Source {
    /// The snapshot as the live zset, with what that has been given since.
    Add(Snapshot),
    /// What the snapshot has more than the live zset.
    Raise(Snapshot),
    /// The snapshot as the frozen zset, which is archived next.
    Frozen(Snapshot),
    /// The archive as the frozen zset.
    Archive(PeriodRow),
    /// The archive, which an earlier restore has put back and not noted.
    Put(PeriodRow),
}

impl Source {
    fn tag(self) -> String {
        match self {
            Self::Add(snapshot) | Self::Raise(snapshot) | Self::Frozen(snapshot) => tag(snapshot),
            Self::Archive(row) | Self::Put(row) => format!("a{}", row.done_at.map_or(0, |at| at.0)),
        }
    }

    /// From where, for a person.
    fn words(self) -> String {
        let time = |at: Option<Micros>| at.map_or_else(|| "an unknown time".to_owned(), instant);
        match self {
            Self::Add(snapshot) | Self::Frozen(snapshot) => format!("from its snapshot of {}", time(snapshot.taken_at)),
            Self::Raise(snapshot) => {
                format!("raised to its snapshot of {}, where Redis had less", time(snapshot.taken_at))
            }
            Self::Archive(row) | Self::Put(row) => format!("from its archive of {}", time(row.done_at)),
        }
    }
}

/// What the zset is named after that is restored from a snapshot.
pub(super) fn tag(snapshot: Snapshot) -> String {
    format!("s{}-{}", snapshot.number, snapshot.taken_at.map_or(0, |at| at.0))
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
        how: Restore,
        now: Micros,
        to: Show,
        stop: &CancellationToken,
    ) -> Result<Report> {
        let Restore { dry_run, .. } = how;
        let candidate = candidate_named(&self.boards, name, period)?;
        let at = candidate.at.clone();
        self.store.check_archive_run(run).await?;
        let (progress, shown) = watch::channel(Progress::default());
        let run = Run { archiver: self, number: run, now, stop, progress };
        if !dry_run {
            run.claim(&at.board).await?;
        }
        let began = Instant::now();
        let restored = tokio::select! {
            restored = run.restore(&candidate, how) => restored,
            () = show::show(to, shown) => anyhow::bail!("nobody is shown the run any longer"),
        };
        match restored {
            Ok(restored) => Ok(Report { dry_run, periods: vec![restored.after(began.elapsed())], ..Report::default() }),
            Err(Halt::Stopped) => Ok(Report { dry_run, stopped: true, ..Report::default() }),
            Err(Halt::Kept(reason)) => Err(NotRestored { at, reason }.into()),
            Err(Halt::Failed(error)) => Err(error.context(format!("restore {at}"))),
        }
    }
}

impl Run<'_> {
    async fn restore(&self, candidate: &Candidate, Restore { dry_run, add }: Restore) -> Step<PeriodReport> {
        let Archiver { store, cache, .. } = self.archiver;
        let at = &candidate.at;
        let source = self.source(candidate, add).await?;
        let (live, _) = cache.count_board(at).await?;
        if dry_run {
            let has = if live > 0 { format!("; Redis has {live} members of it now") } else { String::new() };
            return Ok(PeriodReport::new(at, Outcome::WouldRestore).because(source.words() + &has));
        }
        let tag = source.tag();
        let to = Restoring { at, tag: &tag, run: self.number };
        if matches!(source, Source::Add(_) | Source::Frozen(_) | Source::Archive(_))
            && !cache.is_restoring(at, &tag).await?.0
        {
            self.fill(to, source).await?;
            fault::point("restore:filled");
        }
        let late_members = self.put(to, candidate, source).await?;
        fault::point("restore:put");
        if matches!(source, Source::Archive(_) | Source::Put(_)) {
            store.note_restored(self.number, at, self.now).await?;
        }
        let (live, frozen) = cache.count_board(at).await?;
        let members = if matches!(source, Source::Add(_) | Source::Raise(_)) { live } else { frozen };
        let (BoardPeriod { board, period }, from) = (at, source.words());
        info!(
            event = "board-restored",
            board, period, members, late_members, "{board} {period}: {members} members are in Redis again, {from}"
        );
        Ok(PeriodReport { members, late_members, ..PeriodReport::new(at, Outcome::Restored) }.because(from))
    }

    /// Puts what was filled in its place; says how many members were moved into it before.
    async fn put(&self, to: Restoring<'_>, candidate: &Candidate, source: Source) -> Step<u64> {
        let cache = &self.archiver.cache;
        match source {
            Source::Add(snapshot) => return self.put_live(to, candidate, snapshot.number).await,
            Source::Raise(snapshot) => self.raise_to_snapshot(to.at, snapshot).await?,
            Source::Frozen(_) => {
                self.present(cache.put_frozen(to).await?)?;
                let row = self.archiver.store.held_board_period(self.number, to.at).await?;
                self.keep(to.at, row.map_or(0, |row| row.restored())).await?;
            }
            // Before MySQL knows that it was put back.
            Source::Archive(_) => {
                self.present(cache.put_frozen(to).await?)?;
                self.keep(to.at, self.now.0).await?;
            }
            Source::Put(row) => {
                self.verify_again(to.at, row).await?;
                self.keep(to.at, self.now.0).await?;
            }
        }
        Ok(0)
    }

    /// The next run says how long.
    async fn keep(&self, at: &BoardPeriod, restored: i64) -> Step<()> {
        self.present(self.archiver.cache.keep_frozen(at, self.number, restored).await?).map(drop)
    }

    /// What there is to put back; or why nothing is.
    async fn source(&self, candidate: &Candidate, add: bool) -> Step<Source> {
        let Archiver { store, cache, .. } = self.archiver;
        let Candidate { at, rule, .. } = candidate;
        let row = store.held_board_period(self.number, at).await?;
        let snapshot = store.snapshot(at).await?.filter(|snapshot| snapshot.taken_at.is_some());
        let keys = cache.find_boards(std::slice::from_ref(at)).await?.pop().unwrap_or_default();
        let no = |reason: &str| Err(Halt::Kept(reason.to_owned()));
        match (row.map(|row| row.state), row, snapshot) {
            (Some(PeriodState::Pruned), ..) => no("its archive was pruned, by archive_keep"),
            (Some(_), Some(row), _) if keys.live && !keys.frozen && plan::went_back(keys, row) => no(plan::WENT_BACK),
            (Some(PeriodState::Done), ..) if keys.frozen => no("its frozen zset is in Redis, and its archive is whole"),
            (Some(PeriodState::Ended), Some(row), _) if keys.frozen => Ok(Source::Put(row)),
            (Some(PeriodState::Done | PeriodState::Ended), Some(row), _) => Ok(Source::Archive(row)),
            _ if keys.frozen => no("it is frozen, and not archived yet: `tallyd archive` goes on with it"),
            (Some(PeriodState::Frozen), _, Some(snapshot)) => match self.archiver.saved(at, *rule).await?.0 {
                Saved::Marked if keys.live => {
                    no("Redis has it as it was before it was frozen: `tallyd archive` freezes it again")
                }
                _ => Ok(Source::Frozen(snapshot)),
            },
            (None, _, Some(snapshot)) => self.source_of_live(candidate, snapshot, add).await,
            _ => no("MySQL has neither a complete snapshot nor an archive of it"),
        }
    }

    /// Of a board that was never frozen.
    async fn source_of_live(
        &self,
        Candidate { at, rule, .. }: &Candidate,
        snapshot: Snapshot,
        add: bool,
    ) -> Step<Source> {
        let cache = &self.archiver.cache;
        if cache.is_restoring(at, &tag(snapshot)).await?.1 {
            // An earlier restore was interrupted.
            return Ok(Source::Add(snapshot));
        }
        let mark = cache.board_marks(std::slice::from_ref(at)).await?.pop().flatten();
        let is_whole = self.archiver.has_whole(at, *rule).await?;
        match (snapshot.is_marked(mark), mark, is_whole) {
            (true, _, true) => {
                let (live, _) = cache.count_board(at).await?;
                Err(Halt::Kept(format!(
                    "Redis has it, with {live} members, and has not lost it since its last snapshot, of {}",
                    snapshot.members
                )))
            }
            _ if add => Ok(Source::Add(snapshot)),
            // Nothing of it is there but what came since.
            (false, None, false) => Ok(Source::Add(snapshot)),
            // An older state, or a newer one that MySQL has forgotten; its mark alone is gone; or much was taken away from it.
            (false, Some(_), _) | (false, None, true) | (true, _, false) => Ok(Source::Raise(snapshot)),
        }
    }

    /// Raises all members to what the snapshot has of them, and marks the board.
    async fn raise_to_snapshot(&self, at: &BoardPeriod, snapshot: Snapshot) -> Step<()> {
        let Archiver { store, cache, .. } = self.archiver;
        self.show(at, "restored", snapshot.members);
        let (mut after, mut done): (Option<Vec<u8>>, u64) = (None, 0);
        loop {
            self.check_stop()?;
            let page = store.saved_page(at, after.as_deref(), PAGE_MEMBERS).await?;
            let Some(last) = page.last() else { break };
            after = Some(last.member.clone());
            self.present(cache.raise_board(at, self.number, None, &page).await?)?;
            fault::point("restore:raised-page");
            done += page.len() as u64;
            self.show_done(done);
        }
        let mark = cache.board_marks(std::slice::from_ref(at)).await?.pop().flatten();
        self.present(cache.mark_board(at, self.number, mark, Some(snapshot.number)).await?).map(drop)
    }

    /// Makes a zset of all that MySQL has of the board.
    async fn fill(&self, to: Restoring<'_>, source: Source) -> Step<()> {
        let Archiver { store, cache, .. } = self.archiver;
        let at = to.at;
        let total = match source {
            Source::Add(snapshot) | Source::Raise(snapshot) | Source::Frozen(snapshot) => snapshot.members,
            Source::Archive(row) | Source::Put(row) => row.tally.members,
        };
        self.show(at, "restored", total);
        self.present(cache.fill_board(to, &[]).await?)?;
        let (mut after, mut filled): (Option<Vec<u8>>, u64) = (None, 0);
        loop {
            self.check_stop()?;
            let page: Vec<BoardMember> = match source {
                Source::Archive(_) | Source::Put(_) => {
                    let rows = store.archived_page(at, filled, PAGE_MEMBERS).await?;
                    rows.into_iter().map(|(_, member)| member).collect()
                }
                Source::Add(_) | Source::Raise(_) | Source::Frozen(_) => {
                    store.saved_page(at, after.as_deref(), PAGE_MEMBERS).await?
                }
            };
            let Some(last) = page.last() else { break };
            after = Some(last.member.clone());
            let members = self.present(cache.fill_board(to, &page).await?)?;
            filled += page.len() as u64;
            if members != filled {
                return Err(Halt::Kept(format!("{filled} members were added, and Redis has {members}: try again")));
            }
            fault::point("restore:filled-page");
            self.show_done(filled);
        }
        // Rows of a snapshot that was interrupted are there, too.
        let is_whole = if matches!(source, Source::Archive(_)) { filled == total } else { filled > 0 };
        if !is_whole {
            return Err(Halt::Kept(format!("MySQL has {filled} members of it, and should have {total}")));
        }
        self.present(cache.end_filling(to).await?).map(drop)
    }

    /// Moves what was added since the loss into the restored zset until it is the live one; says how many were.
    async fn put_live(&self, to: Restoring<'_>, candidate: &Candidate, mark: u64) -> Step<u64> {
        let Archiver { cache, page_members, .. } = self.archiver;
        let mut moved = 0;
        loop {
            self.check_stop()?;
            match cache.put_live(to, *page_members, candidate.rule, mark).await? {
                Changed::Put(last) => return Ok(moved + last),
                changed => moved += self.present(changed)?,
            }
            fault::point("restore:merged-page");
        }
    }
}
