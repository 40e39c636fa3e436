//! Code that any daemon needs: signals, schedules, retries, logs, systemd. This code does not depend on likes.

pub mod clock;
pub mod cron;
pub mod liveness;
pub mod lock;
pub mod log;
pub mod process;
pub mod progress;
pub mod retry;
pub mod shutdown;
pub mod systemd;
pub mod ticker;
pub mod waits;

pub use tallyd_connect::fault;
