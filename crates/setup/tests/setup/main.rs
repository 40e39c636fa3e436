//! Tests `tallyd init` and `tallyd config check` with the shared servers that dev/up starts.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test ends at its first failure")]

mod checks;
mod init;

use tallyd_testkit as common;
