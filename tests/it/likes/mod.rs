//! The API servers' side: a click counts once, is taken back where it can't be published, and is known at once.

#![expect(clippy::unwrap_used, reason = "a test ends at the first surprise")]

mod by_daemon;
mod counted;
mod guard;
mod republished;
mod servers;
mod status;
mod switch;
mod unpublished;
