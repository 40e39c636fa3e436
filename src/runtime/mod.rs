//! What any daemon needs: signals, schedules, retries, logs, systemd. Knows nothing of likes.

pub mod dump;
pub mod fault;
pub mod log;
pub mod process;
pub mod liveness;
pub mod retry;
pub mod cron;
pub mod progress;
pub mod shutdown;
pub mod systemd;
pub mod tls;
