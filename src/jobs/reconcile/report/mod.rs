//! What a reconcile found and did, and how far it is, for people and for programs.

mod text;

use std::time::Duration;

use serde::Serialize;

use super::Mode;
use crate::jobs::runner::{self, Outcome};
pub use crate::servers::pace::Waits;
pub use crate::telemetry::Verdict;
use tallyd_core::model::Micros;
use tallyd_core::sizes::Sizes;

/// How a run ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum End {
    /// All was looked at.
    #[default]
    Done,
    /// `--run-time` was over.
    TimeOver,
    /// It was told to stop.
    Stopped,
    /// It would have repaired more than is allowed without `--force`.
    #[serde(rename = "braked")]
    LimitExceeded,
}

/// The result of one run. All numbers are of counters, which are a target's number of one metric each, unless said otherwise.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Report {
    /// `changed`, `full`, `scrub`, `rebuild`, `layout` or `targets`.
    pub mode: &'static str,
    /// Nothing was changed, only looked at.
    pub dry_run: bool,
    /// Compared at a cut.
    pub checked: u64,
    /// Right at the first measurement.
    pub exact: u64,
    /// Off at two measurements, in one direction.
    pub drifted: u64,
    /// Of those, repaired.
    pub repaired: u64,
    /// Off at the first measurement, right or off in the other direction at the second: events in flight.
    pub transient: u64,
    /// Judged by watching their events, because something newer than the cut was there at every measurement.
    pub busy: u64,
    /// Not judged: an event was so close to each cut, by a producer's clock, that nobody knows which was first.
    pub undecided: u64,
    /// Not compared: nobody has loaded their bucket, so what is missing is unknown.
    pub unknown: u64,
    /// Not repaired: the bucket changed between measurement and repair, the number would have gone below zero, or repairs of the metric
    /// stopped.
    pub left: u64,
    /// In Redis, but not in MySQL.
    pub phantoms: u64,
    /// The sum of all drifts, without signs.
    pub drift_sum: u64,
    /// The drifted ones by the size of their drift, without sign.
    pub drifted_by_size: Sizes,
    /// Rows of `counter` that differed from like_record, and were corrected unless this is a dry run.
    pub counters_off: u64,
    /// Buckets that Redis had lost, and that this run has loaded.
    pub buckets_loaded: u64,
    /// Counters that were added to them.
    pub counters_loaded: u64,
    /// Some of the keys that hold something else than a bucket: what they should hold is unknown.
    pub foreign: Vec<String>,
    /// Seconds that the run waited because a server had enough to do.
    pub waited_s: u64,
    /// How often it found that, by what it was.
    pub waits: Waits,
    /// The last reason, in words.
    pub waited_for: Option<String>,
    /// Milliseconds that each step took. Steps of two pages overlap: their sum may be more than the whole.
    pub steps_ms: Steps,
    /// What a `scrub` run went through: the last target before it, and its last one.
    pub slice: Option<Slice>,
    /// The run that this one went on from.
    pub resumed_run: Option<u64>,
    /// The instant, in microseconds since the epoch, up to which every change has been compared.
    pub cut: Option<i64>,
    /// Whether nothing was off, of a full run from the first target on, also where several runs went on from each other.
    #[serde(skip)]
    pub clean: bool,
    /// Whether every counter is listed, and not only the first drifted ones.
    #[serde(skip)]
    pub lists_all: bool,
    /// How the run ended.
    pub ended: End,
    /// Why it ended before all was looked at, where it did.
    pub ended_early: Option<String>,
    /// Messages that the partitions held when a `targets` run began: events on the way, of whichever target.
    pub in_flight: Option<u64>,
    /// Each target of a `targets` run, and the first drifted ones of any other.
    pub targets: Vec<TargetReport>,
}

/// Milliseconds by step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Steps {
    /// Loading what Redis had lost.
    pub rebuild: u64,
    /// Listing targets in MySQL.
    pub list: u64,
    /// Sampling Redis.
    pub sample: u64,
    /// Waiting for the fence, with `publish_grace` where there was one.
    pub fence: u64,
    /// Reading and recounting in MySQL.
    pub read: u64,
    /// Noting and making repairs.
    pub repair: u64,
    /// Searching Redis for what MySQL doesn't know.
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
    /// The last target before it; none where it begins with the first one of all.
    pub after: Option<String>,
    /// Its last target; none where it ends with the last one of all.
    pub until: Option<String>,
}

/// One target in words and numbers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct TargetReport {
    /// `video:42`.
    pub target: String,
    /// Which of its numbers: a name of `[metrics]`.
    pub metric: String,
    /// The number in Redis at the last look.
    pub redis: i64,
    /// Its true number as of the same cut.
    pub mysql: i64,
    /// Its number in `counter` when that was read.
    pub counter: Option<i64>,
    /// Its like records then; only where they were counted.
    pub rows: Option<i64>,
    /// What was added to Redis.
    pub added: i64,
    /// What was found of it, and done about it.
    pub verdict: Verdict,
}

/// Drifted targets that a report lists at most: the numbers tell of the rest.
pub(super) const LISTED_MAX: usize = 20;

/// How far a run is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Progress {
    /// Targets that were compared.
    pub checked: u64,
    /// Rows of `counter` that were listed: a target has one for each partition that wrote it.
    pub done: u64,
    /// All rows, by the server's statistics; `None` before that is known.
    pub total: Option<u64>,
    /// Off at two measurements.
    pub drifted: u64,
    /// Suspects that are to be measured again.
    pub pending: u64,
    /// The last target of the last page.
    pub place: Option<String>,
    /// Why the run waits; `None` while it doesn't.
    pub waiting: Option<String>,
}

impl Report {
    /// The empty report of a run.
    pub(super) fn new(mode: &Mode, dry_run: bool) -> Self {
        let lists_all = matches!(mode, Mode::Targets(_));
        Self { mode: mode.name(), dry_run, lists_all, clean: true, ..Self::default() }
    }

    /// Notes why the run ended early.
    pub(super) fn end(&mut self, ended: End, why: String) {
        self.ended = ended;
        self.ended_early = Some(why);
    }

    /// Whether nothing was off, from the first target on.
    pub(super) fn is_clean(&self) -> bool {
        // Every field is here, so that a new number does not compile before somebody decides whether it is clean.
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
            dry_run: _,
            foreign: _,
            waited_s: _,
            waits: _,
            waited_for: _,
            steps_ms: _,
            slice: _,
            resumed_run: _,
            cut: _,
            lists_all: _,
            ended: _,
            ended_early: _,
            in_flight: _,
            targets: _,
        } = self;
        *clean && drifted + counters_off + left + unknown == 0
    }

    /// How many counters have this verdict.
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

    /// Whether another counter can be listed.
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

impl runner::Report for Report {
    fn outcome(&self) -> Outcome {
        match self.ended {
            _ if self.dry_run => Outcome::DryRun,
            End::Done => Outcome::Done,
            End::Stopped | End::TimeOver => Outcome::Stopped,
            End::LimitExceeded => Outcome::LimitExceeded,
        }
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
