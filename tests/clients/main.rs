//! The example clients in Python and Node. They do what docs/clients-that-count.md says, with real servers and
//! the real daemon, and agree with tallyd on every vector.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test ends at its first failure")]

mod example;
mod failing;
mod living;
mod packages;
mod quickstart;
mod stalling;
mod vectors;

use tallyd_testkit as common;
