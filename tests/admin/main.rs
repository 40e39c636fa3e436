//! Those who look: the admin port and its page, the status, the alerts and the dashboard.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test ends at the first surprise")]

mod ops;
mod port;
mod status;

use tallyd_testkit as common;
