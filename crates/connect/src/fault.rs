//! Named points where a test can stop the process, and named answers that a test can make wrong. At a point, a test can
//! kill the process, stop the process until SIGCONT, or make the current task hang. This exists only with the feature
//! `fault-points`. No release has this feature.

#[cfg(feature = "fault-points")]
use std::collections::BTreeSet;
#[cfg(feature = "fault-points")]
use std::hash::{BuildHasher, RandomState};
#[cfg(feature = "fault-points")]
use std::sync::atomic::{AtomicUsize, Ordering};
#[cfg(feature = "fault-points")]
use std::sync::{Mutex, PoisonError};

/// Whether the test wants a fault of this name here. `TALLYD_FAULTS` has the mean number of calls between two such faults,
/// for instance `depth=3,commit=50`. The fault `death` can strike at each point. The fault `first-death` can strike where
/// the process reaches a point for the first time, because the process reaches most points rarely.
#[cfg(feature = "fault-points")]
pub fn strikes(name: &str) -> bool {
    static CALLS: AtomicUsize = AtomicUsize::new(0);
    let Ok(wanted) = std::env::var("TALLYD_FAULTS") else { return false };
    let mean = wanted.split(',').find_map(|one| one.strip_prefix(name)?.strip_prefix('=')?.parse::<u64>().ok());
    let dice = RandomState::new().hash_one(CALLS.fetch_add(1, Ordering::Relaxed));
    mean.is_some_and(|mean| dice.is_multiple_of(mean.max(1)))
}

#[cfg(feature = "fault-points")]
fn dies(name: &str) -> bool {
    static REACHED: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());
    if std::env::var_os("TALLYD_FAULTS").is_none() {
        return false;
    }
    let is_first = REACHED.lock().unwrap_or_else(PoisonError::into_inner).insert(name.to_owned());
    (is_first && strikes("first-death")) || strikes("death")
}

#[cfg(not(feature = "fault-points"))]
#[inline]
pub fn strikes(_name: &str) -> bool {
    false
}

/// Kills the process if `TALLYD_FAULT_POINT` names this point, and panics if `TALLYD_PANIC_POINT` names it. Hangs
/// forever if `TALLYD_HANG_POINT` names this point.
/// `TALLYD_PAUSE_POINT` is a comma-separated list of points. The process stops at the first point of
/// `TALLYD_PAUSE_POINT`, later at the second point, and so on.
#[cfg(feature = "fault-points")]
pub fn point(name: &str) {
    static REACHED: AtomicUsize = AtomicUsize::new(0);
    if std::env::var("TALLYD_FAULT_POINT").is_ok_and(|wanted| wanted == name) || dies(name) {
        tracing::error!(event = "fault-point", name, "the test requested a crash at this point");
        std::process::abort();
    }
    assert_ne!(std::env::var("TALLYD_PANIC_POINT").as_deref(), Ok(name), "the test requested a panic at this point");
    if std::env::var("TALLYD_HANG_POINT").is_ok_and(|wanted| wanted == name) {
        tracing::error!(event = "fault-point", name, "the test requested a hang at this point");
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

/// Stops the process with SIGSTOP. The call returns after another process has sent SIGCONT.
#[cfg(feature = "fault-points")]
fn stop_here() {
    // SIGSTOP is sent to the calling thread, and stops the whole process. If SIGSTOP were sent to the process, a
    // different thread could receive the signal, and the calling thread would continue for a moment.
    let thread = std::fs::read_link("/proc/thread-self").ok();
    let number = thread.as_ref().and_then(|link| link.file_name()).unwrap_or_default();
    if let Err(error) = std::process::Command::new("kill").arg("-STOP").arg(number).status() {
        tracing::error!(%error, "the process could not stop itself");
    }
}

#[cfg(not(feature = "fault-points"))]
#[inline]
pub fn point(_name: &str) {}

/// For tests: checks that the sources contain each of these fault points once, and no other fault points.
pub fn assert_points(points: &[&str], sources: &[&str]) {
    let source = sources.concat();
    for point in points {
        assert_eq!(source.matches(&format!("fault::point(\"{point}\")")).count(), 1, "{point}");
    }
    assert_eq!(source.matches("fault::point(\"").count(), points.len());
}
