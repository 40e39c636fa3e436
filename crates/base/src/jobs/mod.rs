//! What all jobs share. Jobs run on a schedule or on request. Across all daemons, each job has at most one run at a time.
//!
//! `schedule` decides which mode is due. [`run`] is the shape of a run, and [`runner`] holds the job's lock during the
//! run. [`fence`] waits for the events in flight. The jobs never call each other.

pub mod fence;
pub mod pages;
pub mod run;
mod run_report;
pub mod runner;
pub mod schedule;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use futures_util::future::BoxFuture;
use tokio_util::sync::CancellationToken;

use crate::config::Config;
use crate::runtime::liveness::Heartbeat;
use crate::servers::Servers;
use crate::telemetry::observer::JobMode;
use schedule::RetryAfter;
use tallyd_core::control::{Order, Task};
use tallyd_core::repair_limits::LimitExceeded;
use tallyd_mysql::StoreError;
use tallyd_mysql::jobs::RunOutcome;

/// A job that the daemon runs.
pub struct JobEntry {
    pub name: &'static str,
    /// The name of its loop, for example `reconciler`.
    pub task: &'static str,
    /// The modes with a configuration. A reload makes them again.
    pub specs: Specs,
    /// What a daemon does before the loop begins, even if the job is off.
    pub first: Option<fn(Work, Heartbeat) -> BoxFuture<'static, ()>>,
}

pub type Specs = Arc<dyn Fn(&Config) -> Vec<JobSpec> + Send + Sync>;

/// One mode of a job.
pub struct JobSpec {
    pub mode: String,
    pub pattern: String,
    pub request: Request,
    pub first_run: FirstRun,
    /// If several modes of one job are due, the lowest rank runs first.
    pub rank: usize,
    pub needs: &'static [Task],
    pub run: RunFn,
}

pub type RunFn = fn(Work) -> BoxFuture<'static, Result<RetryAfter, JobError>>;

impl JobSpec {
    pub fn new(mode: &str, pattern: &str, needs: &'static [Task], run: RunFn) -> Self {
        let (request, first_run) = (Request::default(), FirstRun::Immediately);
        Self { mode: mode.to_owned(), pattern: pattern.to_owned(), request, first_run, rank: 0, needs, run }
    }
}

pub fn modes(jobs: &[JobEntry], config: &Config) -> Vec<JobMode> {
    let all = jobs.iter().flat_map(|job| (job.specs)(config).into_iter().map(|spec| (job.name, spec)));
    all.map(|(job, JobSpec { mode, pattern, .. })| JobMode {
        job,
        mode,
        pattern,
        time_zone: config.daemon.time_zone.clone(),
    })
    .collect()
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FirstRun {
    Immediately,
    /// A run can be expensive, so no run starts before the time that the operator chose.
    AtItsTime,
}

pub struct Work {
    pub servers: Servers,
    pub config: Arc<Config>,
    pub mode: String,
    pub stop: CancellationToken,
}

/// A detector makes the request, and the job's loop sees it at its next tick.
#[derive(Clone, Debug, Default)]
pub struct Request(Arc<AtomicBool>);

impl Request {
    pub fn make(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    pub fn is_made(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    pub fn take(&self) -> bool {
        self.0.swap(false, Ordering::Relaxed)
    }
}

/// Inside a run it is converted into `anyhow::Error`, and [`From`] converts it back.
#[derive(Debug, thiserror::Error)]
pub enum JobError {
    /// The same call can succeed later.
    #[error("{0}")]
    NotNow(String),
    #[error("{0} (run `{undo}` to resume)", undo = .0.undo())]
    Paused(Box<Order>),
    /// An operator must change something, so there is no retry before the next scheduled time.
    #[error("{0}")]
    Refused(String),
    #[error(transparent)]
    LimitExceeded(LimitExceeded),
    /// A read after the fence can miss events.
    #[error(
        "[amqp] partitions is {known}, but {noted} partitions are in use, because {raised_by} raised the number. Set it to \
         {noted} here, too, and restart. To lower it, follow docs/operations/partitions.md"
    )]
    TooFewPartitions { known: u16, noted: u16, raised_by: String },
    /// A server failed, another run took over, or the requested object does not exist.
    #[error(transparent)]
    Other(anyhow::Error),
}

impl JobError {
    pub fn outcome(&self) -> RunOutcome {
        match self {
            Self::Refused(_) => RunOutcome::Refused,
            Self::NotNow(_)
            | Self::Paused(_)
            | Self::LimitExceeded(_)
            | Self::TooFewPartitions { .. }
            | Self::Other(_) => RunOutcome::Failed,
        }
    }

    pub fn text(&self) -> String {
        match self {
            Self::Other(error) => format!("{error:#}"),
            error => error.to_string(),
        }
    }

    /// For `Other` this is the original error, so callers can check its type.
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
        assert_eq!(error.outcome(), RunOutcome::Refused);
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
