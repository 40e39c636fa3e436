//! What a run deletes from MySQL, piece by piece: archives whose time is over, and snapshots of boards that are archived.

use tracing::info;

use super::copy::Copier;
use crate::config::Board;
use crate::jobs::board_run::periods::Scope;
use crate::jobs::board_run::{BoardRun, Halt, Outcome, PeriodReport, Report, Step, backup};
use crate::runtime::fault;
use tallyd_core::model::{BoardPeriod, Micros};

/// Archives of one board that one run deletes at most; the next runs delete the others.
const PRUNED_MAX: usize = 100;

/// Deletes what is over. A dry run only says which archives are.
pub(super) async fn prune(
    run: &BoardRun<'_>,
    copier: &Copier<'_>,
    boards: &[Board],
    scope: &Scope,
    report: &mut Report,
) -> Step<()> {
    for board in boards.iter().filter(|board| scope.has_board(&board.name)) {
        let keep = board.archive_keep.0;
        // Zero keeps archives forever, but deletes the rest of one that a run has begun to delete.
        let until = if keep.is_zero() { Micros(0) } else { run.now.before(keep) };
        let like = scope.period.as_deref().unwrap_or(board.period.like());
        for at in run.store.prunable_periods(&board.name, like, until, PRUNED_MAX).await? {
            if scope.dry_run {
                report.periods.push(PeriodReport::new(&at, Outcome::WouldPrune));
                continue;
            }
            prune_archive(run, copier, &at).await?;
            report.periods.push(PeriodReport::new(&at, Outcome::Pruned));
        }
    }
    if scope.dry_run {
        return Ok(());
    }
    for at in run.store.obsolete_snapshots().await? {
        run.claim(&at.board).await.map_err(Halt::Failed)?;
        backup::forget(run, &at).await?;
    }
    Ok(())
}

/// Deletes one archive. It is noted first that the rest is no archive.
async fn prune_archive(run: &BoardRun<'_>, copier: &Copier<'_>, at: &BoardPeriod) -> Step<()> {
    run.store.note_pruned(run.number, at, run.now).await?;
    fault::point("archive:pruning");
    for copy in 0..2 {
        copier.trim(at, copy, 0).await?;
    }
    let BoardPeriod { board, period } = at;
    info!(event = "board-pruned", board, period, "{board} {period}: its archive is deleted, archive_keep is over");
    Ok(())
}
