//! The result and the progress of a reconcile, for operators and for programs.

mod text;

use std::time::Duration;

use serde::Serialize;

use super::Mode;
pub(super) use crate::jobs::run::LISTED_MAX;
use crate::jobs::run::{RunHead, RunReport};
pub use crate::telemetry::Verdict;
use tallyd_core::model::Micros;
use tallyd_core::sizes::Sizes;

/// The result of one run. A number in this report is a number of counters, unless the comment of its field says
/// otherwise. A counter is one metric of one target.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Report {
    /// `changed`, `full`, `scrub`, `rebuild`, `layout` or `targets`.
    pub mode: &'static str,
    #[serde(flatten)]
    pub head: RunHead,
    /// Counters that were compared at a cut (the instant of a sample).
    pub checked: u64,
    /// Counters that were right at the first measurement.
    pub exact: u64,
    /// Counters that were wrong at both measurements, in the same direction.
    pub drifted: u64,
    /// Drifted counters that were repaired.
    pub repaired: u64,
    /// Counters that were wrong at the first measurement. At the second measurement these counters were right, or wrong
    /// in the other direction, because events were in flight.
    pub transient: u64,
    /// Busy counters. At each measurement, MySQL's value of the counter already contained an event that is newer than
    /// the cut. The run watched the events of these counters to get a result.
    pub busy: u64,
    /// Counters without a result. At each sample of such a counter, the time of an event was very close to the time of
    /// the sample. So it is unknown whether the sample includes the event.
    pub undecided: u64,
    /// Counters that were not compared, because they are missing in a bucket that is not loaded. Their value is
    /// unknown.
    pub unknown: u64,
    /// Drifted counters that were not repaired, because the bucket changed after the measurement, the counter would
    /// have gone below zero, or the repairs of the metric had stopped.
    pub left: u64,
    /// Counters that Redis has and MySQL does not have.
    pub phantoms: u64,
    /// The sum of the absolute values of all drifts.
    pub drift_sum: u64,
    /// The drifted counters are grouped by the size of their drift. This field has the number of counters per group.
    /// The size is the drift without its sign.
    pub drifted_by_size: Sizes,
    /// The number of rows of `counter` that differed from `like_record`. The rows were corrected, unless this is a dry
    /// run.
    pub counters_off: u64,
    /// The number of lost buckets that this run loaded.
    pub buckets_loaded: u64,
    /// The number of counters that were added to the loaded buckets.
    pub counters_loaded: u64,
    /// Examples of keys that should be buckets but contain something else. Their correct content is unknown.
    pub foreign: Vec<String>,
    /// Milliseconds per step. The steps of two pages overlap, so the sum can exceed the total time.
    pub steps_ms: Steps,
    /// The slice that a `scrub` run compared. The slice begins after one stored target and ends with another stored
    /// target.
    pub slice: Option<Slice>,
    /// The number of the earlier run that this run resumed.
    pub resumed_run: Option<u64>,
    /// The time up to which every change has been compared, in microseconds since 1970.
    pub cut: Option<i64>,
    /// Whether a full run found nothing wrong, from the first target to the last. If the run resumed earlier runs, the
    /// result includes these runs.
    #[serde(skip)]
    pub clean: bool,
    /// Whether every counter is listed, instead of only the first drifted counters.
    #[serde(skip)]
    pub lists_all: bool,
    /// The count of messages in the partitions' queues when a `targets` run began. These messages are events in flight,
    /// and can belong to any target.
    pub in_flight: Option<u64>,
    /// In a `targets` run, this list has all counters of its targets. In other runs, the list has the first drifted
    /// counters.
    pub targets: Vec<TargetReport>,
}

/// Milliseconds by step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Steps {
    /// The time to load the counters that Redis had lost.
    pub rebuild: u64,
    /// The time to list targets in MySQL.
    pub list: u64,
    /// Sampling Redis.
    pub sample: u64,
    /// The time that the run waited for fences, including `publish_grace`.
    pub fence: u64,
    /// The time to read and recount in MySQL.
    pub read: u64,
    /// The duration of the repairs, including the time to record the repairs in MySQL.
    pub repair: u64,
    /// The time to search Redis for counters that MySQL does not have.
    pub phantoms: u64,
}

impl Steps {
    pub(super) fn add(step: &mut u64, took: Duration) {
        *step += u64::try_from(took.as_millis()).unwrap_or(u64::MAX);
    }

    /// Adds the milliseconds of other steps.
    pub(super) fn merge(&mut self, Self { rebuild, list, sample, fence, read, repair, phantoms }: Self) {
        self.rebuild += rebuild;
        self.list += list;
        self.sample += sample;
        self.fence += fence;
        self.read += read;
        self.repair += repair;
        self.phantoms += phantoms;
    }
}

/// A part of all targets, in the order of kinds and ids.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Slice {
    /// The last target before this slice. `None` if the slice begins with the very first target.
    pub after: Option<String>,
    /// The last target of this slice. `None` if the slice ends with the very last target.
    pub until: Option<String>,
}

/// One counter of a target.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct TargetReport {
    /// `video:42`.
    pub target: String,
    /// The metric's name in `[metrics]`.
    pub metric: String,
    /// The value in Redis at the last measurement.
    pub redis: i64,
    /// The true value at the instant when the last measurement sampled Redis (the cut).
    pub mysql: i64,
    /// The value in `counter` when it was read.
    pub counter: Option<i64>,
    /// The count of the target's like records when `counter` was read; `None` if they were not counted.
    pub rows: Option<i64>,
    /// The amount that was added to Redis.
    pub added: i64,
    /// The result of the comparison.
    pub verdict: Verdict,
}

/// The progress of a run.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    /// Counters that were compared.
    pub checked: u64,
    /// The count of listed rows of `counter`. A target has one row for each partition that wrote to its counters.
    pub done: u64,
    /// The count of all rows of `counter` according to MySQL's statistics. `None` until this count is known.
    pub total: Option<u64>,
    /// Counters that were wrong at both measurements.
    pub drifted: u64,
    /// Suspects that must be measured again.
    pub pending: u64,
    /// The last target of the last page.
    pub place: Option<String>,
    /// The reason why the run waits; `None` while it does not wait.
    pub waiting: Option<String>,
}

impl Report {
    /// The empty report of a run.
    pub(super) fn new(mode: &Mode) -> Self {
        let lists_all = matches!(mode, Mode::Targets(_));
        Self { mode: mode.name(), lists_all, clean: true, ..Self::default() }
    }

    /// Whether the run began with the first target and found nothing wrong.
    pub(super) fn is_clean(&self) -> bool {
        // This pattern lists every field. If you add a field, this code compiles only after you have decided whether
        // the field matters for a clean run.
        let Self {
            clean,
            drifted,
            counters_off,
            left,
            unknown,
            checked: _,
            exact: _,
            repaired: _,
            transient: _,
            busy: _,
            undecided: _,
            phantoms: _,
            drift_sum: _,
            drifted_by_size: _,
            buckets_loaded: _,
            counters_loaded: _,
            mode: _,
            head: _,
            foreign: _,
            steps_ms: _,
            slice: _,
            resumed_run: _,
            cut: _,
            lists_all: _,
            in_flight: _,
            targets: _,
        } = self;
        *clean && drifted + counters_off + left + unknown == 0
    }

    /// Returns how many counters have this verdict.
    pub(super) fn count(&self, verdict: Verdict) -> u64 {
        match verdict {
            Verdict::Exact => self.exact,
            Verdict::Repaired => self.repaired,
            Verdict::Drifted => self.drifted.saturating_sub(self.repaired + self.left),
            Verdict::Transient => self.transient,
            Verdict::Undecided => self.undecided,
            Verdict::Unknown => self.unknown,
            Verdict::Left => self.left,
        }
    }

    /// Whether the report's list has room for one more counter.
    pub(super) fn has_room(&self) -> bool {
        self.lists_all || self.targets.len() < LISTED_MAX
    }
}

impl TargetReport {
    pub(super) fn unknown(target: String, metric: String) -> Self {
        let verdict = Verdict::Unknown;
        Self { target, metric, redis: 0, mysql: 0, counter: None, rows: None, added: 0, verdict }
    }
}

impl RunReport for Report {
    fn head(&self) -> &RunHead {
        &self.head
    }

    fn head_mut(&mut self) -> &mut RunHead {
        &mut self.head
    }

    fn cut(&self) -> Option<Micros> {
        self.cut.map(Micros)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::telemetry::status::Reconciled;

    #[test]
    fn the_status_reads_the_numbers_of_a_report() {
        let report = Report {
            mode: "full",
            checked: 1,
            drifted: 2,
            repaired: 3,
            transient: 4,
            unknown: 5,
            busy: 6,
            exact: 7,
            undecided: 8,
            left: 9,
            ..Report::default()
        };
        let read = serde_json::from_value(serde_json::to_value(report).unwrap()).unwrap();
        let Reconciled { mode, checked, drifted, repaired, transient, unknown, busy, exact, undecided, left, .. } =
            read;
        assert_eq!(mode, "full");
        assert_eq!(
            [checked, drifted, repaired, transient, unknown, busy, exact, undecided, left],
            [1, 2, 3, 4, 5, 6, 7, 8, 9]
        );
    }
}
