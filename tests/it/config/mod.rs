//! Tests what users see of the configuration: reports of mistakes, checks of the servers, and files for shells and
//! editors.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test ends at its first failure")]

mod checks;
mod schema;
mod shown;
