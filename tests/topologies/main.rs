//! Tests that start their own RabbitMQ, Redis and MySQL servers. Some tests use a failover between several nodes, and
//! other tests use certificates.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test ends at its first failure")]

mod brokers;
mod cluster;
mod engines;
mod sentinel;
mod tls;

use tallyd_testkit as common;
