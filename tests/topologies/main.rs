//! Tests with their own servers, which have more than one node or use certificates: RabbitMQ, Redis and MySQL during
//! failovers.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test ends at its first failure")]

mod brokers;
mod cluster;
mod engines;
mod sentinel;
mod tls;

use tallyd_testkit as common;
