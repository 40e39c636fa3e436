//! The report of a run, for operators and for programs.

use std::fmt;

use serde::Serialize;

pub use crate::servers::pace::Waits;
use tallyd_core::model::Micros;
use tallyd_mysql::jobs::Outcome;

/// A report, with the part that all reports have in common.
pub trait RunReport: Serialize + fmt::Display + Send {
    fn head(&self) -> &RunHead;

    fn head_mut(&mut self) -> &mut RunHead;

    fn outcome(&self) -> Outcome {
        self.head().outcome()
    }

    /// Returns whether the run did all its work. If the run did not, the mode is still due, and the daemon runs the
    /// mode again.
    fn is_done(&self) -> bool {
        self.outcome() == Outcome::Done
    }

    /// The time up to which a reconcile has compared everything.
    fn cut(&self) -> Option<Micros> {
        None
    }
}

/// How a run ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Ended {
    #[default]
    Done,
    /// The run reached its `--run-time`.
    TimeOver,
    Stopped,
    /// The run would have changed more than the safety limit allows without `--force`.
    #[serde(rename = "braked")]
    LimitExceeded,
}

/// The part that all reports have in common.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct RunHead {
    /// Whether the run was a dry run, which compares and changes nothing.
    pub dry_run: bool,
    pub ended: Ended,
    /// The reason why the run ended before its work was done. `None` if the run did everything.
    pub ended_early: Option<String>,
    /// The seconds that the run waited because a server was busy.
    pub waited_s: u64,
    /// For each reason to wait: how often the run waited.
    pub waits: Waits,
    /// The last reason for waiting, as text.
    pub waited_for: Option<String>,
}

impl RunHead {
    pub fn end(&mut self, ended: Ended, why: impl Into<String>) {
        self.ended = ended;
        self.ended_early = Some(why.into());
    }

    pub fn outcome(&self) -> Outcome {
        match self.ended {
            _ if self.dry_run => Outcome::DryRun,
            Ended::Done => Outcome::Done,
            Ended::TimeOver | Ended::Stopped => Outcome::Stopped,
            Ended::LimitExceeded => Outcome::LimitExceeded,
        }
    }
}

/// Writes the end of a report's line.
impl fmt::Display for RunHead {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.dry_run {
            f.write_str("; a dry run: nothing was changed")?;
        }
        self.ended_early.as_ref().map_or(Ok(()), |why| write!(f, "; ended early: {why}"))
    }
}
