//! Boards as API servers write and read them, on a real Redis: scores that keep the order right among equals, places in
//! every ranking, friends.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test ends at the first surprise")]

mod command;
mod documents;
mod read;
mod score;

use crate::common;
