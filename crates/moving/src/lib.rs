//! Commands that import, compare, export or erase a site's data. An operator starts these commands. Each command takes
//! its own lock. A daemon never runs these commands.

pub mod check;
pub mod command;
pub mod compare;
pub mod config;
pub mod erase;
pub mod export;
pub mod import;
mod site_keys;
mod sql;
