//! Models of what surrounds tallyd's pure decisions. The decisions are the functions that the daemon calls.

#![allow(clippy::unwrap_used, reason = "a test ends at its first failure")]

mod fence;
mod outbox;
mod prefetch;
mod queue;
mod session;
