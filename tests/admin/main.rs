//! Tests of the admin port and its page, the status commands, the alerts and the dashboard.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test ends at its first failure")]

mod ops;
mod port;
mod status;

use tallyd_testkit as common;
