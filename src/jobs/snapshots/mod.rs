//! Takes snapshots of boards that have not been archived yet, and restores a board from its snapshot or its archive.
//!
//! `clock` decides when a snapshot is due, and reports a board that Redis has lost. `health` decides which boards can
//! be saved. `save` takes a snapshot. `restore` restores a board from a snapshot or an archive. The archiver does not
//! use this module. The archiver only checks whether MySQL has a backup of a board.

pub(crate) mod clock;
mod health;
mod restore;
mod save;

use anyhow::Result;
use tokio_util::sync::CancellationToken;

pub use super::board_run::periods::Scope;
pub use super::board_run::{JOB, Report};
pub use restore::{NotRestored, RESTORE_MODE, Restore};
pub use save::SNAPSHOT_MODE;

use super::board_run::BoardRun;
use super::board_run::clock::{Start, start};
use super::board_run::periods::candidate_named;
use crate::config::{Board, Config};
use crate::runtime::progress::ProgressSink;
use restore::Restorer;
use save::Saver;
use tallyd_core::model::Micros;
use tallyd_mysql::Store;
use tallyd_redis::Cache;

/// Points at which a test can end the process: one between any two steps of a snapshot or a restore.
pub const FAULT_POINTS: [&str; 11] = [
    "snapshot:marked",
    "snapshot:noted",
    "snapshot:saved-page",
    "snapshot:saved",
    "snapshot:looked",
    "restore:filled-page",
    "restore:filled",
    "restore:noted",
    "restore:merged-page",
    "restore:raised-page",
    "restore:put",
];

#[derive(Clone)]
pub struct Snapshots {
    store: Store,
    cache: Cache,
    boards: Vec<Board>,
    page_members: usize,
}

impl Snapshots {
    pub fn new(config: &Config, store: Store, cache: Cache) -> Self {
        Self { store, cache, boards: config.boards.clone(), page_members: config.archive.page_members }
    }

    /// Takes snapshots now. If the clocks differ, it does nothing and reports the difference.
    pub async fn save_now(
        &self,
        run: u64,
        scope: Option<&Scope>,
        force: bool,
        to: ProgressSink,
        stop: &CancellationToken,
    ) -> Result<Report> {
        match start(&self.store, &self.cache).await? {
            Start::At(now) => self.save(run, scope, force, now, to, stop).await,
            Start::ClocksDiffer(report) => Ok(report),
        }
    }

    /// Takes snapshots of all due boards, or of the boards in `scope`, even if they are not due. `run` is the run that
    /// holds the job's lock. If `force` is set, it takes a snapshot even if Redis has lost the board, or most of the
    /// board.
    pub async fn save(
        &self,
        run: u64,
        scope: Option<&Scope>,
        force: bool,
        now: Micros,
        to: ProgressSink,
        stop: &CancellationToken,
    ) -> Result<Report> {
        self.store.check_archive_run(run).await?;
        let run = BoardRun::new(&self.store, &self.cache, run, now, stop);
        let saver = Saver { run: &run, force };
        run.followed(to, saver.save_boards(&self.boards, scope)).await?
    }

    pub async fn restore(
        &self,
        run: u64,
        (name, period): (&str, &str),
        how: Restore,
        now: Micros,
        to: ProgressSink,
        stop: &CancellationToken,
    ) -> Result<Report> {
        let candidate = candidate_named(&self.boards, name, period)?;
        self.store.check_archive_run(run).await?;
        let run = BoardRun::new(&self.store, &self.cache, run, now, stop);
        let restorer = Restorer { run: &run, page_members: self.page_members, how };
        restorer.restore_board(&candidate, to).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_fault_point_is_listed_once() {
        crate::jobs::assert_fault_points(&FAULT_POINTS, &[include_str!("save.rs"), include_str!("restore.rs")]);
    }
}
