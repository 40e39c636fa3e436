//! Finds log lines of the daemons that show a bug.

use std::time::{Duration, SystemTime};

use super::daemon::Surprise;

/// Errors that only report a fault: a server was unreachable, or the daemon died at a step. A run that fails because of
/// such an error is retried.
const OF_A_FAULT: [&str; 2] = ["job-failed", "fault-point"];

/// How MySQL, Redis and RabbitMQ report missing rights of an account. No fault removes a right, so such a line always
/// shows a bug. "Access to vhost ... refused" is not in this list, because RabbitMQ reports it while it starts or
/// stops.
const MAY_NOT: [&str; 5] = ["command denied", "Access denied", "NOPERM", "access to queue", "access to exchange"];

/// A time in which a server or connection was broken. Daemons can log errors for some time after the end of the
/// disturbance.
#[derive(Clone, Debug)]
pub struct Disturbance {
    pub what: &'static str,
    pub from: SystemTime,
    /// `None` while the disturbance lasts.
    pub until: Option<SystemTime>,
}

impl Disturbance {
    /// Returns whether this disturbance explains an error that was logged at the time `at`.
    fn explains(&self, at: SystemTime, after: Duration) -> bool {
        self.from <= at && self.until.is_none_or(|until| at <= until + after)
    }
}

/// Returns panics, missing rights, and lines at level error that no disturbance explains.
pub fn surprises(daemon: usize, log: &str, disturbances: &[Disturbance], after: Duration) -> Vec<Surprise> {
    let surprise = |line: &str| {
        let surprise = |at, what: &str| Surprise { at, daemon, what: what.to_owned() };
        let Ok(entry) = serde_json::from_str::<serde_json::Value>(line) else {
            return line.contains("panicked").then(|| surprise(SystemTime::now(), line));
        };
        let at = entry["timestamp"].as_str().and_then(|at| at.parse::<jiff::Timestamp>().ok());
        let at = at.map_or_else(SystemTime::now, SystemTime::from);
        if MAY_NOT.iter().any(|says| line.contains(says)) {
            return Some(surprise(at, line));
        }
        if entry["level"] != "ERROR" {
            return None;
        }
        let is_of_a_fault = entry["event"].as_str().is_some_and(|event| OF_A_FAULT.contains(&event));
        // The queue was long when the reconcile stopped waiting. If the queue stays long, the site does not settle, and
        // the torture run reports that.
        let is_backlog = entry["error"].as_str().is_some_and(|error| error.ends_with("messages before the fence"));
        let is_explained = is_backlog || disturbances.iter().any(|disturbance| disturbance.explains(at, after));
        (!(is_of_a_fault && is_explained)).then(|| surprise(at, line))
    };
    log.lines().filter_map(surprise).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOG: &str = r#"{"timestamp":"2026-11-22T09:00:10Z","level":"ERROR","event":"job-failed"}
{"timestamp":"2026-11-22T09:00:10Z","level":"ERROR","event":"task-ended"}
{"timestamp":"2026-11-22T09:00:10Z","level":"WARN","event":"outage-begun"}
{"timestamp":"2026-11-22T09:00:03Z","level":"WARN","event":"retry","error":"NOPERM User x has no permissions"}
thread 'main' panicked at src/main.rs
"#;

    #[test]
    fn a_failed_run_is_explained_by_a_fault_and_a_panic_or_a_missing_right_by_none() {
        let at = |text: &str| SystemTime::from(text.parse::<jiff::Timestamp>().unwrap());
        let what = |disturbances: &[Disturbance]| -> Vec<bool> {
            let found = surprises(0, LOG, disturbances, Duration::from_secs(5));
            ["job-failed", "task-ended", "outage-begun", "panicked", "NOPERM"]
                .map(|word| found.iter().any(|surprise| surprise.what.contains(word)))
                .to_vec()
        };
        let disturbance =
            Disturbance { what: "x", from: at("2026-11-22T09:00:00Z"), until: Some(at("2026-11-22T09:00:06Z")) };
        assert_eq!(what(&[]), [true, true, false, true, true]);
        assert_eq!(what(std::slice::from_ref(&disturbance)), [false, true, false, true, true]);
        let earlier = Disturbance { until: Some(at("2026-11-22T09:00:04Z")), ..disturbance };
        assert_eq!(what(&[earlier]), [true, true, false, true, true]);
    }
}
