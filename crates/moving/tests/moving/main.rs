//! Tests imports, exports, comparisons and erases with the shared servers that dev/up starts.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test ends at its first failure")]

mod compare;
mod erase;
mod export;
mod import;

use tallyd_testkit as common;
