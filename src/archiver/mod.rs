//! Closed boards saved.

pub mod period;
