//! The report and the progress of an export.

use std::fmt;
use std::time::Duration;

use jiff::Timestamp;
use serde::Serialize;
use tracing::info;

use crate::config::Export;
use tallyd_base::jobs::run::{RunHead, RunReport, has_run_head};
use tallyd_base::runtime::progress::{RunProgress, rate, spoken};

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Report {
    pub export: String,
    pub passes: u64,
    pub targets: u64,
    pub likes: u64,
    pub unlikes: u64,
    /// Microseconds since 1970.
    pub since: i64,
    pub until: Option<i64>,
    /// How much older than `since` the `at` of exported rows can be.
    pub overlap_s: u64,
    #[serde(flatten)]
    pub head: RunHead,
}

impl Report {
    pub(super) fn new(export: &Export) -> Self {
        Self { export: export.name.clone(), overlap_s: export.overlap.0.as_secs(), ..Self::default() }
    }
}

impl RunReport for Report {
    has_run_head!();
}

fn shown(at: i64) -> impl fmt::Display {
    Timestamp::from_microsecond(at).unwrap_or(Timestamp::MIN).strftime("%Y-%m-%d %H:%M:%S UTC")
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { export, passes, targets, likes, unlikes, since, until, overlap_s, .. } = self;
        write!(
            f,
            "{export}: {passes} passes, {targets} changed targets, {likes} likes and {unlikes} unlikes written, "
        )?;
        match until {
            Some(until) => write!(f, "from {} to {}", shown(*since), shown(*until))?,
            None => write!(f, "no pass from {} finished", shown(*since))?,
        }
        let overlap = spoken(Duration::from_secs(*overlap_s));
        write!(
            f,
            "; events that arrived more than {overlap} late were not exported: `tallyd import --verify` finds them{}",
            self.head
        )
    }
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    pub export: String,
    pub targets: u64,
    pub rows: u64,
    pub passes: u64,
}

impl RunProgress for Progress {
    fn done(&self) -> (u64, Option<u64>) {
        (self.targets, None)
    }

    fn words(&self, elapsed: Duration) -> String {
        let Self { export, targets, rows, passes } = self;
        let rate = rate(*rows, elapsed);
        format!("{export}: {targets} targets, {rows} rows, {rate} a second, {passes} passes")
    }

    fn log(&self, _: Duration, words: &str, _: Option<&str>) {
        let Self { export, targets, rows, passes } = self;
        info!(event = "export-progress", export, targets, rows, passes, "{words}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_says_what_is_missing_and_where_it_goes_on() {
        let report = Report {
            export: "old".to_owned(),
            passes: 2,
            targets: 3,
            likes: 4,
            unlikes: 1,
            since: 0,
            until: Some(60_000_000),
            overlap_s: 900,
            ..Report::default()
        };
        assert_eq!(
            report.to_string(),
            "old: 2 passes, 3 changed targets, 4 likes and 1 unlikes written, from 1970-01-01 00:00:00 UTC to 1970-01-01 00:01:00 UTC; \
             events that arrived more than 15 min 0 s late were not exported: `tallyd import --verify` finds them"
        );
        let stopped = Report { until: None, ..report };
        assert!(stopped.to_string().contains("no pass from 1970-01-01 00:00:00 UTC finished"), "{stopped}");
    }
}
