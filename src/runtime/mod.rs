//! Code that any daemon needs: signals, schedules, retries, logs, systemd. This code does not depend on likes.

pub mod clock;
pub(crate) mod cron;
pub(crate) mod liveness;
pub(crate) mod lock;
pub(crate) mod log;
pub(crate) mod process;
pub mod progress;
pub(crate) mod retry;
pub(crate) mod shutdown;
pub(crate) mod systemd;
pub(crate) mod ticker;
pub(crate) mod waits;

pub use tallyd_connect::fault;
