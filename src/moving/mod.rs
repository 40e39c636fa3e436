//! Commands that import, compare, export or erase a site's data. An operator starts each of them, as a run with its own lock. No daemon runs
//! them.

pub mod compare;
pub mod erase;
pub mod export;
pub mod import;
