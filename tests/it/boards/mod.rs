//! Writes and reads boards on a real Redis, as API servers do. The tests check scores with tie-breakers, and places in
//! each type of ranking. They also check the ranking of a user's friends among themselves.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test ends at its first failure")]

mod command;
mod documents;
mod feed;
mod read;
mod score;

use crate::common;
