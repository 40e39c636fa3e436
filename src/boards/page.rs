//! A page of a period, from the server that has it.

use anyhow::Result;

use super::{NotShown, Source};
use tallyd_core::model::{BoardMember, BoardPeriod};
use tallyd_mysql::Store;
use tallyd_mysql::boards::{PeriodRow, PeriodState};
use tallyd_redis::Cache;
use tallyd_redis::boards::{Part, Zset};
use tallyd_redis::ranks::{Before, Placed, Ranking, place};

/// A page of a period, and the server that it was read from.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Read {
    pub from: Source,
    /// Of the whole board.
    pub members: u64,
    pub placed: Vec<Placed>,
}

/// Reads `count` members after the first `after`. The archived rows are complete from "done" on; before that the zset is.
pub(crate) async fn read(
    store: &Store,
    cache: &Cache,
    at: &BoardPeriod,
    after: u64,
    count: u64,
    ranking: Ranking,
) -> Result<Read> {
    let zset = match store.board_period(at).await? {
        Some(row) if row.state == PeriodState::Pruned => {
            return Err(NotShown::Pruned(at.clone()).into());
        }
        // Also while late writes are copied beside it.
        Some(PeriodRow { copy: Some(copy), tally, .. }) => {
            let rows = store.archived_page(at, copy, after, usize::try_from(count).unwrap_or(usize::MAX)).await?;
            let page: Vec<BoardMember> = rows.into_iter().map(|(_, member)| member).collect();
            let mut before = Before { members: after, ..Before::default() };
            if let (Some(first), 1.., Ranking::Competition | Ranking::Dense) = (page.first(), after, ranking) {
                (before.higher, before.distinct) = store.archived_before(at, copy, after, first.score).await?;
            }
            return Ok(Read { from: Source::MySql, members: tally.members, placed: place(ranking, before, page) });
        }
        row => {
            let keys = cache.find_boards(std::slice::from_ref(at)).await?.pop().unwrap_or_default();
            // MySQL may not know yet of a zset that was frozen a moment ago.
            let zset = if row.is_some() || (keys.frozen && !keys.live) { Zset::Frozen } else { Zset::Live };
            if row.is_some() && !keys.frozen {
                return Err(NotShown::Lost(at.clone()).into());
            }
            zset
        }
    };
    let (members, placed) = cache.read_board(at, zset, Part::Page { after, count }, ranking).await?;
    Ok(Read { from: Source::Redis, members, placed })
}
