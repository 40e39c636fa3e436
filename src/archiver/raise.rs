//! A board that Redis has as it was before it was frozen: a replica has taken over that was behind, or a server was started from an old dump.
//!
//! Redis notes beside a board which periods were frozen, and put back; MySQL notes it after that. So where MySQL knows of a freeze and Redis does not, but
//! keeps such notes, Redis has gone back in time, and a live zset is the board of then, with what was added since it went back: nobody can tell
//! the one from the other. Each member gets the larger of what Redis has and what MySQL has, in the archive and in a snapshot: nothing counts
//! twice, and no more is lost than Redis has lost itself and, of a period that was archived with late writes or taken away from, what was changed since Redis went
//! back. Then the period is archived like one that never was. Where the server that is raised is not the one that is frozen, because yet another one has taken
//! over, a number of pages beside the zset tells.
//!
//! Notes that are gone were gone with the boards (a flush), or were not kept by the last run, of an earlier version: the next run begins them with all
//! that MySQL knows, and a live zset of those is what came late. Where notes lack a period that has no live zset, they get it: what is
//! written from then on came late, too.

use anyhow::Result;
use tracing::warn;

use super::Archiver;
use super::settle::{Run, Step};
use super::snapshot::PAGE_MEMBERS;
use crate::cache::boards::{Beside, Changed};
use crate::model::{BoardMember, BoardPeriod};
use crate::runtime::fault;
use crate::store::StoreError;
use crate::store::boards::{PeriodRow, PeriodState};

impl Run<'_> {
    /// Lets this run, and no other one from now on, change the board's closed periods, and completes what Redis has noted of their freezes.
    pub(super) async fn claim(&self, board: &str) -> Result<()> {
        let Archiver { store, cache, .. } = self.archiver;
        let are_noted = cache.claim_board(board, self.number).await?;
        let mut frozen = store.frozen_periods(board).await?;
        if are_noted {
            frozen = cache.noted_otherwise(board, frozen).await?;
        }
        if are_noted && frozen.is_empty() {
            return Ok(());
        }
        match cache.note_freezes(board, self.number, are_noted, &frozen).await? {
            Changed::Refused => Err(StoreError::TakenOver("the board".to_owned()).into()),
            _ => Ok(()),
        }
    }

    /// Gives the live zset what MySQL has more, notes that the archive is to be made once more, and freezes it.
    pub(super) async fn raise_to_archive(&self, at: &BoardPeriod, row: PeriodRow) -> Step<PeriodRow> {
        let Archiver { store, .. } = self.archiver;
        let BoardPeriod { board, period } = at;
        let archived = row.tally.members;
        self.show(at, "raised", archived);
        let mut raised = Raised::default();
        self.raise_page(at, &mut raised, &[]).await?;
        let mut after = 0;
        loop {
            let page = store.archived_page(at, after, PAGE_MEMBERS).await?;
            let Some((last, _)) = page.last() else { break };
            after = *last;
            let members: Vec<BoardMember> = page.into_iter().map(|(_, member)| member).collect();
            self.raise_page(at, &mut raised, &members).await?;
            self.show_done(after);
        }
        if store.snapshot(at).await?.is_some_and(|snapshot| snapshot.taken_at.is_some()) {
            let mut after: Option<Vec<u8>> = None;
            loop {
                let page = store.saved_page(at, after.as_deref(), PAGE_MEMBERS).await?;
                let Some(last) = page.last() else { break };
                after = Some(last.member.clone());
                self.raise_page(at, &mut raised, &page).await?;
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
        store.note_frozen(self.number, at, self.now).await?;
        fault::point("archive:noted-again");
        self.freeze(at, Beside::Pages(pages)).await?;
        Ok(PeriodRow { state: PeriodState::Frozen, ..row })
    }

    async fn raise_page(&self, at: &BoardPeriod, raised: &mut Raised, members: &[BoardMember]) -> Step<()> {
        self.check_stop()?;
        let cache = &self.archiver.cache;
        raised.members += self.present(cache.raise_board(at, self.number, Some(raised.pages), members).await?)?;
        raised.pages += 1;
        fault::point("archive:raised-page");
        Ok(())
    }
}

/// What a zset was given.
#[derive(Default)]
struct Raised {
    pages: u64,
    /// That it had less of.
    members: u64,
}
