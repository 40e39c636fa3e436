//! Archives a board again that Redis has as it was before it was frozen: a replica that was behind has taken over, or a server was started from an
//! old dump.
//!
//! Redis notes a freeze in the script that does it, beside the run that first claimed the board: the generation of the data. MySQL notes both
//! when the rows are verified. If Redis' freeze is older than MySQL's, Redis has gone back in time. Its live zset is then the board as it was, plus
//! what was added since, and nothing tells the two apart. So each member gets the larger of what Redis has and what MySQL has, in the archive and
//! in a snapshot: nothing counts twice. Lost is what Redis itself has lost and, if the period was archived with late writes, what changed since
//! Redis went back. Then the period is archived as if for the first time. The raised zset counts its pages, so that it is not frozen on another
//! server that takes over in between.
//!
//! After a flush the generation is newer, and a live zset of a period that MySQL has as frozen holds late writes only.

use tracing::warn;

use crate::jobs::board_run::backup::{Rows, RowsOf, complete};
use crate::jobs::board_run::{BoardRun, Step};
use crate::runtime::fault;
use tallyd_core::model::{BoardMember, BoardPeriod};
use tallyd_mysql::boards::PeriodRow;

/// Gives the live zset what MySQL has more, and notes that the archive is to be made once more. The zset can be frozen then; returns the number
/// of pages that it was raised by.
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
        "{board} {period}: Redis has it as it was before it was archived; {raised} members were raised to what MySQL has, and it is archived once more"
    );
    // Before it is frozen: from then on it would be taken for what was archived.
    run.store.note_frozen(run.number, at, generation, run.now).await?;
    fault::point("archive:noted-again");
    Ok(pages)
}

#[derive(Default)]
struct Raised {
    pages: u64,
    /// That it had less of.
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
