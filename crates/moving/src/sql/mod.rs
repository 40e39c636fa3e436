//! The statements of imports, exports and erases.

pub mod erase;
pub mod exports;
pub mod imports;
pub mod source;
pub mod sums;
