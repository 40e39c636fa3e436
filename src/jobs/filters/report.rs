//! What a run says at its end, and what the next one goes on from.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::jobs::runner::{self, Outcome};

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Report {
    /// Targets that were looked at: those that changed lately, or all.
    pub looked_at: u64,
    pub built: u64,
    pub users: u64,
    /// Users who had been noted beside a filter, and are in its bits now.
    pub folded: u64,
    /// Filters that were taken away: the target has too few likes by now, or Redis may have lost some of it.
    pub dropped: u64,
    pub left: u64,
    /// Why, where it is not of one filter alone.
    #[serde(default)]
    pub left_because: Option<String>,
    pub stopped: bool,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mark {
    /// Redis' data set and how filters are named in it, as a number.
    pub data_set: u64,
    /// The run since when this Redis is trusted.
    pub epoch: u64,
    pub likes_min: u64,
    /// `[filter] false_positive`, as Java writes it.
    pub false_positive: String,
    /// When the run began, by Redis' clock in microseconds since 1970.
    pub until: i64,
    /// When the last run began that looked at all targets.
    pub full: i64,
}

impl runner::Report for Report {
    fn outcome(&self) -> Outcome {
        if self.stopped {
            Outcome::Stopped
        } else if self.left_because.is_some() {
            Outcome::Failed
        } else {
            // A filter that could not be built alone is tried again when its target changes, and once a day.
            Outcome::Done
        }
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { looked_at, built, users, folded, dropped, left, left_because, stopped, .. } = self;
        write!(
            f,
            "{looked_at} targets looked at, {built} filters built with {users} users, {folded} users put into filters"
        )?;
        write!(f, ", {dropped} filters taken away")?;
        if *left > 0 {
            write!(f, ", {left} left to the next run")?;
        }
        if let Some(reason) = left_because {
            write!(f, " ({reason})")?;
        }
        if *stopped {
            f.write_str(", stopped before the end")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::jobs::runner::Report as _;

    #[test]
    fn what_was_left_is_said_and_stays_due() {
        let report = Report { looked_at: 9, built: 2, users: 500, ..Report::default() };
        assert!(report.is_done());
        let said =
            "9 targets looked at, 2 filters built with 500 users, 0 users put into filters, 0 filters taken away";
        assert_eq!(report.to_string(), said);
        let left_because = Some("no time".to_owned());
        let left = Report { left: 1, left_because, stopped: true, ..report };
        assert!(!left.is_done());
        assert_eq!(left.to_string(), format!("{said}, 1 left to the next run (no time), stopped before the end"));
    }
}
