//! The result and the progress of a recount, for operators and for programs.

use std::fmt;
use std::time::Duration;

use serde::Serialize;
use tracing::info;

use tallyd_base::jobs::run::{RunHead, RunReport, has_run_head};
use tallyd_base::runtime::progress::{RunProgress, rate};

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Report {
    pub recount: String,
    pub checked: u64,
    pub exact: u64,
    /// Wrong at the first measurement and right at a later one, because events were in flight.
    pub transient: u64,
    pub drifted: u64,
    pub corrected: u64,
    /// Corrected, but not kept for the next `changed` reconcile, whose list is full. Only a full reconcile tells Redis.
    pub untold: u64,
    /// Wrong at the first measurement, and changed at each later one.
    pub busy: u64,
    pub drift_sum: u64,
    pub pages: u64,
    pub look_ms: u64,
    pub fence_ms: u64,
    #[serde(flatten)]
    pub head: RunHead,
    pub would_brake: Option<String>,
    pub targets: Vec<TargetReport>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct TargetReport {
    pub target: String,
    pub truth: i64,
    pub counter: i64,
    pub added: i64,
}

impl RunReport for Report {
    has_run_head!();
}

/// Writes one line for the log. With `{:#}` it writes several lines for an operator.
impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { recount, checked, exact, transient, drifted, corrected, busy, drift_sum, .. } = self;
        write!(f, "{recount}: {checked} targets checked, {exact} exact, {drifted} drifted by {drift_sum} in all, ")?;
        write!(f, "{corrected} corrected, {transient} transient")?;
        if *busy > 0 {
            write!(f, ", {busy} too busy to be judged")?;
        }
        if let Some(why) = &self.would_brake {
            write!(f, "; without --dry-run the run would stop: {why}")?;
        }
        if self.untold > 0 {
            write!(
                f,
                "; the next `changed` reconcile will not compare {} corrected targets: run `tallyd reconcile --full`",
                self.untold
            )?;
        }
        write!(f, "{}", self.head)?;
        if f.alternate() {
            for TargetReport { target, truth, counter, added } in &self.targets {
                write!(f, "\n  {target}: counter {counter}, query {truth}, correction {added:+}")?;
            }
        }
        Ok(())
    }
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    pub recount: String,
    pub checked: u64,
    pub drifted: u64,
    pub pending: u64,
    pub reached: u64,
}

impl RunProgress for Progress {
    fn done(&self) -> (u64, Option<u64>) {
        (self.checked, None)
    }

    fn words(&self, elapsed: Duration) -> String {
        let Self { recount, checked, drifted, pending, reached } = self;
        let rate = rate(*checked, elapsed);
        format!(
            "{recount}: {checked} targets checked, {rate} a second, {drifted} drifted, {pending} to be measured again, checked up to target {reached}"
        )
    }

    fn log(&self, elapsed: Duration, words: &str, _: Option<&str>) {
        let Self { recount, checked, drifted, pending, reached } = self;
        let per_second = rate(*checked, elapsed);
        info!(event = "recount-progress", recount, checked, per_second, drifted, pending, reached, "{words}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_reads_as_a_sentence() {
        let target = TargetReport { target: "video:42".to_owned(), truth: 5, counter: 3, added: 2 };
        let report = Report {
            recount: "video:comment".to_owned(),
            checked: 10,
            exact: 7,
            drifted: 1,
            corrected: 1,
            transient: 1,
            busy: 1,
            drift_sum: 2,
            targets: vec![target],
            ..Report::default()
        };
        assert_eq!(
            format!("{report:#}"),
            "video:comment: 10 targets checked, 7 exact, 1 drifted by 2 in all, 1 corrected, 1 transient, 1 too busy to be judged\n  \
             video:42: counter 3, query 5, correction +2"
        );
    }
}
