//! Tests how tallyd reports mistakes in the configuration, checks the servers, and writes files for shells and editors.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test ends at its first failure")]

mod schema;
mod shown;
