//! Tests the daemon and its commands with the shared servers that dev/up starts.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test ends at its first failure")]

mod archive;
mod boards;
mod cache;
mod card;
mod cli;
mod compare;
mod config;
mod consumer;
mod counts;
mod daemons;
mod dead;
mod erase;
mod export;
mod filters;
mod fuzz;
mod gateway;
mod hostile;
mod import;
mod init;
mod layouts;
mod likes;
mod limits;
mod map;
mod metrics;
mod moving;
mod operate;
mod outbox;
mod races;
mod reconcile;
mod recount;
mod reload;
mod runs;
mod secrets;
mod sets;
mod silent;
mod upgrade;

use tallyd_testkit as common;
