//! The header of src/jobs/reconcile/mod.rs lists races. Each test forces one race at its exact point. A run of the real
//! program stops itself there, then the test acts as another program or user, and the run continues. A separate test
//! has a site with all these races at random times, and compares it with a model.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test ends at its first failure")]

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
