//! The jobs of the daemon's own tasks, and the table of all jobs. The jobs never call each other.

pub mod archive;
mod board_run;
pub mod reconcile;
pub mod snapshots;
mod table;

pub use table::{Requests, table};
