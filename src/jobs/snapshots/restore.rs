//! Restores a snapshot or an archive in Redis.
//!
//! # The way
//!
//! ```text
//! 1. Claim the board.
//! 2. Fill a new zset, page by page. When all pages are in the zset, RENAME it to a key for complete zsets.
//! 3. If the board was never frozen: move later additions from the live zset into the filled zset. Then RENAME the
//!    filled zset to the live key, and mark the board.
//!    If the board was frozen: RENAME the filled zset to the frozen key, and record the run in Redis. If the source is
//!    an archive, first record "done" in MySQL, so that the frozen zset stays for `expire_after`.
//! ```
//!
//! If a restore crashes while it fills the zset, the next one begins again. After the first move from the live zset,
//! some additions exist only in the filled zset. If the restore crashes then, the next one continues with the filled
//! zset. Its key contains the source, so a restore from another source does not use it. Until the restore ends, the
//! board has no mark in Redis, so no run treats the partial live zset as the board. One script moves the last page and
//! renames the zset, so concurrent additions are neither lost nor counted twice. While a member was missing in the live
//! zset, writers could not subtract from its score, so these subtractions are lost. If a restore crashes after it
//! recorded "done" in MySQL, the period is not in Redis, and the next archive run records it as ended.
//!
//! If Redis lost all data, the generation of its data is newer than in MySQL, and everything in the live zset was added
//! since the loss. Otherwise (after a restart from a backup, or a failover) the live zset contains an older state or a
//! part of the board, plus later additions, which cannot be distinguished. So each member is raised to its score in the
//! snapshot, if that is higher. It is safe to repeat this step, because it adds nothing.

use std::borrow::Cow;
use std::time::Instant;

use anyhow::Result;
use tracing::info;

use crate::jobs::board_run::backup::{Rows, RowsOf, complete, has_best};
use crate::jobs::board_run::periods::{Candidate, ScopeError, candidate_named, instant};
use crate::jobs::board_run::{BoardRun, Halt, JOB, Outcome, PeriodReport, Progress, Reason, Report, Step};
use tallyd_base::config::Config;
use tallyd_base::jobs::run::{Job, Run};
use tallyd_base::runtime::fault;
use tallyd_core::archive::{BoardKeys, PeriodRow, PeriodState, Snapshot, went_back};
use tallyd_core::control::Task;
use tallyd_core::model::{BoardPeriod, Micros};
use tallyd_redis::boards::Changed;
use tallyd_redis::snapshots::{Raised, Restoring};

#[derive(Debug, thiserror::Error)]
#[error("{at} is not restored: {reason}")]
pub struct NotRestored {
    at: BoardPeriod,
    reason: Reason,
}

pub struct Restore {
    /// A score that the snapshot already includes then counts twice.
    add: bool,
    /// `None` in a command: then MySQL's clock decides.
    pub now: Option<Micros>,
    candidate: Candidate,
    page_members: usize,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Source {
    /// The snapshot's scores plus the additions since the loss.
    Add(Snapshot),
    Raise(Snapshot),
    Frozen(Snapshot),
    Archive {
        row: PeriodRow,
        copy: u8,
    },
}

impl Source {
    fn tag(self) -> String {
        match self {
            Self::Add(snapshot) | Self::Raise(snapshot) | Self::Frozen(snapshot) => snapshot.tag(),
            Self::Archive { row, .. } => row.tag(),
        }
    }

    fn is_live(self) -> bool {
        matches!(self, Self::Add(_) | Self::Raise(_))
    }

    fn snapshot(self) -> Option<Snapshot> {
        match self {
            Self::Add(snapshot) | Self::Raise(snapshot) | Self::Frozen(snapshot) => Some(snapshot),
            Self::Archive { .. } => None,
        }
    }

    /// For a snapshot, also says which additions are lost. `points` is the sum of its scores.
    fn words(self, points: f64) -> String {
        let time = |at: Option<Micros>| at.map_or_else(|| "an unknown time".to_owned(), instant);
        let of = |Snapshot { members, taken_at, .. }: Snapshot| {
            format!("its snapshot of {}, which has {members} members and {points} points", time(taken_at))
        };
        let text = match self {
            Self::Add(snapshot) | Self::Frozen(snapshot) => format!("from {}", of(snapshot)),
            Self::Raise(snapshot) => format!("raised to {} (only scores that were lower in Redis)", of(snapshot)),
            Self::Archive { row, .. } => return format!("from its archive of {}", time(row.done_at)),
        };
        text + "; additions after that and before the loss are lost"
    }
}

impl Job for Restore {
    const NAME: &'static str = JOB;
    type Report = Report;
    type Progress = Progress;

    /// An operator's restore runs even if the job is paused.
    fn needs(&self, _: &Config) -> &'static [Task] {
        &[]
    }

    fn mode(&self) -> Cow<'_, str> {
        Cow::Borrowed("restore")
    }

    fn begin(&self) -> (Report, Progress) {
        Default::default()
    }

    async fn work(&self, run: &mut Run<'_, Self>) -> Result<()> {
        let store = &run.servers.store;
        store.check_archive_run(run.number).await?;
        let now = match self.now {
            Some(now) => now,
            None => store.clock().await?.0,
        };
        let at = self.candidate.at.clone();
        let began = Instant::now();
        let restorer = Restorer { run: &BoardRun::new(run, now), on: self, dry_run: run.options.dry_run };
        match restorer.restore(&self.candidate).await {
            Ok(restored) => run.report.periods.push(restored.after(began.elapsed())),
            Err(Halt::Stopped) => return run.check_stop(),
            Err(Halt::Kept(reason)) => return Err(NotRestored { at, reason }.into()),
            Err(Halt::Failed(error)) => return Err(error.context(format!("restore {at}"))),
        }
        Ok(())
    }
}

impl Restore {
    pub fn new(config: &Config, (name, period): (&str, &str), add: bool) -> Result<Self, ScopeError> {
        let candidate = candidate_named(&config.boards, name, period)?;
        Ok(Self { add, now: None, candidate, page_members: config.archive.page_members })
    }
}

struct Restorer<'a> {
    run: &'a BoardRun<'a>,
    on: &'a Restore,
    dry_run: bool,
}

impl Restorer<'_> {
    async fn restore(&self, candidate: &Candidate) -> Step<PeriodReport> {
        let BoardRun { store, cache, number, .. } = *self.run;
        let at = &candidate.at;
        if !self.dry_run {
            self.run.claim(&at.board).await?;
        }
        let keys = self.run.keys(at).await?;
        let source = self.source(candidate, keys).await?;
        let points = if source.snapshot().is_some() { store.saved_sum(at).await? } else { 0.0 };
        let from = source.words(points);
        if self.dry_run {
            let now = self.foresee(candidate, source).await?;
            return Ok(PeriodReport::new(at, Outcome::WouldRestore).because(from + &now));
        }
        let tag = source.tag();
        let to = Restoring { at, tag: &tag, run: number };
        if !matches!(source, Source::Raise(_)) && !cache.is_restoring(at, &tag).await?.0 {
            self.fill(to, source).await?;
            fault::point("restore:filled");
        }
        let late_members = self.put(to, candidate, source).await?;
        fault::point("restore:put");
        if source.is_live() {
            store.note_generation(number, at, keys.freeze.generation).await?;
        }
        let (live, frozen) = cache.count_board(at).await?;
        let members = if source.is_live() { live } else { frozen };
        let BoardPeriod { board, period } = at;
        info!(
            event = "board-restored",
            board, period, members, late_members, "{board} {period}: restored {members} members in Redis, {from}"
        );
        Ok(PeriodReport { members, late_members, ..PeriodReport::new(at, Outcome::Restored) }.because(from))
    }

    async fn source(&self, candidate: &Candidate, keys: BoardKeys) -> Step<Source> {
        let BoardRun { store, number, .. } = *self.run;
        let at = &candidate.at;
        let row = store.fenced_board_period(number, at).await?;
        let snapshot = complete(store, at).await?;
        let no = |reason| Err(Halt::Kept(reason));
        match (row.map(|row| row.state), row, snapshot) {
            (Some(PeriodState::Pruned), ..) => no(Reason::Pruned),
            (Some(_), Some(row), _) if keys.live && !keys.frozen && went_back(keys, row) => no(Reason::WentBack),
            (Some(PeriodState::Done), ..) if keys.frozen => no(Reason::Archived),
            (Some(PeriodState::Ended), ..) if keys.frozen => no(Reason::CameBack),
            _ if keys.frozen => no(Reason::Frozen),
            (_, Some(row @ PeriodRow { copy: Some(copy), .. }), _) => Ok(Source::Archive { row, copy }),
            (Some(_), _, Some(snapshot)) => Ok(Source::Frozen(snapshot)),
            (None, _, Some(snapshot)) => self.source_of_live(candidate, snapshot, keys).await,
            _ => no(Reason::NothingSaved),
        }
    }

    async fn source_of_live(
        &self,
        Candidate { at, rule, .. }: &Candidate,
        snapshot: Snapshot,
        keys: BoardKeys,
    ) -> Step<Source> {
        let cache = self.run.cache;
        if cache.is_restoring(at, &snapshot.tag()).await?.1 {
            return Ok(Source::Add(snapshot));
        }
        let mark = self.run.mark(at).await?;
        if snapshot.is_marked(mark) && keys.live && has_best(self.run, at, *rule, true).await? {
            let (live, _) = cache.count_board(at).await?;
            return Err(Halt::Kept(Reason::NotLost { live, saved: snapshot.members }));
        }
        let is_flushed = snapshot.was_flushed(mark, keys.freeze.generation);
        Ok(if self.on.add || is_flushed { Source::Add(snapshot) } else { Source::Raise(snapshot) })
    }

    /// How many members Redis has, and the sum of the scores that would not be added.
    async fn foresee(&self, Candidate { at, rule, .. }: &Candidate, source: Source) -> Step<String> {
        let BoardRun { store, cache, .. } = *self.run;
        let (live, _) = cache.count_board(at).await?;
        let mut text = if live > 0 { format!("; Redis has {live} members of it now") } else { String::new() };
        if let Source::Raise(_) = source {
            let mut rows = Rows::new(store, at, RowsOf::Snapshot);
            let mut dropped = 0.0;
            while let Some(page) = rows.next().await? {
                self.run.check_stop()?;
                let live = cache.board_scores(at, &page).await?;
                let both = page.iter().zip(live).filter_map(|(saved, live)| Some((saved.score, live?)));
                dropped += both.map(|(saved, live)| rule.primary(saved).min(rule.primary(live))).sum::<f64>();
            }
            text += &format!(
                "; scores with a sum of {dropped} are in both Redis and the snapshot: added once (twice with --add)"
            );
        }
        Ok(text)
    }

    async fn fill(&self, to: Restoring<'_>, source: Source) -> Step<()> {
        let BoardRun { store, cache, .. } = *self.run;
        let (total, of) = match source {
            Source::Add(snapshot) | Source::Raise(snapshot) | Source::Frozen(snapshot) => {
                (snapshot.members, RowsOf::Snapshot)
            }
            Source::Archive { row, copy } => (row.tally.members, RowsOf::Archive { copy }),
        };
        self.run.show(to.at, "restored", total);
        self.run.present(cache.fill_board(to, &[]).await?)?;
        let mut rows = Rows::new(store, to.at, of);
        while let Some(page) = rows.next().await? {
            self.run.check_stop()?;
            let members = self.run.present(cache.fill_board(to, &page).await?)?;
            let filled = rows.read;
            if members != filled {
                return Err(Halt::Kept(Reason::NotFilled { filled, members }));
            }
            fault::point("restore:filled-page");
            self.run.show_done(filled);
        }
        let filled = rows.read;
        // The rows of an interrupted later snapshot can be among these.
        let is_whole = if of == RowsOf::Snapshot { filled > 0 } else { filled == total };
        if !is_whole {
            return Err(Halt::Kept(Reason::Incomplete { filled, total }));
        }
        self.run.present(cache.end_filling(to, filled).await?).map(drop)
    }

    async fn put(&self, to: Restoring<'_>, candidate: &Candidate, source: Source) -> Step<u64> {
        let BoardRun { store, cache, number, now, .. } = *self.run;
        match source {
            Source::Add(snapshot) => return self.put_live(to, candidate, snapshot.number).await,
            Source::Raise(snapshot) => return self.raise_to_snapshot(to.at, snapshot).await.map(|()| 0),
            Source::Frozen(_) => {}
            Source::Archive { .. } => {
                store.note_restored(number, to.at, now).await?;
                fault::point("restore:noted");
            }
        }
        self.run.present(cache.put_frozen(to).await?).map(|_| 0)
    }

    /// The restored zset becomes the live zset. Returns how many members were moved.
    async fn put_live(&self, to: Restoring<'_>, candidate: &Candidate, mark: u64) -> Step<u64> {
        let mut moved = 0;
        loop {
            self.run.check_stop()?;
            match self.run.cache.put_live(to, self.on.page_members, candidate.rule, mark).await? {
                Changed::Put(last) => return Ok(moved + last),
                changed => moved += self.run.present(changed)?,
            }
            fault::point("restore:merged-page");
        }
    }

    /// The first page is empty. If another Redis server takes over, its count of pages differs: the board gets no mark.
    async fn raise_to_snapshot(&self, at: &BoardPeriod, snapshot: Snapshot) -> Step<()> {
        let BoardRun { store, cache, number, .. } = *self.run;
        self.run.show(at, "restored", snapshot.members);
        let mut rows = Rows::new(store, at, RowsOf::Snapshot);
        let (mut next, mut pages) = (Some(Vec::new()), 0);
        while let Some(page) = next {
            self.run.check_stop()?;
            self.run.present(cache.raise_board((at, Raised::Live), number, pages, &page).await?)?;
            fault::point("restore:raised-page");
            self.run.show_done(rows.read);
            pages += 1;
            next = rows.next().await?;
        }
        let mark = self.run.mark(at).await?;
        self.run.present(cache.mark_board(at, number, mark, Some(snapshot.number), Some(pages)).await?).map(drop)
    }
}
