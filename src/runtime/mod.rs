//! What any daemon needs: signals, schedules, retries, logs, systemd. Knows nothing of likes.

pub mod clock;
pub mod cron;
pub mod liveness;
pub(crate) mod lock;
pub mod log;
pub mod process;
pub mod progress;
pub mod retry;
pub mod shutdown;
pub mod systemd;
pub mod waits;

pub use tallyd_connect::fault;
