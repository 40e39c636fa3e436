//! The result and the progress of a reconcile, for operators and for programs.

mod text;

use std::time::Duration;

use serde::Serialize;

use super::Mode;
pub(super) use tallyd_base::jobs::run::LISTED_MAX;
use tallyd_base::jobs::run::{RunHead, RunReport, has_run_head};
pub use tallyd_base::telemetry::Verdict;
use tallyd_core::model::Micros;
use tallyd_core::sizes::Sizes;

/// Numbers are numbers of counters unless said otherwise. A counter is one metric of one target.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Report {
    pub mode: &'static str,
    #[serde(flatten)]
    pub head: RunHead,
    pub checked: u64,
    pub exact: u64,
    pub drifted: u64,
    pub repaired: u64,
    /// Wrong only at the first measurement, or in the other direction at the second one: events were in flight.
    pub transient: u64,
    /// At each measurement, MySQL's value already had an event newer than the cut.
    pub busy: u64,
    /// At each sample, an event's time was too close to the sample's to know whether the sample includes the event.
    pub undecided: u64,
    pub unknown: u64,
    /// The bucket changed, the counter would have gone below zero, or the repairs of the metric had stopped.
    pub left: u64,
    pub phantoms: u64,
    pub drift_sum: u64,
    pub drifted_by_size: Sizes,
    pub counters_off: u64,
    pub buckets_loaded: u64,
    pub counters_loaded: u64,
    pub foreign: Vec<String>,
    /// Milliseconds. The steps of two pages overlap, so the sum can exceed the total time.
    pub steps_ms: Steps,
    pub slice: Option<Slice>,
    pub resumed_run: Option<u64>,
    /// Microseconds since 1970.
    pub cut: Option<i64>,
    /// From the first target to the last, including the runs that this run resumed.
    #[serde(skip)]
    pub clean: bool,
    #[serde(skip)]
    pub lists_all: bool,
    pub in_flight: Option<u64>,
    pub targets: Vec<TargetReport>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Steps {
    pub rebuild: u64,
    pub list: u64,
    pub sample: u64,
    pub fence: u64,
    pub read: u64,
    pub repair: u64,
    pub phantoms: u64,
}

impl Steps {
    pub(super) fn add(step: &mut u64, took: Duration) {
        *step += u64::try_from(took.as_millis()).unwrap_or(u64::MAX);
    }

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

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Slice {
    pub after: Option<String>,
    pub until: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct TargetReport {
    pub target: String,
    pub metric: String,
    pub redis: i64,
    pub mysql: i64,
    pub counter: Option<i64>,
    pub rows: Option<i64>,
    pub added: i64,
    pub verdict: Verdict,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    pub checked: u64,
    pub done: u64,
    pub total: Option<u64>,
    pub drifted: u64,
    pub pending: u64,
    pub place: Option<String>,
}

impl Report {
    pub(super) fn new(mode: &Mode) -> Self {
        let lists_all = matches!(mode, Mode::Targets(_));
        Self { mode: mode.name(), lists_all, clean: true, ..Self::default() }
    }

    pub(super) fn is_clean(&self) -> bool {
        // Lists every field, so that a new field compiles only after a decision whether it matters.
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
    has_run_head!();

    fn cut(&self) -> Option<Micros> {
        self.cut.map(Micros)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tallyd_base::telemetry::Reconciled;

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
