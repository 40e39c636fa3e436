//! What a run deletes from MySQL, piece by piece: archives whose time is over, and snapshots of boards that are archived.

use tracing::info;

use super::Archiver;
use super::candidates::Scope;
use super::report::{Outcome, PeriodReport, Report};
use super::steps::{Halt, Run, Step};
use crate::model::{BoardPeriod, Micros};
use crate::runtime::fault;

/// Archives of one board that one run deletes at most: the others are the next runs'.
const PRUNED_MAX: usize = 100;

impl Run<'_> {
    /// Deletes what is over. A dry run only says which archives are.
    pub(super) async fn clear(&self, scope: &Scope, report: &mut Report) -> Step<()> {
        let Archiver { store, boards, .. } = self.archiver;
        for board in boards.iter().filter(|board| scope.board.as_ref().is_none_or(|name| *name == board.name)) {
            // For ever: but what was begun is ended.
            let keep = board.archive_keep.0;
            let until = if keep.is_zero() { Micros(0) } else { self.now.before(keep) };
            let like = scope.period.as_deref().unwrap_or(board.period.like());
            for at in store.prunable_periods(&board.name, like, until, PRUNED_MAX).await? {
                if scope.dry_run {
                    report.periods.push(PeriodReport::new(&at, Outcome::WouldPrune));
                    continue;
                }
                self.prune(&at).await?;
                report.periods.push(PeriodReport::new(&at, Outcome::Pruned));
            }
        }
        if scope.dry_run {
            return Ok(());
        }
        for at in store.obsolete_snapshots().await? {
            self.claim(&at.board).await.map_err(Halt::Failed)?;
            self.forget_snapshot(&at).await?;
        }
        Ok(())
    }

    /// Deletes one archive. Noted first: what is left of it is none.
    async fn prune(&self, at: &BoardPeriod) -> Step<()> {
        self.archiver.store.note_pruned(self.number, at, self.now).await?;
        fault::point("archive:pruning");
        for copy in 0..2 {
            self.trim(at, copy, 0).await?;
        }
        let BoardPeriod { board, period } = at;
        info!(event = "board-pruned", board, period, "{board} {period}: its archive is deleted, archive_keep is over");
        Ok(())
    }

    /// Deletes one snapshot, of a board that was claimed. Noted first, too.
    pub(super) async fn forget_snapshot(&self, at: &BoardPeriod) -> Step<()> {
        let Archiver { store, cache, .. } = self.archiver;
        store.void_snapshot(self.number, at).await?;
        let mark = cache.board_marks(std::slice::from_ref(at)).await?.pop().flatten();
        if mark.is_some() {
            self.taken(cache.mark_board(at, self.number, mark, None).await?)?;
        }
        let mut after = None;
        while let Some(last) = store.forget_snapshot(self.number, at, after.as_deref()).await? {
            fault::point("archive:forgetting");
            self.check_stop()?;
            after = Some(last);
        }
        Ok(())
    }
}
