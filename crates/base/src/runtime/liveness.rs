//! Tracks which loops are alive. Each loop reports that it is alive (beats) at least once per second while it works or
//! waits, even if a server is unreachable. If a loop does not beat for `STUCK_AFTER`, the daemon stops notifying
//! systemd's watchdog, and systemd restarts the daemon.

use std::future::Future;
use std::pin::pin;
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use tokio_util::sync::CancellationToken;

use super::lock::locked;

#[derive(Clone, Default)]
pub struct Liveness(Arc<Mutex<Vec<Loop>>>);

/// The time of the last beat. The pointer is empty after the loop has ended and dropped its [`Heartbeat`].
type Loop = (String, Weak<Mutex<Instant>>);

#[derive(Clone)]
pub struct Heartbeat(Arc<Mutex<Instant>>);

impl Liveness {
    pub fn register(&self, name: impl Into<String>) -> Heartbeat {
        let last = Arc::new(Mutex::new(Instant::now()));
        locked(&self.0).push((name.into(), Arc::downgrade(&last)));
        Heartbeat(last)
    }

    pub fn stuck(&self, limit: Duration) -> Vec<String> {
        let mut loops = locked(&self.0);
        loops.retain(|(_, last)| last.strong_count() > 0);
        let is_stuck = |last: &Weak<Mutex<Instant>>| last.upgrade().is_some_and(|last| locked(&last).elapsed() > limit);
        loops.iter().filter(|(_, last)| is_stuck(last)).map(|(name, _)| name.clone()).collect()
    }
}

impl Heartbeat {
    pub fn beat(&self) {
        *locked(&self.0) = Instant::now();
    }

    /// Beats each second. This is safe, because all calls in `work` have time limits.
    pub async fn during<T>(&self, work: impl Future<Output = T>) -> T {
        let mut work = pin!(work);
        let mut tick = tokio::time::interval(Duration::from_secs(1));
        loop {
            tokio::select! {
                done = &mut work => return done,
                _ = tick.tick() => self.beat(),
            }
        }
    }

    pub async fn pause(&self, mut left: Duration, stop: &CancellationToken) {
        while !left.is_zero() && !stop.is_cancelled() {
            self.beat();
            let pause = left.min(Duration::from_secs(1));
            left -= pause;
            stop.run_until_cancelled(tokio::time::sleep(pause)).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_loop_that_stopped_beating_is_stuck() {
        let liveness = Liveness::default();
        let silent = liveness.register("silent");
        let lively = liveness.register("lively");
        std::thread::sleep(Duration::from_millis(20));
        lively.beat();
        assert_eq!(liveness.stuck(Duration::from_millis(10)), ["silent"]);
        drop(silent);
        assert!(liveness.stuck(Duration::from_millis(10)).is_empty(), "a loop that has ended is not stuck");
    }
}
