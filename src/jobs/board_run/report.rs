//! The result and the progress of a run.

use std::fmt;
use std::time::{Duration, Instant};

use serde::Serialize;
use tracing::info;

use super::Reason;
use tallyd_base::jobs::run::{Ended, RunHead, RunReport, has_run_head};
use tallyd_base::jobs::runner::RunOutcome;
use tallyd_base::runtime::progress::{RunProgress, left, percent, rate, spoken};
use tallyd_core::model::BoardPeriod;

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Report {
    #[serde(flatten)]
    pub head: RunHead,
    pub problem: Option<String>,
    pub periods: Vec<PeriodReport>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct PeriodReport {
    pub board: String,
    pub period: String,
    pub outcome: Outcome,
    pub members: u64,
    pub left_out: u64,
    pub late_members: u64,
    pub took_ms: u64,
    pub reason: Option<String>,
    /// Whether the period stays as it is until an operator acts.
    #[serde(skip)]
    pub waits_for_operator: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Outcome {
    Archived,
    Ended,
    Waiting,
    Saved,
    Restored,
    /// The period is over and, as expected, Redis no longer has the board. So the run deleted the snapshot.
    Forgotten,
    Pruned,
    Kept,
    WouldArchive,
    WouldEnd,
    WouldPrune,
    WouldRestore,
    Open,
    Nothing,
}

impl Outcome {
    fn text(self) -> &'static str {
        match self {
            Self::Archived => "archived",
            Self::Ended => "ended",
            Self::Waiting => "waiting",
            Self::Saved => "saved",
            Self::Restored => "restored",
            Self::Forgotten => "forgotten",
            Self::Pruned => "pruned",
            Self::Kept => "kept",
            Self::WouldArchive => "would be archived",
            Self::WouldEnd => "would be ended",
            Self::WouldPrune => "would be pruned",
            Self::WouldRestore => "would be restored",
            Self::Open => "open",
            Self::Nothing => "nothing there",
        }
    }
}

impl Report {
    fn count(&self, outcome: Outcome) -> usize {
        self.periods.iter().filter(|period| period.outcome == outcome).count()
    }
}

impl PeriodReport {
    pub(in crate::jobs) fn new(at: &BoardPeriod, outcome: Outcome) -> Self {
        let BoardPeriod { board, period } = at.clone();
        let (members, left_out, late_members, took_ms) = (0, 0, 0, 0);
        Self {
            board,
            period,
            outcome,
            members,
            left_out,
            late_members,
            took_ms,
            reason: None,
            waits_for_operator: false,
        }
    }

    pub(in crate::jobs) fn kept(at: &BoardPeriod, reason: &Reason) -> Self {
        let waits_for_operator = reason.is_of_zset_that_returned();
        Self { waits_for_operator, ..Self::new(at, Outcome::Kept).because(reason) }
    }

    pub(in crate::jobs) fn after(self, took: Duration) -> Self {
        let is_work = matches!(
            self.outcome,
            Outcome::Archived
                | Outcome::Ended
                | Outcome::Saved
                | Outcome::Restored
                | Outcome::Pruned
                | Outcome::Forgotten
        );
        let took_ms = if is_work { u64::try_from(took.as_millis()).unwrap_or(u64::MAX) } else { 0 };
        Self { took_ms, ..self }
    }

    pub(in crate::jobs) fn because(self, reason: impl fmt::Display) -> Self {
        Self { reason: Some(reason.to_string()), ..self }
    }
}

impl RunReport for Report {
    has_run_head!();

    fn outcome(&self) -> RunOutcome {
        let would = [Outcome::WouldArchive, Outcome::WouldEnd, Outcome::WouldPrune, Outcome::WouldRestore];
        let mut kept = self.periods.iter().filter(|period| period.outcome == Outcome::Kept).peekable();
        let is_any_kept = kept.peek().is_some();
        if self.head.ended == Ended::Stopped {
            RunOutcome::Stopped
        } else if self.problem.is_some() || kept.any(|period| !period.waits_for_operator) {
            RunOutcome::Failed
        } else if is_any_kept {
            RunOutcome::Refused
        } else if self.head.dry_run || would.iter().any(|outcome| self.count(*outcome) > 0) {
            RunOutcome::DryRun
        } else {
            RunOutcome::Done
        }
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let separator = if f.alternate() { "\n" } else { "; " };
        if f.alternate() {
            for period in &self.periods {
                write!(f, "{period}{separator}")?;
            }
        }
        if let Some(problem) = &self.problem {
            return f.write_str(problem);
        }
        let mut outcomes: Vec<Outcome> = self.periods.iter().map(|period| period.outcome).collect();
        outcomes.sort_unstable();
        outcomes.dedup();
        let counts: Vec<String> =
            outcomes.iter().map(|outcome| format!("{} {}", self.count(*outcome), outcome.text())).collect();
        f.write_str(if counts.is_empty() { "no boards to process" } else { "boards: " })?;
        f.write_str(&counts.join(", "))?;
        self.head.ended_early.as_ref().map_or(Ok(()), |why| write!(f, "{separator}ended early: {why}"))
    }
}

impl fmt::Display for PeriodReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}: {}", self.board, self.period, self.outcome.text())?;
        if self.members > 0 {
            write!(f, ", {} members", self.members)?;
        }
        if self.left_out > 0 {
            write!(f, ", {} left out", self.left_out)?;
        }
        if self.late_members > 0 {
            let what = if self.outcome == Outcome::Restored { "added since" } else { "late" };
            write!(f, ", {} {what}", self.late_members)?;
        }
        if self.members > 0 && self.took_ms > 0 {
            let per_s = self.members * 1_000 / self.took_ms;
            write!(f, ", in {:.1} s ({per_s} a second)", self.took_ms as f64 / 1e3)?;
        }
        self.reason.as_ref().map_or(Ok(()), |reason| write!(f, " ({reason})"))
    }
}

#[derive(Clone, Debug, Default)]
pub struct Progress {
    now: Option<(BoardPeriod, Instant)>,
    verb: &'static str,
    pub done: u64,
    total: u64,
}

impl Progress {
    pub(super) fn of(at: &BoardPeriod, verb: &'static str, total: u64) -> Self {
        Self { now: Some((at.clone(), Instant::now())), verb, done: 0, total }
    }
}

impl RunProgress for Progress {
    fn done(&self) -> (u64, Option<u64>) {
        (self.done, Some(self.total).filter(|total| *total > 0))
    }

    fn words(&self, _: Duration) -> String {
        let Self { now: Some((at, since)), verb, done, total } = self else { return "looking for boards".to_owned() };
        let elapsed = since.elapsed();
        let (percent, rate) = (percent(*done, Some(*total)).unwrap_or_default(), rate(*done, elapsed));
        let left = left(*done, Some(*total), elapsed);
        let left = left.map_or_else(String::new, |left| format!(", about {} left", spoken(left)));
        format!("{at}: {done} of {total} members {verb} ({percent} %), {rate} a second{left}")
    }

    fn log(&self, _: Duration, words: &str, _: Option<&str>) {
        let Self { now: Some((BoardPeriod { board, period }, since)), done, total, .. } = self else { return };
        let per_second = rate(*done, since.elapsed());
        let left_s = left(*done, Some(*total), since.elapsed()).map(|left| left.as_secs());
        info!(event = "archive-progress", board, period, done, total, per_second, left_s, "{words}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(outcomes: &[Outcome]) -> Report {
        let at = BoardPeriod { board: "likes".to_owned(), period: "2026-W46".to_owned() };
        let periods = outcomes.iter().map(|outcome| PeriodReport::new(&at, *outcome)).collect();
        Report { periods, ..Report::default() }
    }

    #[test]
    fn a_run_is_done_when_nothing_is_left_to_do() {
        assert!(report(&[]).is_done());
        assert!(report(&[Outcome::Archived, Outcome::Ended, Outcome::Waiting, Outcome::Open]).is_done());
        for left in [Outcome::Kept, Outcome::WouldArchive, Outcome::WouldEnd] {
            assert!(!report(&[Outcome::Archived, left]).is_done(), "{left:?}");
        }
        let head = RunHead { ended: Ended::Stopped, ..RunHead::default() };
        assert!(!Report { head, ..report(&[]) }.is_done());
        let at = BoardPeriod { board: "likes".to_owned(), period: "2026-W46".to_owned() };
        let kept = |reasons: &[Reason]| {
            let periods = reasons.iter().map(|reason| PeriodReport::kept(&at, reason)).collect();
            Report { periods, ..Report::default() }.outcome()
        };
        assert_eq!(
            kept(&[Reason::LatePruned, Reason::Late, Reason::CameBack]),
            RunOutcome::Refused,
            "a run changes nothing"
        );
        assert_eq!(kept(&[Reason::LatePruned, Reason::WrittenJustNow]), RunOutcome::Failed, "the next run can succeed");
        let problem = Report { problem: Some("a clock is wrong".to_owned()), ..report(&[]) };
        assert_eq!((problem.is_done(), format!("{problem:#}")), (false, "a clock is wrong".to_owned()));
    }

    #[test]
    fn a_log_gets_one_line_and_a_person_one_for_each_period() {
        let mut report = report(&[Outcome::Kept, Outcome::Archived, Outcome::Archived]);
        report.periods[0].reason = Some("place 3 differs".to_owned());
        report.periods[1].members = 1_000;
        assert_eq!(report.to_string(), "boards: 2 archived, 1 kept");
        assert_eq!(
            format!("{report:#}"),
            "likes 2026-W46: kept (place 3 differs)\nlikes 2026-W46: archived, 1000 members\n\
             likes 2026-W46: archived\nboards: 2 archived, 1 kept"
        );
        assert_eq!(Report::default().to_string(), "no boards to process");
    }

    #[test]
    fn programs_read_stable_names() {
        let json = serde_json::to_value(report(&[Outcome::WouldArchive])).unwrap();
        assert_eq!(json["periods"][0]["outcome"], "would-archive");
    }

    #[test]
    fn it_says_what_it_is_at() {
        assert_eq!(Progress::default().words(Duration::ZERO), "looking for boards");
        let at = BoardPeriod { board: "likes".to_owned(), period: "2026-W46".to_owned() };
        let progress = Progress { now: Some((at, Instant::now())), verb: "copied", done: 500, total: 2_000 };
        let words = progress.words(Duration::ZERO);
        assert!(words.starts_with("likes 2026-W46: 500 of 2000 members copied (25 %), "), "{words}");
        assert!(words.ends_with(" left"), "{words}");
    }
}
