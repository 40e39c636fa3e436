//! What a run deletes from MySQL, piece by piece: archives whose time is over, and snapshots of boards that are archived.

use tracing::info;

use super::Archiver;
use super::period::Period;
use super::report::{Outcome, PeriodReport, Report};
use super::scope::Scope;
use super::settle::{Run, Step};
use crate::model::BoardPeriod;
use crate::runtime::fault;

/// Archives of one board that one run deletes at most: the others are the next runs'.
const PRUNED_MAX: usize = 100;

impl Run<'_> {
    /// Deletes what is over. A dry run only says which archives are.
    pub(super) async fn clear(&self, scope: &Scope, report: &mut Report) -> Step<()> {
        let Archiver { store, cache, boards, .. } = self.archiver;
        let keeping = boards.iter().filter(|board| !board.archive_keep.0.is_zero());
        for board in keeping.filter(|board| scope.board.as_ref().is_none_or(|name| *name == board.name)) {
            let until = self.now.before(board.archive_keep.0);
            let over = store.prunable_periods(&board.name, until, PRUNED_MAX).await?;
            let of_board = |at: &BoardPeriod| at.period.parse().is_ok_and(|it: Period| it.kind() == board.period);
            for at in over.into_iter().filter(of_board) {
                if scope.period.as_ref().is_some_and(|period| *period != at.period) {
                    continue;
                }
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
            // The mark first: without it the rows are nothing.
            cache.unmark_board(&at).await?;
            while store.forget_snapshot(self.number, &at).await? > 0 {
                fault::point("archive:forgetting");
                self.check_stop()?;
            }
        }
        Ok(())
    }

    /// Deletes one archive. Noted first: what is left of it is none.
    async fn prune(&self, at: &BoardPeriod) -> Step<()> {
        let store = &self.archiver.store;
        store.note_pruned(self.number, at, self.now).await?;
        loop {
            fault::point("archive:pruning");
            self.check_stop()?;
            if store.trim_places(self.number, at, 0).await? == 0 {
                break;
            }
        }
        let BoardPeriod { board, period } = at;
        info!(event = "board-pruned", board, period, "{board} {period}: its archive is deleted, archive_keep is over");
        Ok(())
    }
}
