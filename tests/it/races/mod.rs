//! The races that the header of src/jobs/reconcile/mod.rs lists, each forced at the very place: a run of the real binary stops
//! itself there, the other side acts, the run goes on. And a site that does all of it at random, held to a model.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test ends at the first surprise")]

#[cfg(feature = "fault-points")]
mod failover;
#[cfg(feature = "fault-points")]
mod hand;
#[cfg(feature = "fault-points")]
mod late;
#[cfg(feature = "fault-points")]
mod lost;
mod model;
#[cfg(feature = "fault-points")]
mod once;
#[cfg(feature = "fault-points")]
mod pages;
mod proof;
#[cfg(feature = "fault-points")]
mod rivals;
#[cfg(feature = "fault-points")]
mod stage;
#[cfg(feature = "fault-points")]
mod touched;
