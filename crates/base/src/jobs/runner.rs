//! Runs a job under its lock, and has the loop that runs the due modes. A run acquires the lock, works while its lease
//! is renewed, records its report and releases the lock. A job has at most one run at a time, across all daemons and
//! commands.

use std::future::Future;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow};
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;
use tracing::{error, info, warn};

use super::run_report::RunReport;
use super::schedule::{Entry, RetryAfter, Schedule, Wait};
use super::{JobEntry, JobError, Work};
use crate::config::{Config, ConfigHandle};
use crate::runtime::liveness::Heartbeat;
use crate::runtime::retry::Outage;
use crate::runtime::ticker::Ticks;
use crate::servers::Servers;
use crate::telemetry::{WaitsFor, telemetry};
use tallyd_connect::pace::pace;
pub use tallyd_mysql::jobs::RunOutcome;
use tallyd_mysql::jobs::{LEASE, Lock};
use tallyd_mysql::{Store, StoreError};

/// The run tries three times before it gives up the lease.
const RENEW_EVERY: Duration = Duration::from_secs(9);

/// The holder gives up the lock if it cannot renew the lease for this time. The lease in MySQL ends later.
const GIVE_UP_AFTER: Duration = LEASE.saturating_sub(Duration::from_secs(2));

const FORGET_EVERY: Duration = Duration::from_secs(3_600);

#[derive(Clone, Copy, Debug)]
pub struct LockRequest<'a> {
    pub name: &'static str,
    /// `full`, `changed`. Each mode has its own due time.
    pub mode: &'a str,
    pub owner: &'a str,
    pub keep: Duration,
}

#[derive(Debug)]
pub enum Ran<R> {
    Ended(R),
    Held { owner: String, lease_s: i64 },
}

/// `work` gets the run's number as the fencing token. The number grows from run to run.
pub async fn run_once<R: RunReport, F, E>(
    store: &Store,
    job: LockRequest<'_>,
    work: impl FnOnce(u64) -> F,
) -> Result<Ran<R>, JobError>
where
    F: Future<Output = Result<R, E>>,
    JobError: From<E>,
{
    let LockRequest { name, mode, .. } = job;
    let run = match store.take_job(name, mode, job.owner).await? {
        Lock::Taken(run) => run,
        Lock::Held { owner, lease_s } => {
            telemetry().runs.waits(name, Some((WaitsFor::Lock, format!("{owner} is running the job"))));
            return Ok(Ran::Held { owner, lease_s });
        }
    };
    info!(event = "job-started", job = name, mode, run, "{name} ({mode}) started as run {run}");
    let started = Instant::now();
    let worked = tokio::select! {
        worked = work(run) => worked.map_err(JobError::from),
        lost = keep_lease(store, name, run) => Err(lost),
    };
    let seconds = started.elapsed().as_secs_f32();
    let noted = note_end(store, name, run, &worked).await;
    if let Ok(report) = &worked {
        let done = report.outcome() == RunOutcome::Done;
        info!(
            event = "job-ended",
            job = name,
            mode,
            run,
            done,
            seconds,
            "{name} ({mode}) ended after {seconds:.1} s: {report}"
        );
    }
    noted?;
    forget_old_runs(store, job).await;
    worked.map(Ran::Ended)
}

async fn keep_lease(store: &Store, job: &str, run: u64) -> JobError {
    let mut renewed = Instant::now();
    loop {
        tokio::time::sleep(RENEW_EVERY.min(GIVE_UP_AFTER.saturating_sub(renewed.elapsed()))).await;
        let left = GIVE_UP_AFTER.saturating_sub(renewed.elapsed());
        let began = Instant::now();
        match tokio::time::timeout(left, store.renew_job(job, run)).await {
            Ok(Ok(())) => renewed = began,
            Ok(Err(error @ StoreError::TakenOver(_))) => return error.into(),
            Ok(Err(_)) if renewed.elapsed() < GIVE_UP_AFTER => {}
            Ok(Err(_)) | Err(_) => {
                let text = "the run gave up its lease, because it could not renew it in MySQL";
                return JobError::Other(anyhow!(text));
            }
        }
    }
}

async fn note_end<R: RunReport>(
    store: &Store,
    job: &str,
    run: u64,
    worked: &Result<R, JobError>,
) -> Result<(), JobError> {
    let noted = match worked {
        Ok(report) => {
            let text = serde_json::to_string(report).context("write the report")?;
            store.finish_job(job, run, report.outcome(), report.cut(), &text).await
        }
        Err(error) => {
            let text = serde_json::json!({ "error": error.text() }).to_string();
            store.finish_job(job, run, error.outcome(), None, &text).await
        }
    };
    Ok(noted?)
}

/// At most once an hour for each mode, because MySQL reads all its rows. A later run repeats a failed deletion.
async fn forget_old_runs(store: &Store, job: LockRequest<'_>) {
    if !telemetry().runs.prunes(format!("{} {}", job.name, job.mode), FORGET_EVERY) {
        return;
    }
    if let Err(error) = store.forget_runs(job.name, job.mode, job.keep).await {
        let error = format!("{:#}", anyhow::Error::from(error));
        warn!(event = "prune-failed", error, "old rows of job_run could not be deleted: {error}");
    }
}

/// Asks MySQL what is due: at the start and a mode's time, after a request or a new configuration, once a minute.
pub struct JobLoop {
    pub job: JobEntry,
    pub servers: Servers,
    pub live: ConfigHandle,
    pub ticks: Ticks,
    pub stop: CancellationToken,
}

impl JobLoop {
    pub async fn run(mut self, beat: Heartbeat) {
        if let Some(first) = self.job.first {
            let (servers, config, stop) = (self.servers.clone(), self.live.current(), self.stop.clone());
            first(Work { servers, config, mode: String::new(), stop }, beat.clone()).await;
        }
        let mut outage = Outage::new("asking MySQL which jobs are due");
        let mut schedule = Schedule::default();
        let mut config = self.set(&mut schedule);
        while !self.stop.is_cancelled() {
            if !Arc::ptr_eq(&config, &self.live.current()) {
                config = self.set(&mut schedule);
            }
            let wait = match beat.during(schedule.ask(self.job.name, &self.servers.store)).await {
                Ok(now) => {
                    outage.over();
                    let instant = Instant::now();
                    match schedule.next_due(now, instant) {
                        Some(entry) => {
                            run_due((self.job.name, entry), &self.servers, &self.live, &beat, &self.stop).await
                        }
                        None => {
                            telemetry().runs.waits(self.job.name, None);
                            Some(schedule.wait(now, instant))
                        }
                    }
                }
                Err(error) => Some(Wait::Pause(outage.failed(&format!("{:#}", anyhow::Error::from(error))))),
            };
            if let Some(wait) = wait
                && self
                    .stop
                    .clone()
                    .run_until_cancelled(beat.during(self.wait(wait, &schedule, &config)))
                    .await
                    .is_none()
            {
                return;
            }
        }
    }

    fn set(&self, schedule: &mut Schedule) -> Arc<Config> {
        let config = self.live.current();
        schedule.set((self.job.specs)(&config), &config.daemon.time_zone);
        config
    }

    async fn wait(&mut self, wait: Wait, schedule: &Schedule, config: &Arc<Config>) {
        match wait {
            Wait::Pause(time) => tokio::time::sleep(pace(time)).await,
            Wait::Woken(time) => {
                let began = Instant::now();
                let is_same = |live: &ConfigHandle| Arc::ptr_eq(config, &live.current());
                while began.elapsed() < time && !schedule.is_requested(Instant::now()) && is_same(&self.live) {
                    self.ticks.next().await;
                }
            }
        }
    }
}

/// In a task of its own, so that a panic is a failure of this run only. If an operator paused a needed task, waits for
/// the end of the pause. Returns the wait before the loop's next check.
async fn run_due(
    (job, entry): (&str, &mut Entry),
    servers: &Servers,
    live: &ConfigHandle,
    beat: &Heartbeat,
    stop: &CancellationToken,
) -> Option<Wait> {
    let (control, config) = (&servers.control, live.current());
    let needs = entry.spec.needs;
    if let Some(order) = control.paused(needs) {
        let mode = &entry.spec.mode;
        info!(event = "job-deferred", job, mode, "{job} ({mode}) is due but does not run: {order}");
        stop.run_until_cancelled(beat.during(control.until_allowed(needs))).await;
        // Another daemon can have completed a run of this mode.
        return None;
    }
    // Cleared first, so that a request during the run makes the mode due again.
    let requested = entry.spec.request.take();
    let mode = entry.spec.mode.clone();
    let work = Work { servers: servers.clone(), config, mode, stop: stop.clone() };
    let running = AbortOnDropHandle::new(tokio::spawn((entry.spec.run)(work)));
    let ran = beat.during(running).await.unwrap_or_else(|error| Err(JobError::Other(error.into())));
    let retry = match retry_after(ran) {
        RetryAfter::Pause | RetryAfter::LongerPause if control.paused(needs).is_some() => RetryAfter::Resume,
        retry => retry,
    };
    entry.ran(retry, requested);
    match retry {
        RetryAfter::Pause => Some(Wait::AFTER_RUN),
        RetryAfter::NextTime | RetryAfter::LongerPause | RetryAfter::Resume => None,
    }
}

fn retry_after(ran: Result<RetryAfter, JobError>) -> RetryAfter {
    match ran {
        Ok(retry) => retry,
        Err(JobError::Paused(order)) => {
            info!(event = "job-deferred", "a job does not run: {order}");
            RetryAfter::Pause
        }
        Err(error) => retry_after_failure(error),
    }
}

fn retry_after_failure(error: JobError) -> RetryAfter {
    let text = error.text();
    match error {
        JobError::TooFewPartitions { .. } => {
            warn!(
                event = "partitions-behind",
                error = text,
                "this daemon cannot run jobs that wait for events in flight, so other daemons must run them: {text}"
            );
            RetryAfter::LongerPause
        }
        JobError::Refused(_) => {
            error!(
                event = "job-failed",
                error = text,
                "a job failed and is not retried before its next scheduled time: {text}"
            );
            RetryAfter::NextTime
        }
        JobError::NotNow(_) | JobError::Paused(_) | JobError::LimitExceeded(_) | JobError::Other(_) => {
            error!(event = "job-failed", error = text, "a job failed and is retried soon: {text}");
            RetryAfter::Pause
        }
    }
}
