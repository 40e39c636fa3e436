//! What the tasks, jobs and commands of tallyd stand on, whichever crate they are in: the configuration, telemetry and
//! health, logs and signals, the connections, and the shape of a run.

#![warn(unreachable_pub)]

pub mod boards;
pub mod cli;
pub mod config;
pub mod health;
pub mod http;
pub mod jobs;
pub mod partitions;
pub mod runtime;
pub mod servers;
pub mod telemetry;
pub mod version;
