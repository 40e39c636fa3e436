//! One run of a job, from the request to the report. Each job is a value that implements [`Job`]; this module does the
//! rest: pauses, lock, progress, stop, deadline, and the end.

use std::borrow::Cow;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use super::fence::{self, Fences};
use super::pages::Pages;
pub use super::run_report::{Ended, RunHead, RunReport, Waited, Waits, has_run_head};
use super::runner::{LockRequest, Ran, run_once};
use super::schedule::RetryAfter;
use super::{JobError, Work};
use crate::config::Config;
use crate::runtime::progress::{ProgressSink, RunProgress, follow};
use crate::servers::Servers;
use crate::servers::control::READ_EVERY;
use crate::telemetry::{WaitsFor, telemetry};
use tallyd_core::control::Task;
use tallyd_core::repair_limits::LimitExceeded;
use tallyd_mysql::jobs::number_of;

pub const LISTED_MAX: usize = 20;

/// How long `job_run` and `repair` keep rows: a quarter, so that the cause of a drift that is found late can be looked up.
pub const KEEP: Duration = Duration::from_secs(90 * 86_400);

pub const OFTEN_KEEP: Duration = Duration::from_secs(7 * 86_400);

pub trait Job: Sync {
    const NAME: &'static str;
    /// Such a run does not begin if the configuration has too few partitions.
    const SENDS_FENCES: bool = false;
    type Report: RunReport;
    type Progress: RunProgress + Send + Sync + 'static;

    /// Their pause keeps the run from beginning, and ends it. Empty if no task must be at work: then only a throttle
    /// slows the run.
    fn needs(&self, config: &Config) -> &'static [Task];

    fn mode(&self) -> Cow<'_, str>;

    fn keep(&self) -> Duration {
        KEEP
    }

    fn begin(&self) -> (Self::Report, Self::Progress);

    /// An error fails the run, except [`LimitExceeded`] and, after a stop, [`JobError::NotNow`], which end it early. A
    /// scheduled run is a task, so its future must be [`Send`]. A command's run is not.
    fn work(&self, run: &mut Run<'_, Self>) -> impl Future<Output = Result<()>>;

    fn log_limit(&self, _reason: &str) {}

    fn how_to_continue(&self, _options: &RunOptions) -> Option<&'static str> {
        None
    }

    fn close(&self) -> impl Future<Output = ()> + Send {
        async {}
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RunOptions {
    pub dry_run: bool,
    pub force: bool,
    pub resume: bool,
    pub run_time_max: Option<Duration>,
}

pub struct Run<'a, J: Job + ?Sized> {
    pub servers: &'a Servers,
    /// The fencing token of all writes of the run.
    pub number: u64,
    pub options: RunOptions,
    pub report: J::Report,
    /// Is cancelled at the stop of the process, and when an operator pauses the job.
    pub stop: &'a CancellationToken,
    pub progress: watch::Sender<J::Progress>,
    pub(super) pages: Option<Pages>,
    began: Instant,
    how_to_continue: Option<&'static str>,
    used: AtomicU64,
}

/// # Errors
/// [`JobError::Paused`], [`JobError::TooFewPartitions`] if the job can't wait for all events in flight, or the error of
/// the work. Changes that were made before a failure stay.
pub async fn once<J: Job>(
    servers: &Servers,
    config: &Config,
    job: &J,
    options: RunOptions,
    to: ProgressSink,
    stop: &CancellationToken,
) -> Result<Ran<J::Report>, JobError> {
    if J::SENDS_FENCES {
        fence::knows_all(&servers.store, &servers.broker).await?;
    }
    let allowed = Allowed::begin(servers, job.needs(config), stop).await?;
    let mode = job.mode();
    let request = LockRequest { name: J::NAME, mode: &mode, owner: &servers.owner, keep: job.keep() };
    run_once(&servers.store, request, |number| run_as(servers, number, job, options, to, &allowed.stop)).await
}

/// The run of a mode that is due, and when the mode runs again.
pub async fn scheduled<J: Job>(work: &Work, job: &J, options: RunOptions) -> Result<RetryAfter, JobError> {
    let Work { servers, config, stop, .. } = work;
    once(servers, config, job, options, ProgressSink::Log, stop).await.map(RetryAfter::from)
}

/// For a caller that holds the lock as the run `number`. Fails as [`once`], but the orders of operators are not read.
pub async fn run_as<J: Job>(
    servers: &Servers,
    number: u64,
    job: &J,
    options: RunOptions,
    to: ProgressSink,
    stop: &CancellationToken,
) -> Result<J::Report, JobError> {
    let (report, progress) = job.begin();
    let (progress, shown) = watch::channel(progress);
    let done = shown.clone();
    let _running = telemetry().runs.begin(J::NAME, &job.mode(), move || done.borrow().done());
    let how_to_continue = job.how_to_continue(&options);
    let began = Instant::now();
    let mut run: Run<'_, J> = Run {
        servers,
        number,
        options,
        report,
        stop,
        progress,
        pages: None,
        began,
        how_to_continue,
        used: AtomicU64::new(0),
    };
    run.report.head_mut().dry_run = options.dry_run;
    let waiting = || waits_for_servers(J::NAME);
    let worked = tokio::select! {
        // On the heap: the future of an unoptimized run is too large for the stack.
        worked = Box::pin(job.work(&mut run)) => worked,
        () = follow(to, shown, waiting) => Err(anyhow!("the output of the run is closed, so the run stops")),
    };
    job.close().await;
    run.into_report(job, worked.map_err(JobError::from))
}

impl<'a, J: Job + ?Sized> Run<'a, J> {
    fn into_report(mut self, job: &J, worked: Result<(), JobError>) -> Result<J::Report, JobError> {
        match worked {
            Ok(()) => {}
            Err(JobError::NotNow(_)) if self.stop.is_cancelled() => {
                if self.report.head_mut().ended == Ended::Done {
                    self.end(Ended::Stopped, "it was stopped");
                }
            }
            Err(JobError::LimitExceeded(LimitExceeded(reason))) => {
                job.log_limit(&reason);
                self.report.head_mut().end(Ended::LimitExceeded, reason);
            }
            Err(error) => return Err(error),
        }
        if let Some(pages) = self.pages {
            self.report.head_mut().waited = pages.pace.waited();
        }
        Ok(self.report)
    }

    pub fn end(&mut self, ended: Ended, why: &str) {
        let how = self.how_to_continue.map_or_else(String::new, |how| format!(": {how}"));
        self.report.head_mut().end(ended, format!("{why}{how}"));
    }

    pub fn deadline(&self) -> Option<Instant> {
        self.options.run_time_max.map(|max| self.began + max)
    }

    pub async fn note_checkpoint(&self, place: &(impl Serialize + Sync)) -> Result<()> {
        let text = serde_json::to_string(place).context("write the run's progress")?;
        Ok(self.servers.store.note_checkpoint(self.number, &text).await?)
    }

    /// Of the last run of `mode` before this one; with `unless_done` only of runs after the last completed one.
    pub async fn last_checkpoint<T: DeserializeOwned>(
        &self,
        mode: &str,
        unless_done: bool,
    ) -> Result<Option<(u64, T)>> {
        let last = self.servers.store.last_checkpoint(J::NAME, mode, self.number, unless_done).await?;
        let read = |(run, text): (u64, String)| {
            Ok((run, serde_json::from_str(&text).context("read the last run's progress")?))
        };
        last.map(read).transpose()
    }

    /// Grows within a run and from run to run.
    pub fn next_number(&self) -> u64 {
        number_of(self.number, self.used.fetch_add(1, Ordering::Relaxed) + 1)
    }

    pub fn show(&self, change: impl FnOnce(&mut J::Progress)) {
        self.progress.send_modify(change);
    }

    /// Shows that the run waits for a server, until the returned value is dropped.
    pub fn waits(&self, reason: String) -> impl Drop + use<J> {
        let mut waiting = telemetry().runs.waiting(J::NAME, WaitsFor::Pace);
        waiting.note(reason);
        waiting
    }

    pub fn check_stop(&self) -> Result<()> {
        if self.stop.is_cancelled() { Err(stopped()) } else { Ok(()) }
    }

    pub async fn unless_stopped<T>(&self, work: impl Future<Output = T>) -> Result<T> {
        self.stop.run_until_cancelled(work).await.ok_or_else(stopped)
    }

    pub async fn fences(&self, fence_max: Duration) -> Result<Fences<'a>> {
        let Servers { store, broker, .. } = self.servers;
        Ok(Fences { job: J::NAME, store, broker, publisher: broker.connect_publisher(J::NAME).await?, fence_max })
    }
}

fn waits_for_servers(job: &str) -> Option<String> {
    let (why, reason) = telemetry().runs.get(job).waits?;
    (why == WaitsFor::Pace).then_some(reason)
}

fn stopped() -> anyhow::Error {
    JobError::NotNow("the run was stopped".to_owned()).into()
}

pub fn millis_since(began: Instant) -> u64 {
    u64::try_from(began.elapsed().as_millis()).unwrap_or(u64::MAX)
}

pub(super) struct Allowed {
    pub stop: CancellationToken,
    /// Read operators' orders, because a command's process has no other task that does.
    _following: JoinSet<()>,
}

impl Allowed {
    pub(super) async fn begin(
        servers: &Servers,
        needs: &'static [Task],
        stop: &CancellationToken,
    ) -> Result<Self, JobError> {
        let control = servers.control.clone();
        control.refresh(&servers.store).await?;
        if let Some(order) = control.paused(needs) {
            return Err(JobError::Paused(Box::new(order)));
        }
        let (store, stop) = (servers.store.clone(), stop.child_token());
        let mut following = JoinSet::new();
        let (paused, orders) = (stop.clone(), control.clone());
        following.spawn(async move {
            loop {
                tokio::time::sleep(READ_EVERY).await;
                // The run itself fails if MySQL does not answer.
                let _ = orders.refresh(&store).await;
            }
        });
        following.spawn(async move {
            control.until_paused(needs).await;
            paused.cancel();
        });
        Ok(Self { stop, _following: following })
    }
}
