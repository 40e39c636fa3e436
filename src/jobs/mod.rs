//! The daemon's jobs. Jobs run on a schedule or on request. Across all daemons, each job has at most one run at a time.
//!
//! `table` has a row for each mode of each job. `schedule` decides which mode is due. [`run`] is the shape of a run, and
//! [`runner`] holds the job's lock during the run. [`fence`] waits for the events in flight. The jobs never call each other.

pub mod archive;
mod board_run;
pub mod fence;
pub mod filters;
pub(crate) mod pages;
pub mod reconcile;
pub mod recount;
pub mod run;
mod run_report;
pub mod runner;
pub(crate) mod schedule;
pub mod snapshots;
mod table;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use futures_util::future::BoxFuture;
use tokio_util::sync::CancellationToken;

pub use table::{Requests, modes};

use crate::config::Config;
use crate::servers::Servers;
use schedule::RetryAfter;
use tallyd_core::control::{Order, Task};
use tallyd_core::job_name::JobName;
use tallyd_core::repair_limits::LimitExceeded;
use tallyd_mysql::StoreError;
use tallyd_mysql::jobs::Outcome;

/// A mode of a job, as daemons run it.
pub struct JobSpec {
    pub job: JobName,
    pub mode: String,
    /// The pattern of the mode's schedule; empty if the mode has none.
    pub pattern: String,
    /// If this request is made, the mode runs soon, independently of its schedule.
    pub request: Request,
    pub first_run: FirstRun,
    /// If several modes of one job are due, the one with the lowest rank runs first.
    pub rank: usize,
    /// While one of these tasks is paused, the mode does not run.
    pub needs: &'static [Task],
    pub run: Run,
}

/// Does one run. Returns the rule that decides when the mode runs next.
pub type Run = fn(Work) -> BoxFuture<'static, Result<RetryAfter, JobError>>;

impl JobSpec {
    /// Makes a mode that becomes due only by its schedule. Its rank is 0.
    fn new(job: JobName, mode: &str, pattern: &str, needs: &'static [Task], run: Run) -> Self {
        let (request, first_run) = (Request::default(), FirstRun::Immediately);
        Self { job, mode: mode.to_owned(), pattern: pattern.to_owned(), request, first_run, rank: 0, needs, run }
    }
}

/// The time at which a mode that never ran becomes due.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FirstRun {
    Immediately,
    /// The mode becomes due when its schedule says so for the first time. A run can be expensive, so no run starts
    /// before the time that the operator chose.
    AtItsTime,
}

/// The input of a run. The run owns it, because the run is a task of its own.
pub struct Work {
    pub servers: Servers,
    pub config: Arc<Config>,
    pub mode: String,
    pub stop: CancellationToken,
}

/// Checks that the sources contain each of these fault points once, and no other fault points.
#[cfg(test)]
pub(crate) fn assert_fault_points(points: &[&str], sources: &[&str]) {
    let source = sources.concat();
    for point in points {
        assert_eq!(source.matches(&format!("fault::point(\"{point}\")")).count(), 1, "{point}");
    }
    assert_eq!(source.matches("fault::point(\"").count(), points.len());
}

/// A request for a run of one mode. A detector makes the request, and the job's loop sees it at its next tick.
#[derive(Clone, Debug, Default)]
pub struct Request(Arc<AtomicBool>);

impl Request {
    pub fn make(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    fn is_made(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    /// Clears the request, because a run begins. Returns whether there was a request.
    fn take(&self) -> bool {
        self.0.swap(false, Ordering::Relaxed)
    }
}

/// Why a run failed. Callers match on the variants of this error. Inside a run the error is converted into
/// `anyhow::Error`, and [`From`] converts it back.
#[derive(Debug, thiserror::Error)]
pub enum JobError {
    /// The run cannot be done now, but its input has no problem. The same call can succeed later.
    #[error("{0}")]
    NotNow(String),
    /// An operator has paused the job, or a task that the job needs.
    #[error("{0} (run `{undo}` to resume)", undo = .0.undo())]
    Paused(Box<Order>),
    /// The run cannot be done until an operator changes something, so it is not retried before its next scheduled time.
    #[error("{0}")]
    Refused(String),
    /// The run would repair more than the safety limit allows.
    #[error(transparent)]
    LimitExceeded(LimitExceeded),
    /// More partitions are in use than the configuration says. So a run's fence does not pass through all partitions,
    /// and a read after the fence can miss events.
    #[error(
        "[amqp] partitions is {known}, but {noted} partitions are in use, because {raised_by} raised the number. Set it to \
         {noted} here, too, and restart. To lower it, follow docs/operations/partitions.md"
    )]
    TooFewPartitions {
        /// The count of partitions in the configuration.
        known: u16,
        noted: u16,
        /// The daemon that raised the count of partitions.
        raised_by: String,
    },
    /// A server failed, another run took over, or the requested object does not exist.
    #[error(transparent)]
    Other(anyhow::Error),
}

impl JobError {
    /// The outcome that is written into the run's record.
    pub fn outcome(&self) -> Outcome {
        match self {
            Self::Refused(_) => Outcome::Refused,
            Self::NotNow(_)
            | Self::Paused(_)
            | Self::LimitExceeded(_)
            | Self::TooFewPartitions { .. }
            | Self::Other(_) => Outcome::Failed,
        }
    }

    /// The full text of the error, with its causes.
    pub fn text(&self) -> String {
        match self {
            Self::Other(error) => format!("{error:#}"),
            error => error.to_string(),
        }
    }

    /// The error as `anyhow::Error`. For `Other` this is the original error, so callers can check the error's type.
    pub fn into_error(self) -> anyhow::Error {
        match self {
            Self::Other(error) => error,
            error => error.into(),
        }
    }
}

impl From<anyhow::Error> for JobError {
    fn from(error: anyhow::Error) -> Self {
        // The text includes the context that callers added.
        let text = format!("{error:#}");
        let error = match error.downcast() {
            Ok(Self::NotNow(_)) => return Self::NotNow(text),
            Ok(Self::Refused(_)) => return Self::Refused(text),
            Ok(error) => return error,
            Err(error) => error,
        };
        match error.downcast() {
            Ok(LimitExceeded(_)) => Self::LimitExceeded(LimitExceeded(text)),
            Err(error) => Self::Other(error),
        }
    }
}

impl From<StoreError> for JobError {
    fn from(error: StoreError) -> Self {
        Self::Other(error.into())
    }
}

#[cfg(test)]
mod tests {
    use anyhow::Context;

    use super::*;

    #[test]
    fn an_error_is_found_again_with_what_was_said_on_the_way() {
        let refused: anyhow::Result<()> = Err(JobError::Refused("no such table".to_owned()).into());
        let error = JobError::from(refused.context("3 numbers were corrected").unwrap_err());
        assert!(matches!(&error, JobError::Refused(text) if text == "3 numbers were corrected: no such table"));
        assert_eq!(error.outcome(), Outcome::Refused);
        let limit = JobError::from(anyhow::Error::from(LimitExceeded("too much".to_owned())));
        assert!(matches!(limit, JobError::LimitExceeded(_)));
    }

    #[test]
    fn an_error_of_a_server_keeps_its_text_and_its_type() {
        let taken = || anyhow::Error::from(StoreError::TakenOver("the job archive".to_owned())).context("archive it");
        let error = JobError::from(taken());
        assert_eq!(format!("{:#}", anyhow::Error::from(error)), format!("{:#}", taken()));
        assert!(JobError::from(taken()).into_error().is::<StoreError>());
    }
}
