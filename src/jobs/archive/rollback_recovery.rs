//! A board that Redis has as it was before it was frozen: a replica has taken over that was behind, or a server was started from an old dump.
//!
//! Redis notes a freeze in the script that does it, beside the run that first claimed the board: the generation of the data. MySQL notes both
//! when the rows are verified. A Redis whose freeze is older than MySQL's has gone back in time, and a live zset is the board of then, with what
//! was added since. Nobody can tell the one from the other, so each member gets the larger of what Redis has and what MySQL has, in the archive
//! and in a snapshot: nothing counts twice. Lost is what Redis has lost itself and, of a period that was archived with late writes, what was
//! changed since Redis went back. Then the period is archived like one that never was. The raised zset counts its pages, so that another server that
//! takes over in between is not frozen.
//!
//! After a flush the generation is a newer one, and a live zset of a period that MySQL has as frozen is what came late.

use anyhow::Result;
use tracing::warn;

use super::Archiver;
use super::snapshot::PAGE_MEMBERS;
use super::steps::{Run, Step};
use crate::model::{BoardMember, BoardPeriod, Freeze};
use crate::runtime::fault;
use crate::store::boards::PeriodRow;
use crate::store::{Store, StoreError};

impl Run<'_> {
    /// Lets this run, and no other one from now on, change the board's closed periods; gives the generation of its data.
    pub(super) async fn claim(&self, board: &str) -> Result<u64> {
        let Archiver { store, cache, .. } = self.archiver;
        let frozen = store.frozen_periods(board).await?;
        Ok(cache.claim_board(board, self.number, &frozen).await?)
    }

    /// Gives the live zset what MySQL has more, notes that the archive is to be made once more, and freezes it.
    pub(super) async fn raise_to_archive(&self, at: &BoardPeriod, generation: u64, row: PeriodRow) -> Step<Freeze> {
        let Archiver { store, .. } = self.archiver;
        let BoardPeriod { board, period } = at;
        let archived = row.tally.members;
        self.show(at, "raised", archived);
        let mut raised = Raised::default();
        self.raise_page(at, &mut raised, &[]).await?;
        let mut sources = vec![self.rows(at, Some(row.copy.unwrap_or(0)))];
        if store.snapshot(at).await?.is_some_and(|snapshot| snapshot.taken_at.is_some()) {
            sources.push(self.rows(at, None));
        }
        for mut rows in sources {
            while let Some(page) = rows.next().await? {
                self.raise_page(at, &mut raised, &page).await?;
                self.show_done(rows.read);
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
        store.note_frozen(self.number, at, generation, self.now).await?;
        fault::point("archive:noted-again");
        self.freeze(at, Freeze { generation, ..row.frozen }, Some(pages)).await
    }

    /// All that MySQL has of a period, in that copy of its archive or else in its snapshot.
    pub(super) fn rows<'a>(&'a self, at: &'a BoardPeriod, copy: Option<u8>) -> Rows<'a> {
        Rows { store: &self.archiver.store, at, copy, read: 0, last: None }
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

/// What MySQL has of a period, page by page.
pub(super) struct Rows<'a> {
    store: &'a Store,
    at: &'a BoardPeriod,
    copy: Option<u8>,
    /// How many were read.
    pub(super) read: u64,
    last: Option<Vec<u8>>,
}

impl Rows<'_> {
    pub(super) async fn next(&mut self) -> Result<Option<Vec<BoardMember>>, StoreError> {
        let page: Vec<BoardMember> = match self.copy {
            Some(copy) => {
                let rows = self.store.archived_page(self.at, copy, self.read, PAGE_MEMBERS).await?;
                rows.into_iter().map(|(_, member)| member).collect()
            }
            None => self.store.saved_page(self.at, self.last.as_deref(), PAGE_MEMBERS).await?,
        };
        self.read += page.len() as u64;
        self.last = page.last().map(|last| last.member.clone());
        Ok(Some(page).filter(|page| !page.is_empty()))
    }
}

/// What a zset was given.
#[derive(Default)]
struct Raised {
    pages: u64,
    /// That it had less of.
    members: u64,
}
