//! The first day of a site: `tallyd init` writes a configuration, and `tallyd config check` checks it and its servers.

#![warn(unreachable_pub)]

pub mod check;
pub mod init;
