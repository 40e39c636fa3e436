//! The clients under examples/, in Python and Node: they do what docs/clients-counting-at-once.md says, against the real servers and the real daemon, and
//! agree with tallyd on every vector.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test ends at the first surprise")]

mod example;
mod failing;
mod living;
mod packages;
mod quickstart;
mod stalling;
mod vectors;

use tallyd_testkit as common;
