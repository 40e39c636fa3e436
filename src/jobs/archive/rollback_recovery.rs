//! Archives a board again if Redis has it in its state before the freeze: a replica that lagged has taken over, or a
//! server was started from an old dump.
//!
//! Redis records a freeze in the script that does it, beside the run that first claimed the board: the generation of
//! the data. MySQL records both when the rows are verified. If Redis' freeze is older than MySQL's, Redis has gone back
//! in time. Its live zset is then the former board plus later additions, and the two cannot be distinguished. So each
//! member gets the maximum of its scores in Redis and in MySQL, in the archive and in a snapshot: nothing counts twice.
//! The losses are: what Redis itself has lost and, if the period was archived with late writes, what changed since
//! Redis went back. Then the period is archived as if for the first time. The raised zset counts its pages, so that it
//! is not frozen on another server that takes over meanwhile.
//!
//! After a flush the generation is newer, and a live zset of a period that MySQL has as frozen holds only late writes.

use tracing::warn;

use crate::jobs::board_run::backup::{Rows, RowsOf, complete};
use crate::jobs::board_run::{BoardRun, Step};
use crate::runtime::fault;
use tallyd_core::model::{BoardMember, BoardPeriod};
use tallyd_mysql::boards::PeriodRow;

/// Raises the live zset to MySQL's scores, and records that the archive must be made again. Then the zset can be
/// frozen. Returns the number of pages that it was raised by.
pub(super) async fn raise_to_archive(
    run: &BoardRun<'_>,
    at: &BoardPeriod,
    generation: u64,
    row: PeriodRow,
) -> Step<u64> {
    let BoardPeriod { board, period } = at;
    let archived = row.tally.members;
    run.show(at, "raised", archived);
    let mut raised = Raised::default();
    raised.raise_page(run, at, &[]).await?;
    let mut sources = vec![RowsOf::Archive { copy: row.copy.unwrap_or(0) }];
    if complete(run.store, at).await?.is_some() {
        sources.push(RowsOf::Snapshot);
    }
    for of in sources {
        let mut rows = Rows::new(run.store, at, of);
        while let Some(page) = rows.next().await? {
            raised.raise_page(run, at, &page).await?;
            run.show_done(rows.read);
        }
    }
    fault::point("archive:raised");
    let Raised { pages, members: raised } = raised;
    warn!(
        event = "board-went-back",
        board,
        period,
        archived,
        raised,
        "{board} {period}: Redis went back to a state before the archive: {raised} members were raised to the scores in MySQL, and the board is archived again"
    );
    // Recorded before the freeze. After the freeze the zset would be treated as already archived.
    run.store.note_frozen(run.number, at, generation, run.now).await?;
    fault::point("archive:noted-again");
    Ok(pages)
}

#[derive(Default)]
struct Raised {
    pages: u64,
    /// Members whose score was lower in Redis.
    members: u64,
}

impl Raised {
    async fn raise_page(&mut self, run: &BoardRun<'_>, at: &BoardPeriod, members: &[BoardMember]) -> Step<()> {
        run.check_stop()?;
        self.members += run.present(run.cache.raise_board(at, run.number, Some(self.pages), members).await?)?;
        self.pages += 1;
        fault::point("archive:raised-page");
        Ok(())
    }
}
