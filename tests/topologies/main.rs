//! Servers of the tests' own, of more than one node or with certificates: RabbitMQ, Redis and MySQL through failovers.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test ends at the first surprise")]

mod brokers;
mod cluster;
mod engines;
mod sentinel;
mod tls;

use tallyd_testkit as common;
