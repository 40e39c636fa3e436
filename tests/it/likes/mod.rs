//! Tests the client functions that API servers use. A click is counted once, is visible immediately, and is undone if
//! it can't be published.

#![expect(clippy::unwrap_used, reason = "a test ends at its first failure")]

mod by_daemon;
mod card;
mod counted;
mod grouped;
mod guard;
mod republished;
mod servers;
mod status;
mod switch;
mod unpublished;
