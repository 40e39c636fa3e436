//! Puts a snapshot or an archive back into Redis.
//!
//! # The way
//!
//! ```text
//! claim the board -> fill a zset beside it, page by page -> note that it is whole (RENAME)
//!   a board that is open, or was never frozen: move into it what was added since the loss -> RENAME it to the live one, and mark it
//!   a frozen one: note "done" in MySQL, so that it stays for `expire_after` -> RENAME it to that, and note the run in Redis
//! ```
//!
//! A restore that dies while it fills begins again. From the first member that is moved on nothing else has what was added since, so
//! the next one continues with what is there: it is named after its source, and no other one takes it for its own; and the mark is
//! gone meanwhile, so that nobody takes what is left for the board. The last page is moved, and the zset renamed, in one script:
//! nothing that is added meanwhile is lost, nothing twice. What was taken away since the loss from a member that the live zset didn't
//! have is not known. One that dies after its note in MySQL leaves a period that is done and not in Redis: the next run ends it.
//!
//! All of the live zset came since the loss only where all data was lost, which a newer generation says (rollback_recovery.rs). Otherwise Redis has an older
//! state of the board, as after a restart from a backup or a failover, or a part of it, and nobody can tell what of that came since. Then each
//! member is raised to what the snapshot has of it, if that is higher: as often as one likes, and nothing counts twice.

use std::time::Instant;

use anyhow::Result;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tracing::info;

use super::Archiver;
use super::candidates::{Candidate, candidate_named, instant};
use super::plan;
use super::progress::Progress;
use super::report::{Outcome, PeriodReport, Report};
use super::steps::{Halt, Run, Step};
use crate::cache::boards::{BoardKeys, Changed};
use crate::cache::snapshots::Restoring;
use crate::model::{BoardPeriod, Micros};
use crate::runtime::fault;
use crate::runtime::progress::{ProgressSink, follow};
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
}

impl Source {
    fn tag(self) -> String {
        match self {
            Self::Add(snapshot) | Self::Raise(snapshot) | Self::Frozen(snapshot) => tag(snapshot),
            Self::Archive(row) => format!("a{}", row.done_at.map_or(0, |at| at.0)),
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
            Self::Archive(row) => format!("from its archive of {}", time(row.done_at)),
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
        to: ProgressSink,
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
            () = follow(to, shown) => anyhow::bail!("nobody is shown the run any longer"),
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
        let keys = cache.find_boards(std::slice::from_ref(at)).await?.pop().unwrap_or_default();
        let source = self.source(candidate, keys, add).await?;
        if dry_run {
            let now = self.foresee_restore(candidate, source).await?;
            return Ok(PeriodReport::new(at, Outcome::WouldRestore).because(source.words() + &now));
        }
        let tag = source.tag();
        let to = Restoring { at, tag: &tag, run: self.number };
        if !matches!(source, Source::Raise(_)) && !cache.is_restoring(at, &tag).await?.0 {
            self.fill(to, source).await?;
            fault::point("restore:filled");
        }
        let late_members = self.put(to, candidate, source).await?;
        fault::point("restore:put");
        if let Source::Add(_) | Source::Raise(_) = source {
            store.note_generation(self.number, at, keys.freeze.generation).await?;
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

    /// What a restore would find in Redis, and what of it would not be added.
    async fn foresee_restore(&self, Candidate { at, rule, .. }: &Candidate, source: Source) -> Step<String> {
        let cache = &self.archiver.cache;
        let (live, _) = cache.count_board(at).await?;
        let mut said = if live > 0 { format!("; Redis has {live} members of it now") } else { String::new() };
        if let Source::Raise(_) = source {
            let (mut rows, mut dropped) = (self.rows(at, None), 0.0);
            while let Some(page) = rows.next().await? {
                self.check_stop()?;
                let live = cache.board_scores(at, &page).await?;
                let both = page.iter().zip(live).filter_map(|(saved, live)| Some((saved.score, live?)));
                dropped += both.map(|(saved, live)| rule.primary(saved).min(rule.primary(live))).sum::<f64>();
            }
            said += &format!("; both have {dropped} in all, which counts once (twice with --add)");
        }
        Ok(said)
    }

    /// Puts what was filled in its place; says how many members were moved into it before.
    async fn put(&self, to: Restoring<'_>, candidate: &Candidate, source: Source) -> Step<u64> {
        let Archiver { store, cache, .. } = self.archiver;
        match source {
            Source::Add(snapshot) => return self.put_live(to, candidate, snapshot.number).await,
            Source::Raise(snapshot) => return self.raise_to_snapshot(to.at, snapshot).await.map(|()| 0),
            Source::Frozen(_) => {}
            Source::Archive(_) => {
                store.note_restored(self.number, to.at, self.now).await?;
                fault::point("restore:noted");
            }
        }
        self.present(cache.put_frozen(to).await?).map(|_| 0)
    }

    /// What there is to put back; or why nothing is.
    async fn source(&self, candidate: &Candidate, keys: BoardKeys, add: bool) -> Step<Source> {
        let store = &self.archiver.store;
        let at = &candidate.at;
        let row = store.held_board_period(self.number, at).await?;
        let snapshot = store.snapshot(at).await?.filter(|snapshot| snapshot.taken_at.is_some());
        let no = |reason: &str| Err(Halt::Kept(reason.to_owned()));
        match (row.map(|row| row.state), row, snapshot) {
            (Some(PeriodState::Pruned), ..) => no("its archive was pruned, by archive_keep"),
            (Some(_), Some(row), _) if keys.live && !keys.frozen && plan::went_back(keys, row) => no(plan::WENT_BACK),
            (Some(PeriodState::Done), ..) if keys.frozen => no("its frozen zset is in Redis, and its archive is whole"),
            (Some(PeriodState::Ended), ..) if keys.frozen => no(plan::CAME_BACK),
            _ if keys.frozen => no("it is frozen, and not archived yet: `tallyd archive` goes on with it"),
            (Some(_), Some(row), _) if row.copy.is_some() => Ok(Source::Archive(row)),
            (Some(_), _, Some(snapshot)) => Ok(Source::Frozen(snapshot)),
            (None, _, Some(snapshot)) => self.source_of_live(candidate, snapshot, keys, add).await,
            _ => no("MySQL has neither a complete snapshot nor an archive of it"),
        }
    }

    /// Of a board that was never frozen.
    async fn source_of_live(
        &self,
        Candidate { at, rule, .. }: &Candidate,
        snapshot: Snapshot,
        keys: BoardKeys,
        add: bool,
    ) -> Step<Source> {
        let cache = &self.archiver.cache;
        if cache.is_restoring(at, &tag(snapshot)).await?.1 {
            // An earlier restore was interrupted.
            return Ok(Source::Add(snapshot));
        }
        let mark = cache.board_marks(std::slice::from_ref(at)).await?.pop().flatten();
        if snapshot.is_marked(mark) && self.archiver.has_whole(at, *rule).await? {
            let (live, _) = cache.count_board(at).await?;
            return Err(Halt::Kept(format!(
                "Redis has it, with {live} members, and has not lost it since its last snapshot, of {}",
                snapshot.members
            )));
        }
        // A mark beside newer data is newer, too: MySQL has gone back.
        let is_flushed = mark.is_none() && keys.freeze.generation > snapshot.generation;
        Ok(if add || is_flushed { Source::Add(snapshot) } else { Source::Raise(snapshot) })
    }

    /// Raises all members to what the snapshot has of them, and marks the board.
    async fn raise_to_snapshot(&self, at: &BoardPeriod, snapshot: Snapshot) -> Step<()> {
        let cache = &self.archiver.cache;
        self.show(at, "restored", snapshot.members);
        let mut rows = self.rows(at, None);
        while let Some(page) = rows.next().await? {
            self.check_stop()?;
            self.present(cache.raise_board(at, self.number, None, &page).await?)?;
            fault::point("restore:raised-page");
            self.show_done(rows.read);
        }
        let mark = cache.board_marks(std::slice::from_ref(at)).await?.pop().flatten();
        self.present(cache.mark_board(at, self.number, mark, Some(snapshot.number)).await?).map(drop)
    }

    /// Makes a zset of all that MySQL has of the board.
    async fn fill(&self, to: Restoring<'_>, source: Source) -> Step<()> {
        let cache = &self.archiver.cache;
        let (total, copy) = match source {
            Source::Add(snapshot) | Source::Raise(snapshot) | Source::Frozen(snapshot) => (snapshot.members, None),
            Source::Archive(row) => (row.tally.members, row.copy),
        };
        self.show(to.at, "restored", total);
        self.present(cache.fill_board(to, &[]).await?)?;
        let mut rows = self.rows(to.at, copy);
        while let Some(page) = rows.next().await? {
            self.check_stop()?;
            let (members, filled) = (self.present(cache.fill_board(to, &page).await?)?, rows.read);
            if members != filled {
                return Err(Halt::Kept(format!("{filled} members were added, and Redis has {members}: try again")));
            }
            fault::point("restore:filled-page");
            self.show_done(filled);
        }
        let filled = rows.read;
        // Rows of a snapshot that was interrupted are there, too.
        let is_whole = if copy.is_some() { filled == total } else { filled > 0 };
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
