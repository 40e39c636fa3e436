//! Reports and progress as text.

use std::fmt::{self, Write};
use std::time::Duration;

use tracing::info;

use super::{Progress, Report, Slice, TargetReport, Verdict};
use tallyd_base::config::LIKE;
use tallyd_base::jobs::run::{RunHead, Waited};
use tallyd_base::runtime::progress::{RunProgress, left, percent, rate, spoken};

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

/// Writes one line for the log. With `{:#}` it writes several lines for an operator.
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
            (self.phantoms, "only in Redis"),
            (self.counters_off, "wrong rows of counter"),
            (self.buckets_loaded, "lost buckets loaded"),
            (self.counters_loaded, "counters in them"),
            (self.head.waited.waited_s, "seconds waited for the servers"),
        ] {
            if count > 0 {
                write!(f, ", {count} {what}")?;
            }
        }
        if !self.foreign.is_empty() {
            write!(
                f,
                "; keys that are not buckets: {}. Delete them, and the next run loads the buckets",
                self.foreign.join(", ")
            )?;
        }
        write!(f, "{}", self.head)?;
        if f.alternate() { self.write_details(f) } else { Ok(()) }
    }
}

impl Report {
    fn write_details(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            drifted_by_size: sizes, head: RunHead { waited: Waited { waits, .. }, .. }, steps_ms: steps, ..
        } = self;
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
            write!(f, "\n  in flight       {in_flight} messages, of any target")?;
        }
        for line in &self.targets {
            let TargetReport { target, metric, redis, mysql, counter, rows, added, verdict } = line;
            let metric = if metric == LIKE { String::new() } else { format!(" {metric}") };
            let word = verdict.as_str();
            write!(f, "\n  {target}{metric}: {word}, Redis {redis}, MySQL {mysql}")?;
            if *added != 0 {
                write!(f, ", added {added:+}")?;
            }
            if self.lists_all {
                write!(f, "\n    {}", verdict.why())?;
                for (number, what) in [(rows, "like records"), (counter, "in counter")] {
                    if let Some(number) = number {
                        write!(f, "; {number} {what}")?;
                    }
                }
                if *verdict != Verdict::Unknown && counter.is_some_and(|counter| counter != *mysql) {
                    f.write_str("; MySQL already has events that are newer than the sample")?;
                }
            }
        }
        Ok(())
    }
}

impl RunProgress for Progress {
    fn done(&self) -> (u64, Option<u64>) {
        (self.done, self.total)
    }

    fn words(&self, elapsed: Duration) -> String {
        let mut text = format!("{} counters checked", self.checked);
        if let Some(percent) = percent(self.done, self.total) {
            // Writing to a `String` cannot fail.
            let _ = write!(text, " (about {percent} %)");
        }
        let _ = write!(text, ", {} a second", rate(self.checked, elapsed));
        if let Some(left) = left(self.done, self.total, elapsed) {
            let _ = write!(text, ", about {} left", spoken(left));
        }
        let _ = write!(text, ", {} drifted, {} to be measured again", self.drifted, self.pending);
        if let Some(place) = &self.place {
            let _ = write!(text, ", now after {place}");
        }
        text
    }

    fn log(&self, elapsed: Duration, words: &str, waiting: Option<&str>) {
        let Self { checked, drifted, pending, .. } = *self;
        let per_second = rate(checked, elapsed);
        let percent = percent(self.done, self.total);
        let left_s = left(self.done, self.total, elapsed).map(|left| left.as_secs());
        let place = self.place.as_deref();
        info!(
            event = "reconcile-progress",
            checked, percent, left_s, per_second, drifted, pending, place, waiting, "{words}"
        );
    }
}

#[cfg(test)]
mod tests {
    use super::super::Steps;
    use super::*;
    use tallyd_base::jobs::run::{Ended, Waits};
    use tallyd_core::sizes::Sizes;

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
            verdict: Verdict::Repaired,
        };
        let waits = Waits { threads_running: 1, redis_latency: 2, queue_depth: 3, replica_lag: 4 };
        let report = Report {
            mode: "full",
            head: RunHead {
                dry_run: true,
                ended: Ended::Stopped,
                ended_early: Some("it was stopped".to_owned()),
                waited: Waited { waited_s: 13, waits, waited_for: Some("a reason".to_owned()) },
            },
            checked: 100,
            exact: 80,
            drifted: 1,
            repaired: 2,
            transient: 3,
            busy: 4,
            undecided: 5,
            unknown: 6,
            left: 7,
            phantoms: 8,
            drift_sum: 9,
            drifted_by_size: Sizes { one: 1, some: 2, many: 3, most: 4 },
            counters_off: 10,
            buckets_loaded: 11,
            counters_loaded: 12,
            foreign: vec!["a".to_owned(), "b".to_owned()],
            steps_ms: Steps {
                rebuild: 1_234,
                list: 60,
                sample: 100,
                fence: 200,
                read: 300,
                repair: 400,
                phantoms: 500,
            },
            slice: Some(Slice { after: Some("video:1".to_owned()), until: None }),
            resumed_run: Some(14),
            cut: Some(15),
            in_flight: Some(16),
            targets: vec![line],
            ..Report::default()
        };
        assert_eq!(
            format!("{report:#}"),
            "full: 100 counters checked, 80 exact, 1 drifted by 9 in all, 2 repaired, 3 transient, 4 judged while busy, \
             5 undecided (events too close to the cuts), 6 unknown (bucket not loaded), 7 left for the next run, \
             8 only in Redis, 10 wrong rows of counter, 11 lost buckets loaded, 12 counters in them, \
             13 seconds waited for the servers; keys that are not buckets: a, b. Delete them, and the next run loads the buckets; \
             a dry run: nothing was changed; ended early: it was stopped\n  \
             drift by size   1: 1, 2-9: 2, 10-99: 3, 100+: 4\n  \
             waits for       Threads_running: 1, Redis' latency: 2, partitions' depth: 3, replicas' lag: 4\n  \
             time by step    rebuild: 1.2 s, list: 0.0 s, sample: 0.1 s, fence: 0.2 s, read: 0.3 s, repair: 0.4 s, \
             phantoms: 0.5 s\n  \
             slice           from video:1 to the last\n  \
             in flight       16 messages, of any target\n  \
             video:42: repaired, Redis 7, MySQL 5, added -2"
        );
        let short = Report { mode: "changed", checked: 2, exact: 2, ..Report::default() };
        let words = "changed: 2 counters checked, 2 exact, 0 drifted by 0 in all, 0 repaired, 0 transient";
        assert_eq!(format!("{short:#}"), words);
    }

    #[test]
    fn it_says_how_long_the_rest_takes() {
        let progress = Progress { checked: 100, done: 200, total: Some(1_000), drifted: 3, ..Progress::default() };
        assert_eq!(
            progress.words(Duration::from_secs(10)),
            "100 counters checked (about 20 %), 10 a second, about 40 s left, 3 drifted, 0 to be measured again"
        );
        assert!(Progress::default().words(Duration::ZERO).starts_with("0 counters checked, 0 a second, 0 drifted"));
    }
}
