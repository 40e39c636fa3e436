//! The report and the progress of a comparison.

use std::fmt;
use std::time::Duration;

use serde::Serialize;
use tracing::info;

use super::Subject;
use super::sides::Look;
use tallyd_base::jobs::run::{RunHead, RunReport, has_run_head};
use tallyd_base::runtime::progress::{RunProgress, rate};
use tallyd_core::model::TargetId;
use tallyd_core::repair_limits::confirmed_delta;
use tallyd_core::sizes::Sizes;

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Report {
    pub keys: String,
    pub kind: String,
    pub metric: String,
    pub checked: u64,
    pub equal: u64,
    /// Differed at the first check, but not in the same direction at the second: events were in flight.
    pub transient: u64,
    pub differ: u64,
    pub missing_old: u64,
    pub missing_tallyd: u64,
    pub unreadable: u64,
    pub drift_sum: u64,
    pub tallyd_more: Sizes,
    pub tallyd_less: Sizes,
    pub worst: Vec<TargetReport>,
    #[serde(flatten)]
    pub head: RunHead,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct TargetReport {
    pub target: String,
    pub old: Option<i64>,
    pub tallyd: Option<i64>,
    /// The smaller difference of the two checks. Positive if tallyd's count is higher.
    pub drift: i64,
}

const WORST_MAX: usize = 20;

impl Report {
    pub(super) fn new(subject: &Subject) -> Self {
        let keys = subject.keys.to_string();
        Self { keys, kind: subject.kind.0.clone(), metric: subject.metric.0.clone(), ..Self::default() }
    }

    pub(super) fn judge(&mut self, kind: &str, id: TargetId, first: &Look, second: &Look) {
        // `confirmed_delta` returns the correction, which has the opposite sign.
        let drift = -confirmed_delta(first.drift(), second.drift());
        if drift == 0 {
            self.transient += 1;
            return;
        }
        self.differ += 1;
        self.missing_old += u64::from(second.old.is_none());
        self.missing_tallyd += u64::from(second.counted.is_none());
        self.drift_sum = self.drift_sum.saturating_add(drift.unsigned_abs());
        let sizes = if drift > 0 { &mut self.tallyd_more } else { &mut self.tallyd_less };
        sizes.note(drift.unsigned_abs());
        let target = format!("{kind}:{id}");
        self.worst.push(TargetReport { target, old: second.old, tallyd: second.counted, drift });
        if self.worst.len() > 2 * WORST_MAX {
            self.keep_worst();
        }
    }

    pub(super) fn keep_worst(&mut self) {
        self.worst.sort_by_key(|it| std::cmp::Reverse(it.drift.unsigned_abs()));
        self.worst.truncate(WORST_MAX);
    }
}

impl RunReport for Report {
    has_run_head!();
}

/// Writes one line for the log. `{:#}` adds details on further lines.
impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { keys, kind, metric, checked, equal, differ, transient, drift_sum, .. } = self;
        write!(f, "{kind} {metric}, keys {keys}: {checked} targets compared, {equal} equal, {transient} transient, ")?;
        write!(f, "{differ} differ by {drift_sum} in total")?;
        for (count, what) in [
            (self.missing_old, "missing on the older site"),
            (self.missing_tallyd, "without a row in counter"),
            (self.unreadable, "keys without a number"),
        ] {
            if count > 0 {
                write!(f, ", {count} {what}")?;
            }
        }
        write!(f, "{}", self.head)?;
        if f.alternate() { self.write_details(f) } else { Ok(()) }
    }
}

impl Report {
    fn write_details(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let row = |sizes: &Sizes| {
            let sizes = [("1", sizes.one), ("2-9", sizes.some), ("10-99", sizes.many), ("100+", sizes.most)];
            sizes.map(|(size, count)| format!("by {size}: {count}")).join(", ")
        };
        if self.differ > 0 {
            write!(
                f,
                "\n  tallyd has more  {}\n  tallyd has less  {}",
                row(&self.tallyd_more),
                row(&self.tallyd_less)
            )?;
        }
        let shown = |number: Option<i64>| number.map_or_else(|| "none".to_owned(), |number| number.to_string());
        for TargetReport { target, old, tallyd, drift } in &self.worst {
            write!(f, "\n  {target}: tallyd {}, the older site {}, {drift:+}", shown(*tallyd), shown(*old))?;
        }
        Ok(())
    }
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    pub checked: u64,
    pub differ: u64,
    pub pending: u64,
}

impl RunProgress for Progress {
    fn done(&self) -> (u64, Option<u64>) {
        (self.checked, None)
    }

    fn words(&self, elapsed: Duration) -> String {
        let Self { checked, differ, pending } = self;
        let rate = rate(*checked, elapsed);
        format!("{checked} targets compared, {rate} a second, {differ} differ, {pending} to check again")
    }

    fn log(&self, _: Duration, words: &str, _: Option<&str>) {
        let Self { checked, differ, pending } = self;
        info!(event = "compare-progress", checked, differ, pending, "{words}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn look(old: i64, counted: i64) -> Look {
        Look { old: Some(old), counted: Some(counted) }
    }

    #[test]
    fn only_what_differs_twice_in_one_direction_counts() {
        let mut report = Report::default();
        for (first, second) in [
            (look(3, 5), look(3, 4)),
            (look(3, 5), look(5, 5)),
            (look(3, 5), look(6, 5)),
            (look(200, 0), look(200, 50)),
            (Look { old: None, counted: Some(7) }, Look { old: None, counted: Some(7) }),
            (Look { old: Some(7), counted: None }, Look { old: Some(7), counted: None }),
        ] {
            report.judge("video", TargetId(1), &first, &second);
        }
        report.keep_worst();
        assert_eq!((report.transient, report.differ, report.drift_sum), (2, 4, 165));
        assert_eq!((report.missing_old, report.missing_tallyd), (1, 1));
        assert_eq!(report.tallyd_more, Sizes { one: 1, some: 1, ..Sizes::default() });
        assert_eq!(report.tallyd_less, Sizes { some: 1, most: 1, ..Sizes::default() });
        assert_eq!(report.worst.iter().map(|it| it.drift).collect::<Vec<_>>(), [-150, 7, -7, 1]);
    }
}
