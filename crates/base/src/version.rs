//! The build's version. `build.rs` finds the revision.

pub const VERSION: &str = env!("CARGO_PKG_VERSION");

/// The commit, with the suffix `-dirty` if sources were modified; `unknown` in a build for tests.
pub const REVISION: &str = env!("TALLYD_BUILD_REVISION");

pub const RUSTC: &str = env!("TALLYD_BUILD_RUSTC");

pub const TARGET: &str = env!("TALLYD_BUILD_TARGET");

/// `0.1.0 (59807616e3a1)`, for `--version`.
pub const LONG: &str = concat!(env!("CARGO_PKG_VERSION"), " (", env!("TALLYD_BUILD_REVISION"), ")");
