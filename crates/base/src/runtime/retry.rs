//! Retries failed operations. The delay grows up to a limit, and retries never end. The first failure is logged
//! immediately. For further failures, only their count is logged.

use std::fmt;
use std::time::{Duration, Instant};

use backon::{BackoffBuilder, ExponentialBackoff, ExponentialBuilder};
use tracing::{info, warn};

use super::waits::{Work, waits};

const DELAY_MIN: Duration = Duration::from_millis(100);

/// So short that work resumes about a second after a server is reachable again.
const DELAY_MAX: Duration = Duration::from_secs(1);

const LOG_AGAIN_AFTER: Duration = Duration::from_secs(30);

/// More conflicts in a row, which take about a second together, are a failure.
const RIVALS_MAX: u32 = 10;

/// Doubles with each further conflict, so that the other transaction can finish.
const RIVAL_DELAY: Duration = Duration::from_millis(1);

/// Deadlocks in a row: MySQL rolls back this transaction, so that another one can commit.
#[derive(Default)]
pub struct Rivals(u32);

impl Rivals {
    /// After too many conflicts in a row, returns false, and the caller treats the conflict as a failure.
    pub fn has_room(&self) -> bool {
        self.0 < RIVALS_MAX
    }

    pub async fn wait(&mut self) {
        tokio::time::sleep(RIVAL_DELAY * (1 << self.0.min(RIVALS_MAX))).await;
        self.0 += 1;
    }
}

pub struct Outage {
    what: Work,
    delays: ExponentialBackoff,
    began: Option<Instant>,
    logged: Instant,
    tries: u64,
    wait: Option<u64>,
}

impl Outage {
    pub fn new(what: impl Into<Work>) -> Self {
        Self { what: what.into(), delays: delays(), began: None, logged: Instant::now(), tries: 0, wait: None }
    }

    pub fn failed(&mut self, error: &dyn fmt::Display) -> Duration {
        self.tries += 1;
        let first = self.began.is_none();
        let began = *self.began.get_or_insert_with(Instant::now);
        match self.wait {
            Some(number) => waits().again(number, error.to_string()),
            None => self.wait = Some(waits().begin(&self.what, error.to_string())),
        }
        if first {
            warn!(event = "outage-begun", what = %self.what, error = %error, "{} failed, retrying until it succeeds: {error}", self.what);
            self.logged = Instant::now();
        } else if self.logged.elapsed() >= LOG_AGAIN_AFTER {
            let (tries, seconds) = (self.tries, began.elapsed().as_secs());
            warn!(event = "outage-goes-on", what = %self.what, tries, seconds, error = %error,
                "{} has failed {tries} times in {seconds} s: {error}", self.what);
            self.logged = Instant::now();
        }
        self.delays.next().unwrap_or(DELAY_MAX)
    }

    pub fn age(&self) -> Duration {
        self.began.map_or(Duration::ZERO, |began| began.elapsed())
    }

    pub fn over(&mut self) {
        if let Some(began) = self.began.take() {
            let (tries, seconds) = (self.tries, began.elapsed().as_secs_f32());
            info!(event = "outage-over", what = %self.what, tries, seconds, "{} works again after {seconds:.1} s", self.what);
            self.delays = delays();
            self.tries = 0;
        }
        self.gone();
    }

    fn gone(&mut self) {
        if let Some(number) = self.wait.take() {
            waits().end(number);
        }
    }
}

impl Drop for Outage {
    fn drop(&mut self) {
        self.gone();
    }
}

fn delays() -> ExponentialBackoff {
    ExponentialBuilder::default()
        .with_min_delay(DELAY_MIN)
        .with_max_delay(DELAY_MAX)
        .with_jitter()
        .without_max_times()
        .build()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn delays_grow_to_the_cap_and_start_again_after_success() {
        let mut outage = Outage::new("mysql");
        let delays: Vec<Duration> = (0..50).map(|_| outage.failed(&"away")).collect();
        assert!(delays[0] < 2 * DELAY_MIN + Duration::from_millis(1), "{delays:?}");
        assert!(delays.iter().all(|delay| *delay <= 2 * DELAY_MAX), "{delays:?}");
        assert!(delays[49] >= DELAY_MAX, "{delays:?}");
        outage.over();
        assert_eq!(outage.age(), Duration::ZERO);
        assert!(outage.failed(&"away") < 2 * DELAY_MIN + Duration::from_millis(1));
    }
}
