//! The result of a run, and the state that the next run continues from.

use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tracing::info;

use tallyd_base::jobs::run::{Ended, RunHead, RunReport, has_run_head};
use tallyd_base::jobs::runner::RunOutcome;
use tallyd_base::runtime::progress::RunProgress;

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Report {
    pub looked_at: u64,
    pub built: u64,
    pub users: u64,
    pub folded: u64,
    pub dropped: u64,
    pub left: u64,
    pub left_because: Option<String>,
    #[serde(flatten)]
    pub head: RunHead,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mark {
    /// Changes if Redis gets a different data set, or if the filters get different names.
    pub data_set: u64,
    pub epoch: u64,
    pub likes_min: u64,
    /// In the text form that Java uses.
    pub false_positive: String,
    /// By Redis' clock, in microseconds since 1970.
    pub until: i64,
    pub full: i64,
}

impl RunReport for Report {
    has_run_head!();

    fn outcome(&self) -> RunOutcome {
        if self.head.ended == Ended::Done && self.left_because.is_some() {
            return RunOutcome::Failed;
        }
        // If a filter could not be built, a run tries again when the filter's target changes, and once a day.
        self.head.outcome()
    }
}

impl RunProgress for Report {
    fn done(&self) -> (u64, Option<u64>) {
        (self.looked_at, None)
    }

    fn words(&self, _: Duration) -> String {
        self.to_string()
    }

    fn log(&self, _: Duration, words: &str, _: Option<&str>) {
        let Self { looked_at, built, users, .. } = self;
        info!(event = "filters-progress", looked_at, built, users, "{words}");
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { looked_at, built, users, folded, dropped, left, left_because, head, .. } = self;
        write!(
            f,
            "{looked_at} targets checked, {built} filters built with {users} users, {folded} users added to filters"
        )?;
        write!(f, ", {dropped} filters removed")?;
        if *left > 0 {
            write!(f, ", {left} left for the next run")?;
        }
        if let Some(reason) = left_because {
            write!(f, " ({reason})")?;
        }
        write!(f, "{head}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_left_is_said_and_stays_due() {
        let report = Report { looked_at: 9, built: 2, users: 500, ..Report::default() };
        assert!(report.is_done());
        let text = "9 targets checked, 2 filters built with 500 users, 0 users added to filters, 0 filters removed";
        assert_eq!(report.to_string(), text);
        let left_because = Some("no time".to_owned());
        let left = Report { left: 1, left_because, ..report };
        assert!(!left.is_done());
        assert_eq!(left.to_string(), format!("{text}, 1 left for the next run (no time)"));
    }
}
