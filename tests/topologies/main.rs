//! Tests that start their own RabbitMQ, Redis and MySQL servers. The servers have several nodes and fail over, or use
//! certificates.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test ends at its first failure")]

mod brokers;
mod cluster;
mod engines;
mod sentinel;
mod tls;

use tallyd_testkit as common;
