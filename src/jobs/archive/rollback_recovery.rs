//! Archives a board again after Redis went back to a state before the freeze: a replica that lagged took over, or a
//! server was started from an old dump.
//!
//! The script that freezes a zset also records the freeze in Redis. Redis also stores the number of the run that first
//! claimed the board, which is the generation of the data. When the rows are verified, MySQL stores both. If Redis'
//! freeze is older than MySQL's, Redis has gone back in time. The live zset then contains the former scores plus later
//! additions, which cannot be separated. So each member gets the highest of its scores in Redis, the archive and the
//! snapshot, and no score is added twice. The writes that Redis lost when it went back are not recovered. If the
//! archive contains late writes, the changes that writers made after Redis went back are lost, too. Then the period is
//! archived as the first time. Redis counts the pages whose scores the run has raised. If another Redis server takes
//! over before the freeze, its count differs, and its zset is not frozen.
//!
//! Redis can also go back to a state in which the board is frozen, but lacks archived late members. Redis counts the
//! late members, so this count is then lower than in MySQL. The run first moves the late members that Redis has into
//! the frozen zset, and then raises its scores in the same way. MySQL records before the first of these steps that late
//! members are missing, because Redis can count more of them afterwards than MySQL has recorded. The last page of the
//! raise counts as one more late member. If Redis then goes back once more, its count is lower again.
//!
//! After a flush, Redis has a newer generation than MySQL. A live zset of a period that MySQL has recorded as frozen
//! then holds only late writes.

use tracing::warn;

use crate::jobs::board_run::backup::{Rows, RowsOf, complete};
use crate::jobs::board_run::{BoardRun, Step};
use tallyd_base::runtime::fault;
use tallyd_core::archive::PeriodRow;
use tallyd_core::model::{BoardMember, BoardPeriod};
use tallyd_redis::snapshots::Raised;

/// Records that the period must be archived again. Returns the number of pages whose scores the run has raised.
pub(super) async fn raise_to_archive(
    run: &BoardRun<'_>,
    at: &BoardPeriod,
    generation: u64,
    row: PeriodRow,
) -> Step<u64> {
    let pages = raise(run, (at, Raised::Live), row, "a state before the archive").await?;
    // MySQL records this before the freeze. Otherwise the next run could treat the frozen zset as already archived.
    run.store.note_frozen(run.number, at, generation, run.now).await?;
    fault::point("archive:noted-again");
    Ok(pages)
}

/// `late_members` late members were moved into the frozen zset, and none are left.
pub(super) async fn raise_frozen(run: &BoardRun<'_>, at: &BoardPeriod, row: PeriodRow, late_members: u64) -> Step<()> {
    let to = (at, Raised::Frozen { late_members });
    let pages = raise(run, to, row, "a state before late members were archived").await?;
    // The server that counts this page has all pages before it.
    run.present(run.cache.raise_board(to, run.number, pages, &[]).await?).map(drop)
}

async fn raise(run: &BoardRun<'_>, to: (&BoardPeriod, Raised), row: PeriodRow, state: &str) -> Step<u64> {
    let at = to.0;
    let BoardPeriod { board, period } = at;
    let archived = row.tally.members;
    run.show(at, "raised", archived);
    let mut raised = RaisedCount::default();
    raised.raise_page(run, to, &[]).await?;
    let mut sources = vec![RowsOf::Archive { copy: row.copy.unwrap_or(0) }];
    // A snapshot is older than a frozen zset.
    if to.1 == Raised::Live && complete(run.store, at).await?.is_some() {
        sources.push(RowsOf::Snapshot);
    }
    for of in sources {
        let mut rows = Rows::new(run.store, at, of);
        while let Some(page) = rows.next().await? {
            raised.raise_page(run, to, &page).await?;
            run.show_done(rows.read);
        }
    }
    fault::point("archive:raised");
    let RaisedCount { pages, members: raised } = raised;
    warn!(
        event = "board-went-back",
        board,
        period,
        archived,
        raised,
        "{board} {period}: Redis went back to {state}: {raised} members were raised to the scores in MySQL, and the board is archived again"
    );
    Ok(pages)
}

#[derive(Default)]
struct RaisedCount {
    pages: u64,
    members: u64,
}

impl RaisedCount {
    async fn raise_page(
        &mut self,
        run: &BoardRun<'_>,
        to: (&BoardPeriod, Raised),
        members: &[BoardMember],
    ) -> Step<()> {
        run.check_stop()?;
        self.members += run.present(run.cache.raise_board(to, run.number, self.pages, members).await?)?;
        self.pages += 1;
        fault::point("archive:raised-page");
        Ok(())
    }
}
