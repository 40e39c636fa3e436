//! The commands `tallyd import`, and `compare`, `export` and `erase` of `tallyd admin`.

pub mod compare;
pub mod erase;
pub mod export;
pub mod import;
