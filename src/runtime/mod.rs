//! What any daemon needs: signals, schedules, retries, logs, systemd. Knows nothing of likes.

pub mod clock;
pub mod cron;
pub mod liveness;
pub mod log;
pub mod process;
pub mod progress;
pub mod retry;
pub mod shutdown;
pub mod systemd;
pub mod waits;

use std::sync::{Mutex, MutexGuard, PoisonError};

pub use tallyd_connect::{fault, tls};

/// Locks it even if another thread has panicked meanwhile: nothing that is kept so can be half changed.
pub(crate) fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
