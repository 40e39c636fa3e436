//! Takes snapshots of boards that have not been archived yet, and restores a board from its snapshot or its archive.
//!
//! `clock` decides when a snapshot is due, and reports a board that Redis has lost. `health` decides which boards can
//! be saved. The archiver only checks whether MySQL has a backup of a board.

pub(crate) mod clock;
mod health;
mod restore;
mod save;

pub use super::board_run::periods::Scope;
pub use super::board_run::{JOB, Report};
pub use restore::{NotRestored, Restore};
pub use save::{SNAPSHOT_MODE, Snapshots};

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_fault_point_is_listed_once() {
        tallyd_connect::fault::assert_points(&FAULT_POINTS, &[include_str!("save.rs"), include_str!("restore.rs")]);
    }
}
