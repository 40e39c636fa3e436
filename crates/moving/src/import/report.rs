//! The report and the progress of an import.

use std::fmt;
use std::time::Duration;

use serde::Serialize;
use tracing::info;

use tallyd_base::jobs::run::{RunHead, RunReport, has_run_head};
use tallyd_base::runtime::progress::{RunProgress, rate};
use tallyd_core::model::Micros;

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Report {
    pub import: String,
    pub pass: &'static str,
    pub rows: u64,
    pub likes: u64,
    pub added: u64,
    /// Likes that replaced an older row, or counts that differed from tallyd's count.
    pub changed: u64,
    pub kept: u64,
    pub counted: i64,
    /// Imported earlier, and no longer on the site at the first check.
    pub missed: u64,
    pub taken_out: u64,
    pub repeated: u64,
    pub unordered: u64,
    pub ignored: u64,
    /// Microseconds since 1970.
    pub oldest: Option<Micros>,
    pub newest: Option<Micros>,
    /// In a `verify` run: tallyd's likes, or its targets in `counter`.
    pub here: u64,
    /// In a `verify` run, rows that were read because the sums of their range differed.
    pub read: u64,
    pub differing: u64,
    pub targets: Vec<TargetReport>,
    pub pages: u64,
    pub read_ms: u64,
    pub write_ms: u64,
    pub plan: Vec<String>,
    pub warnings: Vec<String>,
    pub resumed_run: Option<u64>,
    #[serde(flatten)]
    pub head: RunHead,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct TargetReport {
    pub target: String,
    pub site: i64,
    pub here: i64,
    pub missing: u64,
    pub extra: u64,
}

impl Report {
    pub(super) fn new(import: &str, pass: &'static str) -> Self {
        Self { import: import.to_owned(), pass, ..Self::default() }
    }
}

impl RunReport for Report {
    has_run_head!();
}

/// Writes one line for the log. `{:#}` adds details on further lines.
impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { import, rows, .. } = self;
        write!(f, "{import}: {rows} rows read")?;
        match self.pass {
            "verify" => write!(f, ", {} here, {} targets differ", self.here, self.differing)?,
            "deletions" => write!(f, ", {} missing at the first check, {} removed", self.missed, self.taken_out)?,
            _ => {
                let Self { added, changed, kept, counted, .. } = self;
                write!(f, ", {added} added, {changed} changed, {kept} kept, likes {counted:+}")?;
            }
        }
        for (count, what) in [
            (self.repeated, "returned twice"),
            (self.unordered, "in the wrong order"),
            (self.ignored, "keys without a target"),
            (self.head.waited.waited_s, "seconds waited for the servers"),
        ] {
            if count > 0 {
                write!(f, ", {count} {what}")?;
            }
        }
        if self.pass == "deletions" && self.taken_out > 0 && !self.head.dry_run {
            f.write_str("; if Redis is already loaded, run `tallyd reconcile --full`")?;
        }
        write!(f, "{}", self.head)?;
        if f.alternate() { self.write_details(f) } else { Ok(()) }
    }
}

impl Report {
    fn write_details(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let (Some(oldest), Some(newest)) = (self.oldest.map(date), self.newest.map(date)) {
            write!(f, "\n  times from {oldest} to {newest}")?;
        }
        for warning in &self.warnings {
            write!(f, "\n  warning: {warning}")?;
        }
        if self.head.dry_run {
            for plan in &self.plan {
                write!(f, "\n  plan: {plan}")?;
            }
        }
        for TargetReport { target, site, here, missing, extra } in &self.targets {
            write!(f, "\n  {target}: {site} on the site, {here} here")?;
            if missing + extra > 0 {
                write!(f, " ({missing} missing, {extra} too many)")?;
            }
        }
        let listed = self.targets.len() as u64;
        if self.differing > listed {
            write!(f, "\n  and {} more", self.differing - listed)?;
        }
        Ok(())
    }
}

fn date(at: Micros) -> String {
    jiff::Timestamp::from_microsecond(at.0).map_or_else(|_| at.0.to_string(), |time| time.to_string())
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    pub import: String,
    pub rows: u64,
    pub reached: u64,
}

impl RunProgress for Progress {
    fn done(&self) -> (u64, Option<u64>) {
        (self.rows, None)
    }

    fn words(&self, elapsed: Duration) -> String {
        let Self { import, rows, reached } = self;
        format!("{import}: {rows} rows, {} a second, up to target {reached}", rate(*rows, elapsed))
    }

    fn log(&self, elapsed: Duration, words: &str, _: Option<&str>) {
        let Self { import, rows, reached } = self;
        let per_second = rate(*rows, elapsed);
        info!(event = "import-progress", import, rows, per_second, reached, "{words}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_of_each_pass_reads_as_a_sentence() {
        let report = Report {
            rows: 10,
            added: 7,
            changed: 1,
            kept: 2,
            counted: 6,
            oldest: Some(Micros(1_764_000_000_000_000)),
            newest: Some(Micros(1_764_000_001_000_000)),
            ..Report::new("old", "rows")
        };
        assert_eq!(
            format!("{report:#}"),
            "old: 10 rows read, 7 added, 1 changed, 2 kept, likes +6\n  times from 2025-11-24T16:00:00Z to 2025-11-24T16:00:01Z"
        );
        let target = TargetReport { target: "video:42".to_owned(), site: 5, here: 4, missing: 2, extra: 1 };
        let report = Report { rows: 9, here: 8, differing: 2, targets: vec![target], ..Report::new("old", "verify") };
        assert_eq!(
            format!("{report:#}"),
            "old: 9 rows read, 8 here, 2 targets differ\n  video:42: 5 on the site, 4 here (2 missing, 1 too many)\n  and 1 more"
        );
        let report = Report { rows: 9, missed: 2, taken_out: 1, ..Report::new("old", "deletions") };
        assert_eq!(
            report.to_string(),
            "old: 9 rows read, 2 missing at the first check, 1 removed; if Redis is already loaded, run `tallyd reconcile --full`"
        );
    }
}
