//! The jobs of the daemon: what runs on a schedule, one run at a time over all daemons.
//!
//! [`runner`] holds the lock and decides what is due; [`fence`] waits for the events in flight. The jobs never call each other.

pub mod archive;
mod board_run;
pub mod fence;
pub mod filters;
pub mod reconcile;
pub mod recount;
pub mod runner;
pub mod snapshots;
