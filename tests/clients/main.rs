//! The example clients in Python and Node. With real servers and the real daemon, the example clients must behave as
//! docs/scripts.md says. For every vector they must compute the same results as tallyd.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test ends at its first failure")]

mod example;
mod failing;
mod living;
mod packages;
mod quickstart;
mod stalling;
mod vectors;

use tallyd_testkit as common;
