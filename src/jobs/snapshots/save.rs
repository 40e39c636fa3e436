//! Takes snapshots of boards that have not been archived yet. If Redis loses the data of such a board, only a snapshot
//! can restore it.
//!
//! # The way
//!
//! ```text
//! claim the board -> check that it is complete -> mark the board with the run -> record the run in MySQL
//!   -> go through the saved members: write changes, delete missing ones -> go through Redis: write new members -> record the end
//! ```
//!
//! The rows are changed in place, so a snapshot writes only the changes since the last one. If Redis has lost a part of
//! the board, the rest must never overwrite the rows. So a script reads each page, and reads nothing if Redis lacks
//! this run's mark of the board, or if the zset has too few members. With some values of `maxmemory-policy`, Redis can
//! evict only the zset, which then grows again. So the run takes no snapshot if the live scores of the last snapshot's
//! best members sum to less than half of the saved sum. After a crash, the rows are from two snapshots. Each row was
//! right when it was written, and the next run checks all rows. The snapshot can lack additions that were made during
//! the run.

use std::borrow::Cow;
use std::collections::HashSet;
use std::time::{Duration, Instant};

use anyhow::Result;
use tracing::{info, warn};

use super::health::{Savable, savable};
use crate::jobs::board_run::backup::{PAGE_MEMBERS, check_storable, forget, has_best};
use crate::jobs::board_run::periods::Scope;
use crate::jobs::board_run::{BoardRun, Halt, JOB, NEEDS, Outcome, PeriodReport, Progress, Reason, Report, Step};
use tallyd_base::config::{Board, Config};
use tallyd_base::jobs::run::{Job, OFTEN_KEEP, Run};
use tallyd_base::runtime::fault;
use tallyd_core::archive::members_min;
use tallyd_core::control::Task;
use tallyd_core::model::{BoardMember, BoardPeriod, Micros};
use tallyd_mysql::snapshots::Saved as SavedMember;
use tallyd_redis::score::Rule;
use tallyd_redis::snapshots::Scanned;

pub const SNAPSHOT_MODE: &str = "snapshot";

/// So that other runs can get the job's lock.
const RUN_MAX: Duration = Duration::from_secs(10);

const SCAN_MEMBERS: usize = 250;

/// MariaDB would execute a search with a longer list as a join.
const NEW_MEMBERS: usize = 900;

pub struct Snapshots {
    /// Even if they are not due. `None` saves the boards that are due.
    scope: Option<Scope>,
    force: bool,
    /// `None` in a daemon or command: then MySQL's clock decides.
    pub now: Option<Micros>,
    boards: Vec<Board>,
}

struct Saver<'a> {
    run: &'a BoardRun<'a>,
    force: bool,
}

#[derive(Clone, Copy)]
struct Known {
    saved: u64,
    /// With fewer members, the board was evicted or deleted.
    members_min: u64,
}

impl Job for Snapshots {
    const NAME: &'static str = JOB;
    type Report = Report;
    type Progress = Progress;

    /// An operator's snapshot is taken even if the job is paused.
    fn needs(&self, _: &Config) -> &'static [Task] {
        if self.scope.is_none() { &NEEDS } else { &[] }
    }

    fn mode(&self) -> Cow<'_, str> {
        Cow::Borrowed(SNAPSHOT_MODE)
    }

    fn keep(&self) -> Duration {
        OFTEN_KEEP
    }

    fn begin(&self) -> (Report, Progress) {
        Default::default()
    }

    async fn work(&self, run: &mut Run<'_, Self>) -> Result<()> {
        let Some(board_run) = BoardRun::begin(run, self.now).await? else { return Ok(()) };
        let saver = Saver { run: &board_run, force: self.force };
        let started = Instant::now();
        for savable in self.choose(&board_run).await? {
            if self.scope.is_none() && started.elapsed() >= RUN_MAX {
                break;
            }
            let began = Instant::now();
            let saved = match saver.save(&savable).await {
                Ok(saved) => {
                    log_saved(&savable.at, &saved, began.elapsed());
                    saved.after(began.elapsed())
                }
                Err(Halt::Kept(reason)) => {
                    let BoardPeriod { board, period } = &savable.at;
                    let reason = reason.to_string();
                    warn!(
                        event = "board-not-saved",
                        board, period, reason, "{board} {period}: no new snapshot was taken: {reason}"
                    );
                    PeriodReport::new(&savable.at, Outcome::Kept).because(reason)
                }
                Err(Halt::Stopped) => return run.check_stop(),
                Err(Halt::Failed(error)) => return Err(error.context(format!("take a snapshot of {}", savable.at))),
            };
            run.report.periods.push(saved);
        }
        Ok(())
    }
}

impl Snapshots {
    pub fn new(config: &Config, scope: Option<Scope>, force: bool) -> Self {
        Self { scope, force, now: None, boards: config.boards.clone() }
    }

    async fn choose(&self, run: &BoardRun<'_>) -> Result<Vec<Savable>> {
        let BoardRun { store, cache, now, .. } = *run;
        if let Some(scope) = &self.scope {
            return savable(store, cache, &self.boards, scope, now).await;
        }
        let mut due = savable(store, cache, &self.boards, &Scope::default(), now).await?;
        due.retain(|savable| savable.is_on() && savable.is_due(now));
        due.sort_by_key(|savable| savable.noted.map(|noted| noted.began_at));
        Ok(due)
    }
}

impl Saver<'_> {
    async fn save(&self, savable: &Savable) -> Step<PeriodReport> {
        let BoardRun { store, cache, number, now, .. } = *self.run;
        let Self { run, force } = *self;
        let at = &savable.at;
        let generation = run.claim(&at.board).await?;
        let snapshot = savable.snapshot();
        if store.fenced_board_period(number, at).await?.is_some() {
            return Err(Halt::Kept(Reason::NotOpen));
        }
        if let Some(snapshot) = snapshot.filter(|_| force)
            && cache.is_restoring(at, &snapshot.tag()).await?.1
        {
            return Err(Halt::Kept(Reason::RestoreInterrupted));
        }
        let has_board = async || has_best(run, at, savable.rule, run.evicts().await).await;
        if snapshot.is_some() && !force && (savable.is_lost() || !has_board().await?) {
            // So that other boards are saved before the next try of this board.
            store.note_tried(number, at, now).await?;
            return Err(Halt::Kept(Reason::LostLive));
        }
        if !savable.live && (force || snapshot.is_none()) {
            let Some(_) = savable.noted else { return Ok(PeriodReport::new(at, Outcome::Nothing)) };
            forget(run, at).await?;
            return Ok(PeriodReport::new(at, Outcome::Forgotten));
        }
        if !self.mark(savable, generation).await? {
            return Ok(PeriodReport::new(at, Outcome::Nothing));
        }
        let saved = snapshot.map_or(0, |snapshot| snapshot.members);
        let members_min = if force { 0 } else { members_min(saved) };
        let Some(members) = self.save_all(savable, Known { saved, members_min }).await? else {
            return Ok(PeriodReport::new(at, Outcome::Nothing).because("the board was frozen during the snapshot"));
        };
        fault::point("snapshot:saved");
        store.end_snapshot(number, at, members, now).await?;
        Ok(PeriodReport { members, ..PeriodReport::new(at, Outcome::Saved) })
    }

    /// Before MySQL has the number. After a crash in between, the mark is newer than the number; after a restart of
    /// Redis from an old backup it is older. Returns `false` if the board no longer exists.
    async fn mark(&self, Savable { at, mark, .. }: &Savable, generation: u64) -> Step<bool> {
        let BoardRun { store, cache, number, now, .. } = *self.run;
        if self.run.taken(cache.mark_board(at, number, *mark, Some(number), None).await?)?.is_none() {
            return Ok(false);
        }
        fault::point("snapshot:marked");
        store.begin_snapshot(number, at, generation, now).await?;
        fault::point("snapshot:noted");
        Ok(true)
    }

    async fn save_all(&self, savable: &Savable, known: Known) -> Step<Option<u64>> {
        let cache = self.run.cache;
        let (before, _) = cache.count_board(&savable.at).await?;
        let Some(members) = self.save_changed(savable, known).await? else { return Ok(None) };
        fault::point("snapshot:looked");
        let (total, _) = cache.count_board(&savable.at).await?;
        if known.saved == members && members == before && members == total {
            // The board had exactly this number of members before and after the check, so it has no others.
            return Ok(Some(members));
        }
        let added = self.save_new(savable, Known { saved: members, ..known }, total).await?;
        Ok(added.map(|added| members + added))
    }

    async fn save_changed(&self, Savable { at, rule, .. }: &Savable, known: Known) -> Step<Option<u64>> {
        let BoardRun { store, cache, number, .. } = *self.run;
        self.run.show(at, "compared", known.saved);
        let mut after: Option<Vec<u8>> = None;
        let mut members = 0;
        loop {
            let began = Instant::now();
            let page = store.saved_page(at, after.as_deref(), PAGE_MEMBERS).await?;
            let scores = cache.scan_members(at, number, known.members_min, &page).await?;
            let Some(scores) = page_of(scores)? else { return Ok(None) };
            after = page.last().filter(|_| page.len() == PAGE_MEMBERS).map(|last| last.member.clone());
            let mut changed = Vec::new();
            let mut left = Vec::new();
            for (saved, score) in page.into_iter().zip(scores) {
                members += u64::from(score.is_some());
                match score {
                    None => left.push(saved.member),
                    Some(score) if score != saved.score => changed.push(BoardMember { score, ..saved }),
                    Some(_) => {}
                }
            }
            store.save_members(number, at, &saved_members(changed, *rule)?).await?;
            if !left.is_empty() {
                store.forget_members(number, at, &left).await?;
            }
            self.run.show_done(members);
            if after.is_none() {
                return Ok(Some(members));
            }
            self.rest(began).await?;
        }
    }

    async fn save_new(&self, savable: &Savable, known: Known, total: u64) -> Step<Option<u64>> {
        let BoardRun { store, cache, number, .. } = *self.run;
        let Savable { at, rule, .. } = savable;
        self.run.show(at, "saved", total);
        let mut from: Option<String> = None;
        let mut seen = 0;
        let mut added = 0;
        loop {
            let began = Instant::now();
            let mut members = Vec::new();
            while members.len() < PAGE_MEMBERS {
                // Small, because Redis cannot answer other clients while it reads a page.
                let page = cache.scan_board(at, number, known.members_min, from.as_deref(), SCAN_MEMBERS).await?;
                let Some(page) = page_of(page)? else { return Ok(None) };
                members.extend(page.members);
                from = page.next;
                if from.is_none() {
                    break;
                }
            }
            seen += members.len() as u64;
            for piece in saved_members(members, *rule)?.chunks(NEW_MEMBERS) {
                let saved = if known.saved == 0 { HashSet::new() } else { store.saved_among(at, piece).await? };
                let new: Vec<_> = piece.iter().filter(|row| !saved.contains(&row.member.member)).cloned().collect();
                store.save_members(number, at, &new).await?;
                added += new.len() as u64;
            }
            fault::point("snapshot:saved-page");
            self.run.show_done(seen.min(total));
            if from.is_none() {
                return Ok(Some(added));
            }
            self.rest(began).await?;
        }
    }

    async fn rest(&self, began: Instant) -> Step<()> {
        let pause = began.elapsed().min(Duration::from_secs(1));
        self.run.stop.run_until_cancelled(tokio::time::sleep(pause)).await;
        self.run.check_stop()
    }
}

fn log_saved(
    BoardPeriod { board, period }: &BoardPeriod,
    &PeriodReport { outcome, members, .. }: &PeriodReport,
    took: Duration,
) {
    if outcome == Outcome::Saved {
        let seconds = took.as_secs_f32();
        let text = format!("a snapshot of {members} members was taken in {seconds:.1} s");
        info!(event = "board-saved", board, period, members, seconds, "{board} {period}: {text}");
    }
}

fn page_of<T>(scanned: Scanned<T>) -> Step<Option<T>> {
    match scanned {
        Scanned::Page(page) => Ok(Some(page)),
        Scanned::Frozen => Ok(None),
        Scanned::Lost | Scanned::Shrunk => Err(Halt::Kept(Reason::LostLive)),
    }
}

fn saved_members(mut members: Vec<BoardMember>, rule: Rule) -> Step<Vec<SavedMember>> {
    let mut seen = HashSet::new();
    members.retain(|member| seen.insert(member.member.clone()));
    members.sort_unstable_by(|one, other| one.member.cmp(&other.member));
    check_storable(&members)?;
    let saved = |member: BoardMember| {
        let (primary, second) =
            (rule.primary(member.score), rule.columns(member.score).map_or(0, |columns| columns.low));
        SavedMember { primary, second, member }
    };
    Ok(members.into_iter().map(saved).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn members_are_saved_once_in_the_order_of_the_key_with_their_columns() {
        let member = |member: &str, score| BoardMember { member: member.into(), score };
        let page = vec![member("b", 2_097_153.0), member("a", 1_048_576.0), member("b", 2_097_153.0)];
        let rule = Rule { tie: tallyd_redis::score::Tie::Second, packing: tallyd_redis::score::Packing::new(20) };
        let saved = |members, rule| saved_members(members, rule).map_err(|_| ()).unwrap();
        let rows: Vec<_> =
            saved(page.clone(), rule).into_iter().map(|row| (row.member, row.primary, row.second)).collect();
        assert_eq!(rows, [(page[1].clone(), 1.0, 0), (page[0].clone(), 2.0, 1)]);
        let plain = saved(vec![member("a", 0.5)], Rule::PLAIN);
        assert_eq!((plain[0].primary, plain[0].second), (0.5, 0));
        assert!(matches!(saved_members(vec![member("a", f64::INFINITY)], Rule::PLAIN), Err(Halt::Kept(_))));
    }
}
