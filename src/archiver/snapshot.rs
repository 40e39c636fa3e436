//! Snapshots of boards that are not archived yet: all that is left of them where Redis loses its data.
//!
//! # The way
//!
//! ```text
//! note the run in MySQL -> mark the board with it -> scan: write what changed -> look: delete what left -> note the end
//! ```
//!
//! The rows are changed in place, so that a snapshot costs writes for what changed since the last one. That must never let what
//! is left of a lost board spoil the rows: each page is read by a script that finds the mark of this very run beside the
//! zset, and enough members in it, or reads nothing. A run that dies leaves rows of two snapshots, each of them right at its time;
//! the next one goes over all of them. What was added while it ran may be in it or not.

use std::collections::HashSet;
use std::time::{Duration, Instant};

use anyhow::Result;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use super::Archiver;
use super::plan::{LOST_LIVE, Saved};
use super::progress::Progress;
use super::report::{Outcome, PeriodReport, Report};
use super::scope::{Candidate, Scope, candidate_named};
use super::settle::{Halt, Run, Step};
use crate::cache::boards::Changed;
use crate::cache::score::Rule;
use crate::cache::snapshots::{ScanPage, Scanned};
use crate::model::{BoardMember, BoardPeriod, Micros};
use crate::runtime::fault;
use crate::runtime::show::{self, Show};
use crate::store::snapshots::{Saved as SavedMember, Snapshot};

/// The mode of such a run.
pub const SNAPSHOT_MODE: &str = "snapshot";

/// Members of one page: a script takes at most some thousand arguments apart.
pub(super) const PAGE_MEMBERS: usize = 1_000;

/// How long after a snapshot that was not completed the next one is tried, at most.
const AGAIN_AFTER: Duration = Duration::from_secs(300);

const SHRUNK: &str = "Redis has less than half of the members that its last snapshot has: it was evicted, or deleted, and `tallyd board \
    restore` puts the snapshot back; or that is right, and `tallyd board snapshot --force` takes it as it is";

/// A period that may have a snapshot, and what is known of it.
#[derive(Clone, Debug)]
pub(super) struct Savable {
    pub at: BoardPeriod,
    pub rule: Rule,
    every: Duration,
    pub snapshot: Option<Snapshot>,
    mark: Option<u64>,
    /// The live zset is there.
    live: bool,
}

impl Savable {
    /// Whether Redis has lost the board since its last snapshot began.
    pub(super) fn is_lost(&self) -> bool {
        self.snapshot.is_some_and(|snapshot| !snapshot.is_marked(self.mark))
    }

    /// Whether snapshots are to be taken of it.
    pub(super) fn is_on(&self) -> bool {
        !self.every.is_zero()
    }

    /// Whether it is time for one.
    pub(super) fn is_due(&self, now: Micros) -> bool {
        match self.snapshot {
            None => self.live,
            Some(_) if self.is_lost() => false,
            Some(Snapshot { began_at, taken_at, .. }) => {
                let pause = if taken_at == Some(began_at) { self.every } else { self.every.min(AGAIN_AFTER) };
                began_at.after(pause) <= now
            }
        }
    }
}

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
        to: Show,
        stop: &CancellationToken,
    ) -> Result<Report> {
        self.store.check_archive_run(run).await?;
        let (progress, shown) = watch::channel(Progress::default());
        let run = Run { archiver: self, number: run, now, stop, progress };
        tokio::select! {
            report = run.snapshots(scope, force) => report,
            () = show::show(to, shown) => anyhow::bail!("nobody is shown the run any longer"),
        }
    }

    /// The periods that a snapshot may be taken of: those that are open, in the order of the configuration; or the one that `scope`
    /// names, which may be closed but not frozen.
    pub(super) async fn savable(&self, scope: &Scope, now: Micros) -> Result<Vec<Savable>> {
        let named = match &scope.period {
            Some(period) => vec![candidate_named(&self.boards, scope.board.as_deref().unwrap_or_default(), period)?],
            None => scope.candidates(&self.boards, now)?.open.into_iter().map(|(candidate, _)| candidate).collect(),
        };
        let every = |at: &BoardPeriod| {
            let kind = at.period.parse().ok().map(super::period::Period::kind);
            let board = self.boards.iter().find(|board| board.name == at.board && Some(board.period) == kind);
            board.map_or(Duration::ZERO, |board| board.snapshot_every.0)
        };
        let snapshots = self.store.snapshots().await?;
        let periods: Vec<BoardPeriod> = named.iter().map(|candidate| candidate.at.clone()).collect();
        let (marks, keys) = (self.cache.board_marks(&periods).await?, self.cache.find_boards(&periods).await?);
        let savable = named.into_iter().zip(marks).zip(keys).filter(|(_, keys)| !keys.frozen);
        let savable = savable.map(|((Candidate { at, rule, .. }, mark), keys)| Savable {
            every: every(&at),
            snapshot: snapshots.iter().find(|(of, _)| *of == at).map(|(_, snapshot)| *snapshot),
            at,
            rule,
            mark,
            live: keys.live,
        });
        Ok(savable.collect())
    }

    /// Whether a closed period has a snapshot, whether Redis still has the board that it is of, and the marks that this has.
    pub(super) async fn saved(&self, at: &BoardPeriod) -> Result<(Saved, Option<[u64; 2]>), Halt> {
        let Some(snapshot) = self.store.snapshot(at).await? else { return Ok((Saved::None, None)) };
        let mark = self.cache.board_marks(std::slice::from_ref(at)).await?.pop().flatten();
        let (members, _) = self.cache.count_board(at).await?;
        let whole = snapshot.is_marked(mark) && members * 2 >= snapshot.members;
        let saved = if whole { Saved::Marked } else { Saved::Lost };
        Ok((saved, Some([snapshot.number, snapshot.former])))
    }
}

impl Run<'_> {
    async fn snapshots(&self, scope: Option<&Scope>, force: bool) -> Result<Report> {
        let mut report = Report::default();
        let all = Scope::default();
        let savable = self.archiver.savable(scope.unwrap_or(&all), self.now).await?;
        let due = |savable: &Savable| savable.is_on() && savable.is_due(self.now);
        for savable in savable.into_iter().filter(|savable| scope.is_some() || due(savable)) {
            let began = Instant::now();
            match self.save(&savable, force).await {
                Ok(saved) => {
                    let BoardPeriod { board, period } = &savable.at;
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
                    report.periods.push(saved);
                }
                Err(Halt::Kept(reason)) => {
                    let BoardPeriod { board, period } = &savable.at;
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

    async fn save(&self, savable: &Savable, force: bool) -> Step<PeriodReport> {
        let Archiver { store, cache, .. } = self.archiver;
        let Savable { at, snapshot, mark, .. } = savable;
        if savable.is_lost() && !force {
            return Err(Halt::Kept(LOST_LIVE.to_owned()));
        }
        if snapshot.is_none() && !savable.live {
            return Ok(PeriodReport::new(at, Outcome::Nothing));
        }
        // A mark that MySQL doesn't know looks like a loss: it is noted first. Where there is nothing to lose, a note without a mark
        // would look like one.
        let is_known = snapshot.is_some() && !savable.is_lost();
        let former = mark.unwrap_or_default();
        if is_known {
            store.begin_snapshot(self.number, at, former, self.now).await?;
            fault::point("snapshot:noted");
        }
        match cache.mark_board(at, *mark, self.number).await? {
            Changed::Lost => return Err(Halt::Kept(LOST_LIVE.to_owned())),
            Changed::Absent => return Ok(PeriodReport::new(at, Outcome::Nothing)),
            _ => fault::point("snapshot:marked"),
        }
        if !is_known {
            store.begin_snapshot(self.number, at, former, self.now).await?;
        }
        let known = snapshot.map_or(0, |snapshot| snapshot.members);
        let members_min = if force { 0 } else { known / 2 };
        let Some(members) = self.save_all(savable, members_min, known).await? else {
            return Ok(PeriodReport::new(at, Outcome::Nothing).because("it was frozen meanwhile"));
        };
        fault::point("snapshot:looked");
        store.end_snapshot(self.number, at, members, self.now).await?;
        Ok(PeriodReport { members, ..PeriodReport::new(at, Outcome::Saved) })
    }

    /// Writes all members, and deletes those that left; says how many there are. None where the board was frozen meanwhile.
    async fn save_all(&self, savable: &Savable, members_min: u64, known: u64) -> Step<Option<u64>> {
        let Archiver { store, cache, .. } = self.archiver;
        let Savable { at, rule, .. } = savable;
        let (total, _) = cache.count_board(at).await?;
        self.show(at, "saved", total);
        let (mut from, mut saved) = (None, 0);
        loop {
            let began = Instant::now();
            let page = cache.scan_board(at, self.number, members_min, from.as_deref(), PAGE_MEMBERS).await?;
            let Some(ScanPage { next, members }) = page_of(page)? else { return Ok(None) };
            for piece in saved_members(members, *rule)?.chunks(PAGE_MEMBERS) {
                store.save_members(self.number, at, piece).await?;
                saved += piece.len() as u64;
            }
            fault::point("snapshot:saved-page");
            self.show_done(saved);
            self.rest(began).await?;
            from = next;
            if from.is_none() {
                break;
            }
        }
        fault::point("snapshot:saved");
        self.show(at, "looked at", known.max(total));
        let (mut after, mut members): (Option<Vec<u8>>, u64) = (None, 0);
        loop {
            let began = Instant::now();
            let page = store.saved_page(at, after.as_deref(), PAGE_MEMBERS).await?;
            let has = cache.board_has(at, self.number, members_min, &page).await?;
            let Some(has) = page_of(has)? else { return Ok(None) };
            let left = page.iter().zip(&has).filter(|(_, has)| !**has).map(|(member, _)| member.member.clone());
            let left: Vec<Vec<u8>> = left.collect();
            if !left.is_empty() {
                store.forget_members(self.number, at, &left).await?;
            }
            members += (page.len() - left.len()) as u64;
            self.show_done(members);
            let Some(last) = page.last().filter(|_| page.len() == PAGE_MEMBERS) else { return Ok(Some(members)) };
            after = Some(last.member.clone());
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
        Scanned::Lost => Err(Halt::Kept(LOST_LIVE.to_owned())),
        Scanned::Shrunk => Err(Halt::Kept(SHRUNK.to_owned())),
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
        let columns = rule.columns(member.score);
        // A column has at most 53 bits, which a double holds exactly.
        let primary = columns.map_or(member.score, |columns| columns.primary as f64);
        Ok(SavedMember { primary, second: columns.map_or(0, |columns| columns.low), member })
    };
    members.into_iter().map(saved).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn savable(snapshot: Option<(u64, u64, i64, Option<i64>)>, mark: Option<u64>, live: bool) -> Savable {
        let snapshot = snapshot.map(|(number, former, began_at, taken_at)| Snapshot {
            number,
            former,
            members: 10,
            began_at: Micros(began_at * 1_000_000),
            taken_at: taken_at.map(|at| Micros(at * 1_000_000)),
        });
        let at = BoardPeriod { board: "likes".to_owned(), period: "total".to_owned() };
        Savable { at, rule: Rule::PLAIN, every: Duration::from_secs(3_600), snapshot, mark, live }
    }

    #[test]
    fn a_snapshot_is_due_when_its_time_has_come_and_the_board_is_there() {
        let due = |savable: &Savable, seconds: i64| savable.is_due(Micros(seconds * 1_000_000));
        assert!(due(&savable(None, None, true), 0), "the first one");
        assert!(!due(&savable(None, None, false), 0), "there is no board");
        let taken = savable(Some((7, 7, 100, Some(100))), Some(7), true);
        assert!(!due(&taken, 3_699) && due(&taken, 3_700));
        let died = savable(Some((8, 7, 100, Some(50))), Some(7), true);
        assert!(!due(&died, 399) && due(&died, 400), "sooner after one that was not completed");
        let lost = savable(Some((7, 7, 100, Some(100))), None, true);
        assert!(lost.is_lost() && !due(&lost, 1_000_000), "it would spoil what is saved");
        assert!(savable(Some((7, 7, 100, Some(100))), Some(6), true).is_lost(), "an old backup");
        assert!(!savable(Some((8, 7, 100, Some(50))), Some(7), true).is_lost(), "it died before the mark");
        assert!(!savable(Some((8, 7, 100, Some(50))), Some(8), true).is_lost(), "it died after it");
    }

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
