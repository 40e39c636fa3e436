//! The report of a run, for operators and for programs.

use std::fmt;

use serde::Serialize;

pub use crate::servers::pace::{Waited, Waits};
use tallyd_core::model::Micros;
use tallyd_mysql::jobs::RunOutcome;

pub trait RunReport: Serialize + fmt::Display + Send {
    fn head(&self) -> &RunHead;

    fn head_mut(&mut self) -> &mut RunHead;

    fn outcome(&self) -> RunOutcome {
        self.head().outcome()
    }

    /// If not, the mode is still due, and the daemon runs it again.
    fn is_done(&self) -> bool {
        self.outcome() == RunOutcome::Done
    }

    fn cut(&self) -> Option<Micros> {
        None
    }
}

/// Implements the accessors of [`RunReport`] for a report whose field `head` is its [`RunHead`].
#[macro_export]
macro_rules! has_run_head {
    () => {
        fn head(&self) -> &$crate::jobs::run::RunHead {
            &self.head
        }

        fn head_mut(&mut self) -> &mut $crate::jobs::run::RunHead {
            &mut self.head
        }
    };
}
pub use has_run_head;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Ended {
    #[default]
    Done,
    TimeOver,
    Stopped,
    #[serde(rename = "braked")]
    LimitExceeded,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct RunHead {
    pub dry_run: bool,
    pub ended: Ended,
    pub ended_early: Option<String>,
    #[serde(flatten)]
    pub waited: Waited,
}

impl RunHead {
    pub fn end(&mut self, ended: Ended, why: impl Into<String>) {
        self.ended = ended;
        self.ended_early = Some(why.into());
    }

    pub fn outcome(&self) -> RunOutcome {
        match self.ended {
            _ if self.dry_run => RunOutcome::DryRun,
            Ended::Done => RunOutcome::Done,
            Ended::TimeOver | Ended::Stopped => RunOutcome::Stopped,
            Ended::LimitExceeded => RunOutcome::LimitExceeded,
        }
    }
}

impl fmt::Display for RunHead {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.dry_run {
            f.write_str("; a dry run: nothing was changed")?;
        }
        self.ended_early.as_ref().map_or(Ok(()), |why| write!(f, "; ended early: {why}"))
    }
}
