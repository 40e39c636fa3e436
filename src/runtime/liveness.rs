//! Which loops are alive. Each loop beats at least once a second while it works or waits, also while a server is away. The watchdog is fed only
//! while all of them beat.

use std::future::Future;
use std::pin::pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use tokio_util::sync::CancellationToken;

use super::locked;

#[derive(Clone)]
pub struct Liveness {
    started: Instant,
    loops: Arc<Mutex<Vec<Loop>>>,
}

/// A loop's name, and its last beat, which is gone once it has ended.
type Loop = (String, Weak<AtomicU64>);

#[derive(Clone)]
pub struct Heartbeat {
    started: Instant,
    last_ms: Arc<AtomicU64>,
}

impl Default for Liveness {
    fn default() -> Self {
        Self { started: Instant::now(), loops: Arc::default() }
    }
}

impl Liveness {
    pub fn register(&self, name: impl Into<String>) -> Heartbeat {
        let beat = Heartbeat { started: self.started, last_ms: Arc::default() };
        beat.beat();
        locked(&self.loops).push((name.into(), Arc::downgrade(&beat.last_ms)));
        beat
    }

    pub fn stuck(&self, limit: Duration) -> Vec<String> {
        let mut loops = locked(&self.loops);
        loops.retain(|(_, last_ms)| last_ms.strong_count() > 0);
        let now_ms = millis(self.started.elapsed());
        let is_stuck = |last_ms: &Weak<AtomicU64>| {
            let age_ms = last_ms.upgrade().map(|last_ms| now_ms.saturating_sub(last_ms.load(Ordering::Relaxed)));
            age_ms.is_some_and(|age_ms| Duration::from_millis(age_ms) > limit)
        };
        loops.iter().filter(|(_, last_ms)| is_stuck(last_ms)).map(|(name, _)| name.clone()).collect()
    }
}

impl Heartbeat {
    pub fn beat(&self) {
        self.last_ms.store(millis(self.started.elapsed()), Ordering::Relaxed);
    }

    /// Waits for `work` and beats meanwhile: its own calls all have time limits.
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

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
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
        assert!(liveness.stuck(Duration::from_millis(10)).is_empty(), "one that has ended is not");
    }
}
