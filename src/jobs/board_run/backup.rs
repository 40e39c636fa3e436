//! Reads a board's snapshot and archive from MySQL, and checks whether Redis still has the same board.

use tallyd_base::runtime::fault;
use tallyd_core::archive::{Backup, Snapshot, are_of_board, members_min};
use tallyd_core::model::{BoardMember, BoardPeriod};
use tallyd_mysql::{Store, StoreError};
use tallyd_redis::score::Rule;

use super::{BoardRun, Halt, Reason, Step};

/// A page's members are the arguments of one script call, which accepts at most a few thousand.
pub(in crate::jobs) const PAGE_MEMBERS: usize = 1_000;

/// The number of the snapshot's best members whose scores tell whether Redis still has the board.
const SAMPLE_MEMBERS: u64 = 200;

/// The length of the column `member` in MySQL.
const MEMBER_BYTES_MAX: usize = 255;

const NAME_SHOWN: usize = 60;

pub(in crate::jobs) async fn complete(store: &Store, at: &BoardPeriod) -> Step<Option<Snapshot>> {
    Ok(store.snapshot(at).await?.filter(|snapshot| snapshot.taken_at.is_some()))
}

pub(in crate::jobs) async fn backup_of(run: &BoardRun<'_>, at: &BoardPeriod, rule: Rule) -> Step<Backup> {
    let Some(snapshot) = complete(run.store, at).await? else { return Ok(Backup::None) };
    let evicts = run.evicts().await;
    let (members, _) = run.cache.count_board(at).await?;
    let is_intact = snapshot.is_marked(run.mark(at).await?)
        && members >= members_min(snapshot.members)
        && has_best(run, at, rule, evicts).await?;
    Ok(if is_intact { Backup::Intact } else { Backup::Lost })
}

/// If Redis evicts boards, the mark proves nothing: Redis can evict the zset, keep the mark, and get a new zset.
pub(in crate::jobs) async fn has_best(run: &BoardRun<'_>, at: &BoardPeriod, rule: Rule, evicts: bool) -> Step<bool> {
    let best = run.store.best_saved(at, SAMPLE_MEMBERS).await?;
    let live = run.cache.board_scores(at, &best).await?;
    // The second part of a score, which orders equal members, can decrease with every change.
    let primary = |score: f64| rule.primary(score);
    let live: Vec<f64> = live.into_iter().flatten().map(primary).collect();
    Ok(are_of_board(&best.iter().map(|member| primary(member.score)).collect::<Vec<_>>(), &live, evicts))
}

pub(in crate::jobs) fn check_storable(members: &[BoardMember]) -> Step<()> {
    let wrong = members.iter().find(|member| !member.score.is_finite() || member.member.len() > MEMBER_BYTES_MAX);
    wrong.map_or(Ok(()), |member| {
        let name = String::from_utf8_lossy(&member.member).chars().take(NAME_SHOWN).collect();
        Err(Halt::Kept(Reason::Unstorable(name)))
    })
}

/// The snapshot is voided first, so that a partly deleted snapshot is never restored.
pub(in crate::jobs) async fn forget(run: &BoardRun<'_>, at: &BoardPeriod) -> Step<()> {
    run.store.void_snapshot(run.number, at).await?;
    let mark = run.mark(at).await?;
    if mark.is_some() {
        run.taken(run.cache.mark_board(at, run.number, mark, None, None).await?)?;
    }
    let mut after = None;
    while let Some(last) = run.store.forget_snapshot(run.number, at, after.as_deref()).await? {
        fault::point("archive:forgetting");
        run.check_stop()?;
        after = Some(last);
    }
    Ok(())
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::jobs) enum RowsOf {
    Archive { copy: u8 },
    Snapshot,
}

pub(in crate::jobs) struct Rows<'a> {
    store: &'a Store,
    at: &'a BoardPeriod,
    of: RowsOf,
    pub read: u64,
    last: Option<Vec<u8>>,
}

impl<'a> Rows<'a> {
    pub(crate) fn new(store: &'a Store, at: &'a BoardPeriod, of: RowsOf) -> Self {
        Self { store, at, of, read: 0, last: None }
    }

    pub(crate) async fn next(&mut self) -> Result<Option<Vec<BoardMember>>, StoreError> {
        let page: Vec<BoardMember> = match self.of {
            RowsOf::Archive { copy } => {
                let rows = self.store.archived_page(self.at, copy, self.read, PAGE_MEMBERS).await?;
                rows.into_iter().map(|(_, member)| member).collect()
            }
            RowsOf::Snapshot => self.store.saved_page(self.at, self.last.as_deref(), PAGE_MEMBERS).await?,
        };
        self.read += page.len() as u64;
        self.last = page.last().map(|last| last.member.clone());
        Ok(Some(page).filter(|page| !page.is_empty()))
    }
}
