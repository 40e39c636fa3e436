//! What a reconcile found and did, for people and for programs.

use std::fmt;
use std::time::Duration;

use serde::Serialize;

use crate::config::LIKE;
use crate::jobs::runner::{self, Outcome};
use crate::model::Micros;

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
    /// Right at the first look.
    pub exact: u64,
    /// Off at two looks, in one direction.
    pub drifted: u64,
    /// Of those, repaired.
    pub repaired: u64,
    /// Off at the first look, right or otherwise off at the second: events on the way.
    pub transient: u64,
    /// Judged by watching their events, because something newer than the cut was there at every look.
    pub busy: u64,
    /// Not judged: an event was so close to each cut, by a producer's clock, that nobody knows which was first.
    pub undecided: u64,
    /// Not compared: nobody has loaded their bucket, so what is missing is unknown.
    pub unknown: u64,
    /// Not repaired: the bucket changed between look and repair, or the number would have gone below zero.
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
    /// How the run ended.
    pub ended: End,
    /// Why it ended before all was looked at, where it did.
    pub ended_early: Option<String>,
    /// Messages that the partitions held when a `targets` run began: events on the way, of whichever target.
    pub in_flight: Option<u64>,
    /// Each target of a `targets` run, and the first drifted ones of any other.
    pub targets: Vec<TargetReport>,
}

/// Drifts by size.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Sizes {
    /// By one.
    #[serde(rename = "1")]
    pub one: u64,
    /// By 2 to 9.
    #[serde(rename = "2-9")]
    pub some: u64,
    /// By 10 to 99.
    #[serde(rename = "10-99")]
    pub many: u64,
    /// By more.
    #[serde(rename = "100+")]
    pub most: u64,
}

impl Sizes {
    pub(super) fn note(&mut self, drift: u64) {
        *match drift {
            0..=1 => &mut self.one,
            2..=9 => &mut self.some,
            10..=99 => &mut self.many,
            _ => &mut self.most,
        } += 1;
    }
}

/// How often a run found that a server has enough to do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Waits {
    /// MySQL ran more threads than `threads_running_max`.
    pub threads_running: u64,
    /// Redis took longer to answer than `redis_latency_max_ms`.
    pub redis_latency: u64,
    /// A partition had more messages than `queue_depth_max`.
    pub queue_depth: u64,
    /// A replica was further behind than `max_lag`.
    pub replica_lag: u64,
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
    /// `exact`, `repaired`, `drifted`, `transient`, `undecided`, `unknown` or `left`.
    pub verdict: &'static str,
}

/// Drifted targets that a report lists at most: the numbers tell of the rest.
pub(super) const LISTED_MAX: usize = 20;

impl Report {
    /// Notes why the run ended early.
    pub(super) fn end(&mut self, ended: End, why: String) {
        self.ended = ended;
        self.ended_early = Some(why);
    }
}

impl TargetReport {
    pub(super) fn unknown(target: String, metric: String) -> Self {
        Self { target, metric, redis: 0, mysql: 0, counter: None, rows: None, added: 0, verdict: "unknown" }
    }

    /// The verdict in words.
    fn why(&self) -> &'static str {
        match self.verdict {
            "exact" => "Redis is right",
            "repaired" => "Redis was off at two cuts, and got the difference added",
            "drifted" => "Redis is off at two cuts; a dry run adds nothing",
            "transient" => "Redis was off at one cut only: an event was on its way; nothing was added",
            "undecided" => {
                "events came so close to each cut that nobody knows which was first; the next run looks again"
            }
            "unknown" => "Redis has lost its bucket, or its field holds no numbers; a run without --target loads it",
            _ => "Redis is off, but its bucket changed meanwhile or the number would go below zero: run again",
        }
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

/// A row of `name value` pairs; nothing where all are zero.
fn write_row<const N: usize>(
    f: &mut fmt::Formatter<'_>,
    title: &str,
    pairs: [(&str, u64); N],
    show: impl Fn(u64) -> String,
) -> fmt::Result {
    let shown: Vec<String> =
        pairs.iter().filter(|(_, value)| *value > 0).map(|(name, value)| format!("{name}: {}", show(*value))).collect();
    if shown.is_empty() { Ok(()) } else { write!(f, "\n  {title:<15} {}", shown.join(", ")) }
}

/// One line for a log; with `{:#}` more of them, for a person.
impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { mode, checked, exact, drifted, repaired, transient, drift_sum, .. } = self;
        write!(f, "{mode}: {checked} counters checked, {exact} exact, {drifted} drifted by {drift_sum} in all, ")?;
        write!(f, "{repaired} repaired, {transient} transient")?;
        for (count, what) in [
            (self.busy, "judged while busy"),
            (self.undecided, "undecided (events too close to the cuts)"),
            (self.unknown, "unknown (bucket not loaded)"),
            (self.left, "left for the next run"),
            (self.phantoms, "in Redis alone"),
            (self.counters_off, "rows of counter off"),
            (self.buckets_loaded, "lost buckets loaded"),
            (self.counters_loaded, "counters in them"),
            (self.waited_s, "seconds waited for the servers"),
        ] {
            if count > 0 {
                write!(f, ", {count} {what}")?;
            }
        }
        if !self.foreign.is_empty() {
            write!(
                f,
                "; keys that hold no bucket: {}: delete them, and the next run loads them",
                self.foreign.join(", ")
            )?;
        }
        if self.dry_run {
            f.write_str("; a dry run: nothing was changed")?;
        }
        if let Some(why) = &self.ended_early {
            write!(f, "; ended early: {why}")?;
        }
        if f.alternate() { self.write_details(f) } else { Ok(()) }
    }
}

impl Report {
    /// What follows the sentence, for a person: a line for each of several facts, and for each listed target.
    fn write_details(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { mode, drifted_by_size: sizes, waits, steps_ms: steps, .. } = self;
        let sizes = [("1", sizes.one), ("2-9", sizes.some), ("10-99", sizes.many), ("100+", sizes.most)];
        write_row(f, "drift by size", sizes, |count| count.to_string())?;
        let waits = [
            ("Threads_running", waits.threads_running),
            ("Redis' latency", waits.redis_latency),
            ("partitions' depth", waits.queue_depth),
            ("replicas' lag", waits.replica_lag),
        ];
        write_row(f, "waits for", waits, |count| count.to_string())?;
        let steps = [
            ("rebuild", steps.rebuild),
            ("list", steps.list),
            ("sample", steps.sample),
            ("fence", steps.fence),
            ("read", steps.read),
            ("repair", steps.repair),
            ("phantoms", steps.phantoms),
        ];
        write_row(f, "time by step", steps, |ms| format!("{}.{:01} s", ms / 1_000, ms % 1_000 / 100))?;
        if let Some(Slice { after, until }) = &self.slice {
            let (after, until) =
                (after.as_deref().unwrap_or("the first target"), until.as_deref().unwrap_or("the last"));
            write!(f, "\n  slice           from {after} to {until}")?;
        }
        if let Some(in_flight) = self.in_flight {
            write!(f, "\n  on the way      {in_flight} messages, of whichever target")?;
        }
        for line in &self.targets {
            let TargetReport { target, metric, redis, mysql, counter, rows, added, verdict } = line;
            let metric = if metric == LIKE { String::new() } else { format!(" {metric}") };
            write!(f, "\n  {target}{metric}: {verdict}, Redis {redis}, MySQL {mysql}")?;
            if *added != 0 {
                write!(f, ", added {added:+}")?;
            }
            if *mode == "targets" {
                write!(f, "\n    {}", line.why())?;
                for (number, what) in [(rows, "like records"), (counter, "in counter")] {
                    if let Some(number) = number {
                        write!(f, "; {number} {what}")?;
                    }
                }
                if *verdict != "unknown" && counter.is_some_and(|counter| counter != *mysql) {
                    f.write_str("; events newer than the cut are in MySQL already")?;
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_verdict_has_words_of_its_own() {
        let words: std::collections::BTreeSet<&str> =
            ["exact", "repaired", "drifted", "transient", "undecided", "unknown", "left"]
                .map(|verdict| TargetReport { verdict, ..TargetReport::unknown(String::new(), String::new()) }.why())
                .into();
        assert_eq!(words.len(), 7);
    }

    #[test]
    fn a_report_reads_as_a_sentence() {
        let line = TargetReport {
            target: "video:42".to_owned(),
            metric: "like".to_owned(),
            redis: 7,
            mysql: 5,
            counter: Some(5),
            rows: Some(5),
            added: -2,
            verdict: "repaired",
        };
        let report = Report {
            mode: "full",
            checked: 10,
            exact: 8,
            drifted: 1,
            repaired: 1,
            transient: 1,
            drift_sum: 2,
            busy: 3,
            drifted_by_size: Sizes { some: 1, ..Sizes::default() },
            steps_ms: Steps { sample: 1_234, read: 60, ..Steps::default() },
            targets: vec![line],
            ..Report::default()
        };
        assert_eq!(
            format!("{report:#}"),
            "full: 10 counters checked, 8 exact, 1 drifted by 2 in all, 1 repaired, 1 transient, 3 judged while busy\n  \
             drift by size   2-9: 1\n  \
             time by step    sample: 1.2 s, read: 0.0 s\n  \
             video:42: repaired, Redis 7, MySQL 5, added -2"
        );
    }
}
