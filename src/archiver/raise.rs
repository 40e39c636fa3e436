//! A board that Redis has as it was before it was frozen: a replica has taken over that was behind, or a server was started from an old dump.
//!
//! Redis notes beside a board which periods were frozen; MySQL notes it after that. So where MySQL knows of a freeze and Redis does not, but keeps
//! such notes, Redis has gone back in time, and a live zset is the board of then, with what was added since it went back: nobody can tell
//! the one from the other. What was archived has all of the former. Each member gets the larger of both numbers: nothing counts
//! twice, and only such is lost as Redis has lost itself. Then the period is archived like one that never was.
//!
//! Notes that are gone were gone with the boards (a flush), or were not kept by the last run, of an earlier version: the next one begins them with all
//! that MySQL knows, and a live zset of those is what came late.

use anyhow::Result;
use tracing::warn;

use super::Archiver;
use super::settle::{Run, Step};
use super::snapshot::PAGE_MEMBERS;
use crate::cache::boards::Changed;
use crate::model::{BoardMember, BoardPeriod};
use crate::runtime::fault;
use crate::store::StoreError;
use crate::store::boards::{PeriodRow, PeriodState};

impl Run<'_> {
    /// Lets this run, and no other one from now on, change the board's closed periods.
    pub(super) async fn claim(&self, board: &str) -> Result<()> {
        let Archiver { store, cache, .. } = self.archiver;
        if !cache.claim_board(board, self.number).await? {
            let frozen = store.frozen_periods(board).await?;
            if cache.note_freezes(board, self.number, &frozen).await? == Changed::Refused {
                return Err(StoreError::TakenOver("the board".to_owned()).into());
            }
        }
        Ok(())
    }

    /// Gives the live zset what the archive has more, and notes that the archive is to be made once more: as often as one likes.
    pub(super) async fn raise_to_archive(&self, at: &BoardPeriod, row: PeriodRow) -> Step<PeriodRow> {
        let Archiver { store, cache, .. } = self.archiver;
        let BoardPeriod { board, period } = at;
        let archived = row.tally.members;
        self.show(at, "raised", archived);
        let (mut after, mut raised) = (0, 0);
        loop {
            self.check_stop()?;
            let page = store.archived_page(at, after, PAGE_MEMBERS).await?;
            let Some((last, _)) = page.last() else { break };
            after = *last;
            let members: Vec<BoardMember> = page.into_iter().map(|(_, member)| member).collect();
            raised += self.present(cache.raise_board(at, self.number, &members).await?)?;
            fault::point("archive:raised-page");
            self.show_done(after);
        }
        fault::point("archive:raised");
        warn!(
            event = "board-went-back",
            board,
            period,
            archived,
            raised,
            "{board} {period}: Redis has it as it was before it was archived; {raised} members were raised to what the archive has, and it is archived once more"
        );
        // Before it is frozen: from then on it would be taken for what was archived.
        store.note_frozen(self.number, at, self.now).await?;
        fault::point("archive:noted-again");
        Ok(PeriodRow { state: PeriodState::Frozen, ..row })
    }
}
