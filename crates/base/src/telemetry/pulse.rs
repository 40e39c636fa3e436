//! The last hour in points of ten seconds: the rate and the lag of written events.

use std::collections::VecDeque;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::{Buckets, locked, telemetry};
use crate::runtime::clock;
use tallyd_core::model::Micros;

pub(crate) const POINT_EVERY: Duration = Duration::from_secs(10);

const POINTS_MAX: usize = 360;

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Point {
    /// A point covers ten seconds. `at` is the end of these ten seconds, in microseconds since the epoch.
    pub at: i64,
    pub events_s: f64,
    /// Median of the seconds from an event's `at` to its commit. `None` if there were no events.
    pub lag_p50_s: Option<f64>,
    /// The 99th percentile of the seconds from an event's `at` to its commit.
    pub lag_p99_s: Option<f64>,
    /// Messages in the queues and in this process at the end of the ten seconds. `None` if the broker did not answer.
    pub waiting: Option<u64>,
}

#[derive(Debug, Default)]
pub struct Pulse(Mutex<PulseState>);

#[derive(Debug, Default)]
struct PulseState {
    points: VecDeque<Point>,
    last: Option<(Instant, u64, Buckets)>,
}

impl Pulse {
    /// Adds a point for the events that were written since the last call. The first call adds no point.
    pub fn beat(&self, waiting: Option<u64>) {
        let (committed, lag) = telemetry().written();
        self.add((Instant::now(), clock::now()), committed, lag, waiting);
    }

    fn add(&self, (now, at): (Instant, Micros), committed: u64, lag: Buckets, waiting: Option<u64>) {
        let mut state = locked(&self.0);
        let last = state.last.replace((now, committed, lag.clone()));
        let Some((then, before, former)) = last else { return };
        let seconds = now.duration_since(then).as_secs_f64().max(1e-3);
        let lag = lag.since(&former);
        if state.points.len() >= POINTS_MAX {
            state.points.pop_front();
        }
        state.points.push_back(Point {
            at: at.0,
            events_s: committed.saturating_sub(before) as f64 / seconds,
            lag_p50_s: lag.quantile(0.5),
            lag_p99_s: lag.quantile(0.99),
            waiting,
        });
    }

    pub fn last(&self) -> Option<Point> {
        locked(&self.0).points.back().cloned()
    }

    pub fn points(&self) -> Vec<Point> {
        locked(&self.0).points.iter().cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use prometheus_client::metrics::histogram::Histogram;

    #[test]
    fn an_hour_is_kept_and_what_was_before_is_dropped() {
        let (pulse, lag, began) = (Pulse::default(), Histogram::new([1.0, 2.0]), Instant::now());
        for beat in 0..=(POINTS_MAX as u64 + 10) {
            let now = (began + Duration::from_secs(beat * 10), Micros(beat.cast_signed() * 10_000_000));
            pulse.add(now, beat * 50, Buckets::of(&lag), None);
            lag.observe(1.5);
        }
        let points = pulse.points();
        assert_eq!((points.len(), points[0].at), (POINTS_MAX, 110_000_000));
        let last = pulse.last().unwrap();
        assert_eq!((last.events_s, last.lag_p50_s, last.lag_p99_s), (5.0, Some(1.5), Some(1.99)));
    }
}
