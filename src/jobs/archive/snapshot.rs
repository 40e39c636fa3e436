//! Snapshots of boards that are not archived yet: all that is left of them where Redis loses its data.
//!
//! # The way
//!
//! ```text
//! claim the board -> is it whole? -> mark the board with the run -> note the run in MySQL
//!   -> what is saved: write what changed, delete what left -> what Redis has: write what is new -> note the end
//! ```
//!
//! The rows are changed in place, so that a snapshot costs writes for what changed since the last one. That must never let what
//! is left of a lost board spoil the rows: each page is read by a script that finds the mark of this very run beside the
//! zset, and enough members in it, or reads nothing. And a board that was evicted alone, and has grown again, is known by its best
//! members, which together have less than half of what they had. A run that dies leaves rows of two snapshots, each of them right at its time;
//! the next one goes over all of them. What was added while it ran may be in it or not.

use std::collections::HashSet;
use std::time::{Duration, Instant};

use anyhow::Result;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use super::Archiver;
use super::board_health::Savable;
use super::candidates::Scope;
use super::plan::LOST_LIVE;
use super::progress::Progress;
use super::report::{Outcome, PeriodReport, Report};
use super::restore::tag;
use super::steps::{Halt, Run, Step};
use crate::cache::score::Rule;
use crate::cache::snapshots::Scanned;
use crate::model::{BoardMember, BoardPeriod, Micros};
use crate::runtime::fault;
use crate::runtime::progress::{ProgressSink, follow};
use crate::store::snapshots::Saved as SavedMember;

/// The mode of such a run.
pub const SNAPSHOT_MODE: &str = "snapshot";

/// After so long a run begins no other board: whoever else needs the lock gets it.
const RUN_MAX: Duration = Duration::from_secs(10);

/// Members of one page: a script takes at most some thousand arguments apart.
pub(super) const PAGE_MEMBERS: usize = 1_000;

/// Members that one scan reads.
const SCAN_MEMBERS: usize = 250;

/// Members that are looked for at once: MariaDB makes a join of a longer list.
const NEW_MEMBERS: usize = 900;

/// Boards of fewer members may lose more than half of them.
const FEW_MEMBERS: u64 = 10;

impl Archiver {
    /// Takes snapshots as the run that holds the job's lock: of all boards that are due; or of those in `scope`, due or not. With
    /// `force` even where Redis has lost the board, or most of it.
    ///
    /// # Errors
    /// [`super::ScopeError`]; a server is away; another run took over.
    pub async fn snapshot(
        &self,
        run: u64,
        scope: Option<&Scope>,
        force: bool,
        now: Micros,
        to: ProgressSink,
        stop: &CancellationToken,
    ) -> Result<Report> {
        self.store.check_archive_run(run).await?;
        let (progress, shown) = watch::channel(Progress::default());
        let run = Run { archiver: self, number: run, now, stop, progress };
        tokio::select! {
            report = run.snapshots(scope, force) => report,
            () = follow(to, shown) => anyhow::bail!("nobody is shown the run any longer"),
        }
    }
}

impl Run<'_> {
    async fn snapshots(&self, scope: Option<&Scope>, force: bool) -> Result<Report> {
        let mut report = Report::default();
        let all = Scope::default();
        let mut savable = self.archiver.savable(scope.unwrap_or(&all), self.now).await?;
        if scope.is_none() {
            // Those first that have waited for the longest.
            savable.retain(|savable| savable.is_on() && savable.is_due(self.now));
            savable.sort_by_key(|savable| savable.noted.map(|noted| noted.began_at));
        }
        let started = Instant::now();
        for savable in savable {
            if scope.is_none() && started.elapsed() >= RUN_MAX {
                break;
            }
            let began = Instant::now();
            let BoardPeriod { board, period } = &savable.at;
            let generation = self.claim(board).await?;
            match self.save(&savable, generation, force).await {
                Ok(saved) => {
                    let (members, seconds) = (saved.members, began.elapsed().as_secs_f32());
                    if saved.outcome == Outcome::Saved {
                        info!(
                            event = "board-saved",
                            board,
                            period,
                            members,
                            seconds,
                            "{board} {period}: a snapshot of {members} members was taken in {seconds:.1} s"
                        );
                    }
                    report.periods.push(saved.after(began.elapsed()));
                }
                Err(Halt::Kept(reason)) => {
                    warn!(
                        event = "board-not-saved",
                        board, period, reason, "{board} {period} has no new snapshot: {reason}"
                    );
                    report.periods.push(PeriodReport::new(&savable.at, Outcome::Kept).because(reason));
                }
                Err(Halt::Stopped) => {
                    report.stopped = true;
                    return Ok(report);
                }
                Err(Halt::Failed(error)) => return Err(error.context(format!("take a snapshot of {}", savable.at))),
            }
        }
        Ok(report)
    }

    async fn save(&self, savable: &Savable, generation: u64, force: bool) -> Step<PeriodReport> {
        let Archiver { store, cache, .. } = self.archiver;
        let (at, snapshot, is_lost) = (&savable.at, savable.snapshot(), savable.is_lost());
        if store.held_board_period(self.number, at).await?.is_some() {
            return Err(Halt::Kept("it is frozen or archived: only what is neither is saved".to_owned()));
        }
        if let Some(snapshot) = snapshot.filter(|_| force)
            && cache.is_restoring(at, &tag(snapshot)).await?.1
        {
            return Err(Halt::Kept(
                "a restore was interrupted, and has what was added since: `tallyd board restore` ends it".to_owned(),
            ));
        }
        if snapshot.is_some() && !force && (is_lost || !self.archiver.has_whole(at, savable.rule).await?) {
            // Not at once again, and others go first.
            store.note_tried(self.number, at, self.now).await?;
            return Err(Halt::Kept(LOST_LIVE.to_owned()));
        }
        if !savable.live && (force || snapshot.is_none()) {
            let Some(_) = savable.noted else { return Ok(PeriodReport::new(at, Outcome::Nothing)) };
            self.forget_snapshot(at).await?;
            return Ok(PeriodReport::new(at, Outcome::Forgotten));
        }
        if !self.mark(savable, generation).await? {
            return Ok(PeriodReport::new(at, Outcome::Nothing));
        }
        let known = snapshot.map_or(0, |snapshot| snapshot.members);
        let members_min = if force || known < FEW_MEMBERS { 0 } else { known / 2 };
        let Some(members) = self.save_all(savable, members_min, known).await? else {
            return Ok(PeriodReport::new(at, Outcome::Nothing).because("it was frozen meanwhile"));
        };
        fault::point("snapshot:saved");
        store.end_snapshot(self.number, at, members, self.now).await?;
        Ok(PeriodReport { members, ..PeriodReport::new(at, Outcome::Saved) })
    }

    /// Gives the board this run's mark, and then MySQL the run's number; false where there is no board any more. A run that dies in between leaves a
    /// mark that is newer, an old backup has one that is older.
    async fn mark(&self, Savable { at, mark, .. }: &Savable, generation: u64) -> Step<bool> {
        let Archiver { store, cache, .. } = self.archiver;
        if self.taken(cache.mark_board(at, self.number, *mark, Some(self.number)).await?)?.is_none() {
            return Ok(false);
        }
        fault::point("snapshot:marked");
        store.begin_snapshot(self.number, at, generation, self.now).await?;
        fault::point("snapshot:noted");
        Ok(true)
    }

    /// Writes what changed; says how many members there are. None where the board was frozen meanwhile.
    async fn save_all(&self, savable: &Savable, members_min: u64, known: u64) -> Step<Option<u64>> {
        let (before, _) = self.archiver.cache.count_board(&savable.at).await?;
        let Some(members) = self.save_changed(savable, members_min, known).await? else { return Ok(None) };
        fault::point("snapshot:looked");
        let (total, _) = self.archiver.cache.count_board(&savable.at).await?;
        if known == members && members == before && members == total {
            // All of them are on the board, which has as many as before and after: it has no others.
            return Ok(Some(members));
        }
        let added = self.save_new(savable, members_min, (members, total)).await?;
        Ok(added.map(|added| members + added))
    }

    /// Goes through the members that are saved: writes those that changed, deletes those that left; says how many there are.
    async fn save_changed(
        &self,
        Savable { at, rule, .. }: &Savable,
        members_min: u64,
        known: u64,
    ) -> Step<Option<u64>> {
        let Archiver { store, cache, .. } = self.archiver;
        self.show(at, "looked at", known);
        let (mut after, mut members): (Option<Vec<u8>>, u64) = (None, 0);
        loop {
            let began = Instant::now();
            let page = store.saved_page(at, after.as_deref(), PAGE_MEMBERS).await?;
            let scores = cache.scan_members(at, self.number, members_min, &page).await?;
            let Some(scores) = page_of(scores)? else { return Ok(None) };
            after = page.last().filter(|_| page.len() == PAGE_MEMBERS).map(|last| last.member.clone());
            let (mut changed, mut left) = (Vec::new(), Vec::new());
            for (saved, score) in page.into_iter().zip(scores) {
                members += u64::from(score.is_some());
                match score {
                    None => left.push(saved.member),
                    Some(score) if score != saved.score => changed.push(BoardMember { score, ..saved }),
                    Some(_) => {}
                }
            }
            store.save_members(self.number, at, &saved_members(changed, *rule)?).await?;
            if !left.is_empty() {
                store.forget_members(self.number, at, &left).await?;
            }
            self.show_done(members);
            if after.is_none() {
                return Ok(Some(members));
            }
            self.rest(began).await?;
        }
    }

    /// Goes through the members that Redis has, and writes those that are not saved yet; says how many.
    async fn save_new(&self, savable: &Savable, members_min: u64, (known, total): (u64, u64)) -> Step<Option<u64>> {
        let Archiver { store, cache, .. } = self.archiver;
        let Savable { at, rule, .. } = savable;
        self.show(at, "saved", total);
        let (mut from, mut seen, mut added): (Option<String>, u64, u64) = (None, 0, 0);
        loop {
            let began = Instant::now();
            let mut members = Vec::new();
            while members.len() < PAGE_MEMBERS {
                // Small ones: Redis answers nobody else meanwhile.
                let page = cache.scan_board(at, self.number, members_min, from.as_deref(), SCAN_MEMBERS).await?;
                let Some(page) = page_of(page)? else { return Ok(None) };
                members.extend(page.members);
                from = page.next;
                if from.is_none() {
                    break;
                }
            }
            seen += members.len() as u64;
            for piece in saved_members(members, *rule)?.chunks(NEW_MEMBERS) {
                let saved = if known == 0 { HashSet::new() } else { store.saved_among(at, piece).await? };
                let new: Vec<_> = piece.iter().filter(|row| !saved.contains(&row.member.member)).cloned().collect();
                store.save_members(self.number, at, &new).await?;
                added += new.len() as u64;
            }
            fault::point("snapshot:saved-page");
            self.show_done(seen.min(total));
            if from.is_none() {
                return Ok(Some(added));
            }
            self.rest(began).await?;
        }
    }

    /// Leaves the servers to others for as long as the page has taken.
    async fn rest(&self, began: Instant) -> Step<()> {
        let pause = began.elapsed().min(Duration::from_secs(1));
        self.stop.run_until_cancelled(tokio::time::sleep(pause)).await;
        self.check_stop()
    }
}

/// None where the board was frozen.
fn page_of<T>(scanned: Scanned<T>) -> Step<Option<T>> {
    match scanned {
        Scanned::Page(page) => Ok(Some(page)),
        Scanned::Frozen => Ok(None),
        Scanned::Lost | Scanned::Shrunk => Err(Halt::Kept(LOST_LIVE.to_owned())),
    }
}

/// As rows, in the order of their key, each member once.
fn saved_members(mut members: Vec<BoardMember>, rule: Rule) -> Step<Vec<SavedMember>> {
    let mut seen = HashSet::new();
    members.retain(|member| seen.insert(member.member.clone()));
    members.sort_unstable_by(|one, other| one.member.cmp(&other.member));
    let saved = |member: BoardMember| {
        if !member.score.is_finite() {
            let name = String::from_utf8_lossy(&member.member).into_owned();
            return Err(Halt::Kept(format!("the score of {name} is infinite, which MySQL can't hold")));
        }
        let (primary, second) =
            (rule.primary(member.score), rule.columns(member.score).map_or(0, |columns| columns.low));
        Ok(SavedMember { primary, second, member })
    };
    members.into_iter().map(saved).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn members_are_saved_once_in_the_order_of_the_key_with_their_columns() {
        let member = |member: &str, score| BoardMember { member: member.into(), score };
        let page = vec![member("b", 2_097_153.0), member("a", 1_048_576.0), member("b", 2_097_153.0)];
        let rule = Rule { tie: crate::cache::score::Tie::Second, packing: crate::cache::score::Packing::new(20) };
        let saved = |members, rule| saved_members(members, rule).map_err(|_| ()).unwrap();
        let rows: Vec<_> =
            saved(page.clone(), rule).into_iter().map(|row| (row.member, row.primary, row.second)).collect();
        assert_eq!(rows, [(page[1].clone(), 1.0, 0), (page[0].clone(), 2.0, 1)]);
        let plain = saved(vec![member("a", 0.5)], Rule::PLAIN);
        assert_eq!((plain[0].primary, plain[0].second), (0.5, 0));
        assert!(matches!(saved_members(vec![member("a", f64::INFINITY)], Rule::PLAIN), Err(Halt::Kept(_))));
    }
}
