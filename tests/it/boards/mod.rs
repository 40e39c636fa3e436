//! Writes and reads boards on a real Redis, as API servers do. The tests check scores with tie-breakers, places in each
//! type of ranking, and pages of friends.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test ends at its first failure")]

mod command;
mod documents;
mod read;
mod score;

use crate::common;
