//! Tests the daemon and its commands with the shared servers that dev/up starts.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test ends at its first failure")]

mod archive;
mod boards;
mod cache;
mod card;
mod cli;
mod config;
mod consumer;
mod counts;
mod daemons;
mod dead;
mod fuzz;
mod hostile;
mod layouts;
mod likes;
mod limits;
mod map;
mod metrics;
mod operate;
mod outbox;
mod races;
mod reconcile;
mod reload;
mod runs;
mod secrets;
mod sets;
mod silent;
mod upgrade;
mod whole_move;

use tallyd_testkit as common;
