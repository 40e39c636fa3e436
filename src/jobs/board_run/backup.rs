//! Reads a board's snapshot and archive from MySQL, and checks whether Redis still has the same board.

use crate::runtime::fault;
use tallyd_core::model::{BoardMember, BoardPeriod};
use tallyd_mysql::boards::PeriodRow;
use tallyd_mysql::snapshots::Snapshot;
use tallyd_mysql::{Store, StoreError};
use tallyd_redis::boards::BoardKeys;
use tallyd_redis::score::Rule;

use super::{BoardRun, Halt, Reason, Step};

/// Maximum number of members in one page. The members of a page are the arguments of one script call, and a call
/// accepts at most a few thousand arguments.
pub(in crate::jobs) const PAGE_MEMBERS: usize = 1_000;

/// The number of members that a run compares to decide whether Redis still has the board. The run compares the scores
/// of the snapshot's best members with their scores in Redis.
const TOLD_BY: u64 = 200;

/// Withdrawn likes can leave no member of a board with fewer saved members than this. So such a board is treated as lost
/// only if Redis evicts boards.
const FEW_MEMBERS: u64 = 10;

/// The length of the column `member` in MySQL.
const MEMBER_BYTES_MAX: usize = 255;

/// The maximum number of characters of a member's name that a reason contains.
const NAME_SHOWN: usize = 60;

/// Whether MySQL has a snapshot of a period, and whether Redis has lost the period's board since the snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::jobs) enum Backup {
    None,
    /// MySQL has a snapshot, and Redis has lost no part of the board since then.
    Intact,
    /// MySQL has a snapshot. After the snapshot was taken, Redis lost the board or a part of the board.
    Lost,
}

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

/// Returns the least number of members that a board with `saved` members must still have.
pub(in crate::jobs) fn members_min(saved: u64) -> u64 {
    if saved < FEW_MEMBERS { 0 } else { saved / 2 }
}

/// Whether the live zset is still the board of the snapshot. If Redis evicts boards (`evicts`), the snapshot's mark in
/// Redis does not prove this, because Redis can evict the zset and keep the mark. Writers then begin a new zset.
pub(in crate::jobs) async fn has_best(run: &BoardRun<'_>, at: &BoardPeriod, rule: Rule, evicts: bool) -> Step<bool> {
    let best = run.store.best_saved(at, TOLD_BY).await?;
    let live = run.cache.board_scores(at, &best).await?;
    // Only the primary part of each score is compared. A score can have a second part, which orders members with equal
    // primary parts. This second part can be a number that decreases with every change.
    let primary = |score: f64| rule.primary(score);
    let live: Vec<f64> = live.into_iter().flatten().map(primary).collect();
    Ok(are_of_board(&best.iter().map(|member| primary(member.score)).collect::<Vec<_>>(), &live, evicts))
}

/// Whether `live`, the current scores of a snapshot's best members, show that the zset is still the snapshot's board.
/// Members that left the zset have no score in `live`. If Redis evicts boards, a zset is new if the scores together are
/// less than half of the saved ones.
fn are_of_board(saved: &[f64], live: &[f64], evicts: bool) -> bool {
    let (before, now) = (saved.iter().sum::<f64>(), live.iter().sum::<f64>());
    let fell = evicts && before > 0.0 && now * 2.0 < before;
    let is_small = saved.is_empty() || (!evicts && (saved.len() as u64) < FEW_MEMBERS);
    is_small || !(live.is_empty() || fell)
}

/// Checks that MySQL can store the members.
pub(in crate::jobs) fn check_storable(members: &[BoardMember]) -> Step<()> {
    let wrong = members.iter().find(|member| !member.score.is_finite() || member.member.len() > MEMBER_BYTES_MAX);
    wrong.map_or(Ok(()), |member| {
        let name = String::from_utf8_lossy(&member.member).chars().take(NAME_SHOWN).collect();
        Err(Halt::Kept(Reason::Unstorable(name)))
    })
}

/// Whether Redis went back to a state from before the freeze, although MySQL has recorded the freeze. After a flush,
/// the data in Redis gets a newer generation than the recorded one, so the result is false.
pub(in crate::jobs) fn went_back(keys: BoardKeys, row: PeriodRow) -> bool {
    keys.freeze < row.frozen
}

/// Deletes one snapshot of a claimed board. The snapshot is voided first, so that a partly deleted snapshot is never
/// restored.
pub(in crate::jobs) async fn forget(run: &BoardRun<'_>, at: &BoardPeriod) -> Step<()> {
    run.store.void_snapshot(run.number, at).await?;
    let mark = run.mark(at).await?;
    if mark.is_some() {
        run.taken(run.cache.mark_board(at, run.number, mark, None).await?)?;
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_board_is_lost_only_if_most_of_many_points_are_gone() {
        let of = |members: usize, score: f64| vec![score; members];
        for (saved, live, if_evicted, otherwise) in [
            (of(9, 5.0), vec![], false, true),
            (of(9, 5.0), of(1, 5.0), false, true),
            (of(10, 5.0), vec![], false, false),
            (of(10, 5.0), of(5, 5.0), true, true),
            (of(10, 5.0), of(4, 5.0), false, true),
            (of(10, -1.0), of(10, -1.0), true, true),
            (vec![], vec![], true, true),
        ] {
            let found = [true, false].map(|evicts| are_of_board(&saved, &live, evicts));
            assert_eq!(found, [if_evicted, otherwise], "{saved:?} {live:?}");
        }
    }
}
