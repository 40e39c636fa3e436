//! Commands that bring the data of a site in, compare it, or take it out. None of them runs in a daemon.

pub mod erase;
