//! Moves a running site to tallyd: reads the site's tables, and writes their contents to tallyd's tables.

pub mod exports;
pub mod imports;
pub mod source;
pub mod sums;
