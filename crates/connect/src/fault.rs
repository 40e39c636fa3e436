//! Named points at which a test may end the process as if by SIGKILL, stop it as if by SIGSTOP until the test continues
//! it, or have the task that comes there hang. Nothing at all without the feature `fault-points`, which no release is built with.

#[cfg(feature = "fault-points")]
use std::sync::atomic::{AtomicUsize, Ordering};

/// Ends the process here when `TALLYD_FAULT_POINT` names this point; hangs for ever when `TALLYD_HANG_POINT` does; stops it when that point is the next one of
/// `TALLYD_PAUSE_POINT`, a list with commas between: each is waited for in turn, and stopped at once.
#[cfg(feature = "fault-points")]
pub fn point(name: &str) {
    static REACHED: AtomicUsize = AtomicUsize::new(0);
    if std::env::var("TALLYD_FAULT_POINT").is_ok_and(|wanted| wanted == name) {
        tracing::error!(event = "fault-point", name, "ending the process, as the test asked");
        std::process::abort();
    }
    if std::env::var("TALLYD_HANG_POINT").is_ok_and(|wanted| wanted == name) {
        tracing::error!(event = "fault-point", name, "hanging, as the test asked");
        tokio::task::block_in_place(|| {
            loop {
                std::thread::park();
            }
        });
    }
    let Ok(wanted) = std::env::var("TALLYD_PAUSE_POINT") else { return };
    if wanted.split(',').nth(REACHED.load(Ordering::Relaxed)) == Some(name) {
        REACHED.fetch_add(1, Ordering::Relaxed);
        stop_here();
    }
}

/// Returns when somebody sends SIGCONT.
#[cfg(feature = "fault-points")]
fn stop_here() {
    // This thread's number, not the process's: the signal stops the process all the same, but no thread of it is asked
    // before this one, which else could go on for a moment.
    let thread = std::fs::read_link("/proc/thread-self").ok();
    let number = thread.as_ref().and_then(|link| link.file_name()).unwrap_or_default();
    if let Err(error) = std::process::Command::new("kill").arg("-STOP").arg(number).status() {
        tracing::error!(%error, "can't stop the process");
    }
}

/// Nothing: this build has no fault points.
#[cfg(not(feature = "fault-points"))]
#[inline]
pub fn point(_name: &str) {}
