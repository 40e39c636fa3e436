//! The jobs of the daemon: what runs on a schedule or on request, one run at a time over all daemons.
//!
//! `table` has a row for each mode of each job. `schedule` decides which one is due, [`runner`] holds the lock while it runs, and
//! [`fence`] waits for the events in flight. The jobs never call each other.

mod allowed;
pub mod archive;
mod board_run;
pub mod fence;
pub mod filters;
pub mod reconcile;
pub mod recount;
pub mod runner;
pub mod runs;
pub(crate) mod schedule;
pub mod snapshots;
mod table;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use futures_util::future::BoxFuture;
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

pub use table::{Requests, modes, specs_of};

use crate::config::Config;
use crate::servers::Servers;
use schedule::RetryAfter;
use tallyd_core::control::Order;
use tallyd_core::job_name::JobName;
use tallyd_core::repair_limits::LimitExceeded;
use tallyd_mysql::StoreError;
use tallyd_mysql::jobs::Outcome;

#[derive(Clone)]
pub struct JobSpec {
    pub job: JobName,
    pub mode: String,
    /// The pattern of times by which it is due, in a configuration and for that mode; empty for never.
    pub cron: Cron,
    /// Makes it due whatever the pattern says.
    pub request: Request,
    /// When it is due that never ran.
    pub first_run: FirstRun,
    /// Of several modes of one job that are due the one with the lowest rank runs first.
    pub rank: usize,
    pub run: Run,
}

/// Reads a mode's pattern of times from a configuration.
pub type Cron = for<'a> fn(&'a Config, &str) -> &'a str;

/// Does one run, and says when the mode is due again.
pub type Run = for<'a> fn(Work<'a>) -> BoxFuture<'a, Result<RetryAfter, JobError>>;

impl JobSpec {
    /// A mode that nothing but its pattern makes due, and that runs before others.
    fn new(job: JobName, mode: &str, cron: Cron, run: Run) -> Self {
        let (request, first_run) = (Request::default(), FirstRun::Immediately);
        Self { job, mode: mode.to_owned(), cron, request, first_run, rank: 0, run }
    }

    pub fn pattern<'a>(&self, config: &'a Config) -> &'a str {
        (self.cron)(config, &self.mode)
    }
}

/// When a mode that never ran is due.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FirstRun {
    Immediately,
    /// At the next time of its pattern: a run can be costly, and the pattern was chosen for that.
    AtItsTime,
}

pub struct Work<'a> {
    pub servers: &'a Servers,
    pub config: Arc<Config>,
    pub mode: &'a str,
    pub stop: &'a CancellationToken,
}

/// What wakes the loop of each job: its cron triggers and requests do.
#[derive(Clone, Debug, Default)]
pub struct Wakes {
    reconcile: Arc<Notify>,
    archive: Arc<Notify>,
    filters: Arc<Notify>,
    recount: Arc<Notify>,
}

impl Wakes {
    pub fn of(&self, job: JobName) -> &Arc<Notify> {
        match job {
            JobName::Reconcile => &self.reconcile,
            JobName::Archive => &self.archive,
            JobName::Filters => &self.filters,
            JobName::Recount => &self.recount,
        }
    }
}

/// Checks that these sources have each of these fault points once, and no others.
#[cfg(test)]
pub(crate) fn assert_fault_points(points: &[&str], sources: &[&str]) {
    let source = sources.concat();
    for point in points {
        assert_eq!(source.matches(&format!("fault::point(\"{point}\")")).count(), 1, "{point}");
    }
    assert_eq!(source.matches("fault::point(\"").count(), points.len());
}

/// A request for a run of one mode: set by what finds that it is needed, taken by the job's loop.
#[derive(Clone, Debug, Default)]
pub struct Request {
    requested: Arc<AtomicBool>,
    wake: Arc<Notify>,
}

impl Request {
    fn new(wake: &Arc<Notify>) -> Self {
        Self { requested: Arc::default(), wake: Arc::clone(wake) }
    }

    pub fn make(&self) {
        self.requested.store(true, Ordering::Relaxed);
        self.wake.notify_one();
    }

    fn is_made(&self) -> bool {
        self.requested.load(Ordering::Relaxed)
    }

    /// Takes the request, if there is one, because a run begins.
    fn take(&self) -> bool {
        self.requested.swap(false, Ordering::Relaxed)
    }

    /// Makes it again after a run that failed, which is tried again after a pause.
    fn put_back(&self) {
        self.requested.store(true, Ordering::Relaxed);
    }
}

/// Why a run failed. Callers match it; the runs inside pass it through `anyhow` and [`From`] finds it again.
#[derive(Debug, thiserror::Error)]
pub enum JobError {
    /// The run can't be done now, through no fault of the data: the same call can succeed later.
    #[error("{0}")]
    NotNow(String),
    /// An operator has paused the job, or a task that it needs.
    #[error("{0} (`{undo}` ends that)", undo = .0.undo())]
    Paused(Box<Order>),
    /// The run can't be done before a person has changed something: it is not due before its time comes again.
    #[error("{0}")]
    Refused(String),
    /// The run would repair more than a person has allowed.
    #[error(transparent)]
    LimitExceeded(LimitExceeded),
    /// More partitions are in use than the configuration says: a read after a fence could lack events of the others.
    #[error(
        "[amqp] partitions is {known}, and {noted} partitions are in use since {raised_by} came with so many: set it to {noted} here, \
         too, and restart; lower it only as docs/operations.md says"
    )]
    TooFewPartitions {
        /// Of the configuration.
        known: u16,
        /// In use.
        noted: u16,
        /// The daemon that came with so many.
        raised_by: String,
    },
    /// A server failed, another run took over, or what was asked for isn't there.
    #[error(transparent)]
    Other(anyhow::Error),
}

impl JobError {
    /// What the record of the run says.
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

    /// The whole sentence, with its causes.
    pub fn text(&self) -> String {
        match self {
            Self::Other(error) => format!("{error:#}"),
            error => error.to_string(),
        }
    }

    /// The error as `anyhow` has it, so that its type can be asked for where it is none of these.
    pub fn into_error(self) -> anyhow::Error {
        match self {
            Self::Other(error) => error,
            error => error.into(),
        }
    }
}

impl From<anyhow::Error> for JobError {
    fn from(error: anyhow::Error) -> Self {
        // With what was said on the way here.
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
