//! What a reconcile found and did, for people and for programs.

use std::fmt;

use serde::Serialize;

use crate::job;
use crate::model::Micros;

/// The result of one run. All numbers are of targets unless said otherwise.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Report {
    /// `changed`, `full` or `targets`.
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
    /// Judged by watching their events, because something newer than the cut was always there.
    pub busy: u64,
    /// Not compared: nobody has loaded their bucket, so what is missing is unknown. A full run loads it.
    pub unknown: u64,
    /// Not repaired: the bucket changed between look and repair, or the number would have gone below zero.
    pub left: u64,
    /// In Redis, but not in MySQL.
    pub phantoms: u64,
    /// The sum of all drifts, without signs.
    pub drift_sum: u64,
    /// Rows of `counter` that differed from like_record, and were corrected unless this is a dry run.
    pub counters_off: u64,
    /// Buckets of Redis that are loaded since this run.
    pub buckets_loaded: u64,
    /// The instant, in microseconds since the epoch, up to which every change has been compared.
    pub cut: Option<i64>,
    /// Why the run ended before its time, where it did.
    pub ended_early: Option<String>,
    /// Each target of a `targets` run, and the first drifted ones of any other.
    pub targets: Vec<TargetReport>,
}

/// One target in words and numbers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct TargetReport {
    /// `video:42`.
    pub target: String,
    /// Its number in Redis at the last look.
    pub redis: i64,
    /// Its true number as of the same cut.
    pub mysql: i64,
    /// What was added to Redis.
    pub added: i64,
    /// `exact`, `repaired`, `drifted`, `transient`, `unknown` or `left`.
    pub verdict: &'static str,
}

/// Drifted targets that a report lists at most: the numbers tell of the rest.
pub(super) const LISTED_MAX: usize = 20;

impl job::Report for Report {
    fn is_done(&self) -> bool {
        self.ended_early.is_none() && !self.dry_run
    }

    fn cut(&self) -> Option<Micros> {
        self.cut.map(Micros)
    }
}

/// One line for a log; with `{:#}` a line for each listed target too, for a person.
impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { mode, checked, exact, drifted, repaired, transient, drift_sum, .. } = self;
        write!(f, "{mode}: {checked} targets checked, {exact} exact, {drifted} drifted by {drift_sum} in all, ")?;
        write!(f, "{repaired} repaired, {transient} transient")?;
        for (count, what) in [
            (self.busy, "judged while busy"),
            (self.unknown, "unknown (bucket not loaded: run `tallyd reconcile --full`)"),
            (self.left, "left for the next run"),
            (self.phantoms, "in Redis alone"),
            (self.counters_off, "rows of counter off"),
            (self.buckets_loaded, "buckets loaded"),
        ] {
            if count > 0 {
                write!(f, ", {count} {what}")?;
            }
        }
        if self.dry_run {
            f.write_str("; a dry run: nothing was changed")?;
        }
        if let Some(why) = &self.ended_early {
            write!(f, "; ended early: {why}")?;
        }
        let listed = if f.alternate() { self.targets.as_slice() } else { &[] };
        for TargetReport { target, redis, mysql, added, verdict } in listed {
            write!(f, "\n  {target}: {verdict}, Redis {redis}, MySQL {mysql}")?;
            if *added != 0 {
                write!(f, ", added {added:+}")?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_reads_as_a_sentence() {
        let line = TargetReport { target: "video:42".to_owned(), redis: 7, mysql: 5, added: -2, verdict: "repaired" };
        let report = Report {
            mode: "full",
            checked: 10,
            exact: 8,
            drifted: 1,
            repaired: 1,
            transient: 1,
            drift_sum: 2,
            busy: 3,
            targets: vec![line],
            ..Report::default()
        };
        assert_eq!(
            format!("{report:#}"),
            "full: 10 targets checked, 8 exact, 1 drifted by 2 in all, 1 repaired, 1 transient, 3 judged while busy\n  \
             video:42: repaired, Redis 7, MySQL 5, added -2"
        );
    }
}
