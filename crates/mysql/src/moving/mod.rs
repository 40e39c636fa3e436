//! What brings a running site over: reading its own tables, and writing what they hold.

pub mod exports;
pub mod imports;
pub mod source;
pub mod sums;
