//! The jobs of the daemon: what runs on a schedule or on request, one run at a time over all daemons.
//!
//! `table` has a row for each mode of each job. [`schedule`] decides which one is due, [`runner`] holds the lock while it runs, and
//! [`fence`] waits for the events in flight. The jobs never call each other.

pub mod archive;
mod board_run;
mod error;
pub mod fence;
pub mod filters;
pub mod reconcile;
pub mod recount;
pub mod runner;
pub mod runs;
pub mod schedule;
pub mod snapshots;
mod table;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use futures_util::future::BoxFuture;
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

pub use error::JobError;
pub use table::{Requests, modes, specs_of};

use crate::config::Config;
use crate::servers::Servers;
use schedule::RetryAfter;
use tallyd_core::job_name::JobName;

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
fn assert_fault_points(points: &[&str], sources: &[&str]) {
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
