//! The configuration as people meet it: what is said of mistakes, of the servers, and what is made for shells and editors.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test ends at the first surprise")]

mod checks;
mod schema;
mod shown;
