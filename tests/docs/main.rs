//! Checks of the repository itself: documents, samples and dependencies.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test ends at its first failure")]

mod dependencies;
mod repo;
