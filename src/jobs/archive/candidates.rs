//! Lists the periods that a run checks, for each board: closed periods in Redis, and unfinished periods in MySQL.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::Result;

use crate::jobs::board_run::periods::{Candidate, Open, Scope, instant};
use crate::jobs::board_run::{BoardRun, Outcome, PeriodReport};
use tallyd_base::config::Board;
use tallyd_core::archive::BoardKeys;
use tallyd_core::model::{BoardPeriod, Micros};
use tallyd_redis::Cache;

#[derive(Default)]
pub(super) struct Candidates {
    /// Newest first. Boards without periods are here, too: a run claims a board before it freezes the first period.
    pub boards: BTreeMap<String, Vec<Candidate>>,
    pub open: Vec<PeriodReport>,
}

impl Candidates {
    pub(super) async fn find(run: &BoardRun<'_>, boards: &[Board], scope: &Scope) -> Result<Self> {
        let (mut found, mut seen, mut open) = (Self::default(), BTreeSet::new(), Vec::new());
        let mut add = |found: &mut Self, candidate: Candidate| {
            if seen.insert(candidate.at.clone()) {
                found.boards.entry(candidate.at.board.clone()).or_default().push(candidate);
            }
        };
        // One block after the other, because there can be thousands of blocks, and most of their periods do not exist.
        for block in scope.blocks(boards)? {
            let closed = with_keys(run.cache, scope.closed_of(block, run.now)?, |candidate| &candidate.at).await?;
            let closed = closed.into_iter().filter(|(_, keys)| keys.live || keys.frozen || scope.period.is_some());
            closed.for_each(|(candidate, _)| add(&mut found, candidate));
            open.extend(scope.open_of(block, run.now)?);
        }
        for candidate in unfinished(run, boards, scope, &open).await? {
            add(&mut found, candidate);
        }
        for board in boards.iter().filter(|board| scope.has_board(&board.name)) {
            found.boards.entry(board.name.clone()).or_default();
        }
        if scope.dry_run {
            let open = with_keys(run.cache, open, |open| &open.candidate.at).await?;
            found.open = open.iter().filter(|(_, keys)| keys.live).map(|(open, _)| report_open(open)).collect();
        }
        Ok(found)
    }
}

/// If Redis has lost a board, only these rows show that the board existed.
async fn unfinished(run: &BoardRun<'_>, boards: &[Board], scope: &Scope, open: &[Open]) -> Result<Vec<Candidate>> {
    let unfinished = run.store.unfinished_periods().await?;
    let saved = run.store.snapshots().await?.into_iter().map(|(at, _)| at);
    let open: BTreeSet<&BoardPeriod> = open.iter().map(|open| &open.candidate.at).collect();
    let saved = saved.filter(|at| !open.contains(at));
    Ok(unfinished.into_iter().chain(saved).filter_map(|at| scope.known(boards, at)).collect())
}

async fn with_keys<T>(cache: &Cache, found: Vec<T>, at: impl Fn(&T) -> &BoardPeriod) -> Result<Vec<(T, BoardKeys)>> {
    let periods: Vec<BoardPeriod> = found.iter().map(|found| at(found).clone()).collect();
    let keys = cache.find_boards(&periods).await?;
    Ok(found.into_iter().zip(keys).collect())
}

fn report_open(Open { candidate, closes }: &Open) -> PeriodReport {
    let until = if *closes >= Micros::MAX { "never closes".to_owned() } else { format!("until {}", instant(*closes)) };
    PeriodReport::new(&candidate.at, Outcome::Open).because(until)
}
