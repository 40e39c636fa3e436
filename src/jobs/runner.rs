//! A run of a job under its lock: what the reconciler and the archiver share.
//!
//! The way of a run: take the lock -> work while the lease is renewed -> note the report -> give the lock back. A job
//! runs once over all daemons and shells. The loop in a daemon only hears a bell; whether there is work is computed
//! from the last run that was done, so that a run missed while down is made up for.

use std::fmt::Display;
use std::future::Future;
use std::sync::{Arc, OnceLock};

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};
use serde::Serialize;
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::config::{Config, ConfigHandle};
use crate::model::Micros;
use crate::runtime::cron;
use crate::runtime::liveness::Heartbeat;
use crate::runtime::retry::Outage;
pub use crate::store::jobs::Outcome;
use crate::store::jobs::{LEASE, Lock};
use crate::store::{Store, StoreError};
use crate::telemetry::{WaitsFor, telemetry};

/// How often the lease is renewed: three tries before it is given up.
const RENEW_EVERY: Duration = Duration::from_secs(9);

/// A holder gives up before MySQL says that the lease has expired.
const GIVE_UP_AFTER: Duration = LEASE.saturating_sub(Duration::from_secs(2));

/// A job and the way it is run this time.
#[derive(Clone, Copy, Debug)]
pub struct Job<'a> {
    /// Its name: `reconcile`, `archive`, `recount`.
    pub name: &'static str,
    /// What kind of run: `full`, `changed`. What is due is computed per mode.
    pub mode: &'a str,
    /// Who runs it: shown to whoever finds the lock held.
    pub owner: &'a str,
    /// How long its runs are kept in `job_run`.
    pub keep: Duration,
}

/// What a run says at its end, to people and programs.
pub trait Report: Serialize + Display {
    /// What became of the run.
    fn outcome(&self) -> Outcome;

    /// Whether all that should be done was done. Otherwise the run stays due.
    fn is_done(&self) -> bool {
        self.outcome() == Outcome::Done
    }

    /// Reconcile: everything up to here has been compared.
    fn cut(&self) -> Option<Micros> {
        None
    }
}

/// A run can't be done before a person has mended something: not due before its time comes again.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct Refused(pub String);

/// What came of asking for a run.
#[derive(Debug)]
pub enum Ran<R> {
    /// It ran to its end; the report says what it found.
    Ended(R),
    /// Another one runs.
    Held {
        /// Who: host and process.
        owner: String,
        /// Seconds until its lease ends unless it is renewed.
        lease_s: i64,
    },
}

/// Runs `work` once under the job's lock. It gets the run's number, which grows from run to run: the fencing token.
///
/// # Errors
/// Those of `work`; MySQL's; the lease was lost.
pub async fn run_once<R: Report, F>(store: &Store, job: Job<'_>, work: impl FnOnce(u64) -> F) -> Result<Ran<R>>
where
    F: Future<Output = Result<R>>,
{
    let run = match store.take_job(job.name, job.mode, job.owner).await? {
        Lock::Taken(run) => run,
        Lock::Held { owner, lease_s } => {
            telemetry().jobs.waits(job.name, Some((WaitsFor::Lock, format!("{owner} is at it"))));
            return Ok(Ran::Held { owner, lease_s });
        }
    };
    info!(
        event = "job-started",
        job = job.name,
        mode = job.mode,
        run,
        "{} ({}) started as run {run}",
        job.name,
        job.mode
    );
    let started = Instant::now();
    let _running = telemetry().jobs.begin(job.name, job.mode);
    let worked = tokio::select! {
        worked = work(run) => worked,
        lost = keep_lease(store, job.name, run) => Err(lost),
    };
    let seconds = started.elapsed().as_secs_f32();
    let (outcome, cut, report) = match &worked {
        Ok(report) => (report.outcome(), report.cut(), serde_json::to_string(report).context("write the report")?),
        Err(error) => {
            let outcome = if error.is::<Refused>() { Outcome::Refused } else { Outcome::Failed };
            (outcome, None, serde_json::json!({ "error": format!("{error:#}") }).to_string())
        }
    };
    let done = outcome == Outcome::Done;
    let noted = store.finish_job(job.name, run, outcome, cut, &report).await;
    if let Ok(report) = &worked {
        info!(
            event = "job-ended",
            job = job.name,
            mode = job.mode,
            run,
            done,
            seconds,
            "{} ({}) ended after {seconds:.1} s: {report}",
            job.name,
            job.mode
        );
    }
    noted?;
    forget_old_runs(store, job).await;
    worked.map(Ran::Ended)
}

/// Not worth failing a run for: the next one does it.
async fn forget_old_runs(store: &Store, job: Job<'_>) {
    if let Err(error) = store.forget_runs(job.name, job.mode, job.keep).await {
        let error = format!("{:#}", anyhow::Error::from(error));
        warn!(event = "prune-failed", error, "old runs could not be forgotten: {error}");
    }
}

/// Renews the lease until it is lost; the answer says why.
async fn keep_lease(store: &Store, job: &str, run: u64) -> anyhow::Error {
    let mut renewed = Instant::now();
    loop {
        tokio::time::sleep(RENEW_EVERY.min(GIVE_UP_AFTER.saturating_sub(renewed.elapsed()))).await;
        let left = GIVE_UP_AFTER.saturating_sub(renewed.elapsed());
        let asked = Instant::now();
        match tokio::time::timeout(left, store.renew_job(job, run)).await {
            Ok(Ok(())) => renewed = asked,
            Ok(Err(error @ StoreError::TakenOver(_))) => return error.into(),
            Ok(Err(_)) if renewed.elapsed() < GIVE_UP_AFTER => {}
            Ok(Err(_)) | Err(_) => {
                return anyhow!("MySQL could not be told that the run is alive: giving up its lease");
            }
        }
    }
}

/// A key of the configuration that is a pattern of times; empty for never.
type Pattern = Box<dyn Fn(&Config) -> &str + Send + Sync>;

/// When a mode of a job is due.
pub struct Timetable {
    live: ConfigHandle,
    /// Its pattern, which a reload may change.
    pattern: Pattern,
    /// Where only what comes from now on is due: since when it is looked at, by MySQL's clock.
    since: Option<OnceLock<Micros>>,
    /// Set when it is asked for whatever the pattern says.
    pub asked: Arc<AtomicBool>,
    /// The job.
    pub name: &'static str,
    /// Its mode.
    pub mode: String,
}

impl Timetable {
    /// A timetable of that pattern.
    pub fn new(
        name: &'static str,
        mode: &str,
        live: &ConfigHandle,
        pattern: impl Fn(&Config) -> &str + Send + Sync + 'static,
    ) -> Self {
        let (live, pattern) = (live.clone(), Box::new(pattern));
        Self { live, pattern, since: None, asked: Arc::default(), name, mode: mode.to_owned() }
    }

    /// The same, of a mode that waits for its time when it never ran, instead of running at once.
    pub fn from_now_on(self) -> Self {
        Self { since: Some(OnceLock::new()), ..self }
    }

    /// Whether a run is missing: the pattern has fired since the last one that was done began.
    ///
    /// # Errors
    /// MySQL's.
    pub async fn is_due(&self, store: &Store, now: Micros) -> Result<bool, StoreError> {
        let since = self.since.as_ref().map(|since| *since.get_or_init(|| now));
        if self.asked.load(Ordering::Relaxed) {
            return Ok(true);
        }
        // Empty, or refused when it was loaded.
        let Ok(cron) = cron::parse((self.pattern)(&self.live.current())) else { return Ok(false) };
        let last = store.last_done(self.name, &self.mode).await?;
        Ok(match (last, cron::last_fired(&cron, now)) {
            (_, None) => false,
            (None, Some(fired)) => since.is_none_or(|since| since < fired),
            (Some(started_at), Some(fired)) => started_at < fired,
        })
    }
}

/// What a daemon's loop does after a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// All was done: look again when the bell rings.
    Bell,
    /// It failed, or another one runs: look again after a while.
    Soon,
    /// It ended, and could not do all that should be done: look again after a while, and after a longer one each time.
    Later,
}

/// How long after a run that failed, or that another one holds the lock of, it is looked again.
const SOON: Duration = Duration::from_secs(30);

/// How long at most.
const LATER_MAX: Duration = Duration::from_secs(900);

/// A mode that was not done.
#[derive(Clone)]
struct Undone {
    /// How often in a row.
    times: u32,
    until: Instant,
}

impl Undone {
    /// After one more run of it.
    fn again(former: Option<Self>, next: Next) -> Self {
        let times = former.filter(|_| next == Next::Later).map_or(0, |former| former.times + 1);
        let pause = SOON.saturating_mul(1 << times.min(8)).min(LATER_MAX);
        Self { times, until: Instant::now() + pause }
    }
}

/// A job's loop in a daemon: at start, as soon as MySQL answers, and at each bell, it runs the first mode that is due.
/// `work` gets that mode's place in `timetables`.
pub async fn serve<F>(
    store: &Store,
    timetables: &[Timetable],
    bell: &Notify,
    beat: &Heartbeat,
    stop: &CancellationToken,
    work: impl Fn(usize) -> F,
) where
    F: Future<Output = Next>,
{
    let mut outage = Outage::new("asking MySQL which jobs are due");
    let mut undone: Vec<Option<Undone>> = vec![None; timetables.len()];
    while !stop.is_cancelled() {
        let next = match beat.during(first_due(store, timetables, &undone)).await {
            Ok(Some(place)) => {
                outage.over();
                // Then at once the next mode, which may be due too; a mode that failed lets the others go first.
                // First, so that one that is asked for again meanwhile is due again.
                let asked =
                    timetables.get(place).is_some_and(|timetable| timetable.asked.swap(false, Ordering::Relaxed));
                let next = beat.during(work(place)).await;
                if let Some(timetable) = timetables.get(place).filter(|_| asked && next != Next::Bell) {
                    timetable.asked.store(true, Ordering::Relaxed);
                }
                if let Some(undone) = undone.get_mut(place) {
                    *undone = if next == Next::Bell { None } else { Some(Undone::again(undone.take(), next)) };
                }
                if next == Next::Soon { SOON } else { Duration::ZERO }
            }
            Ok(None) => {
                outage.over();
                // Whoever held the lock has done what was due here.
                timetables.iter().for_each(|timetable| telemetry().jobs.waits(timetable.name, None));
                let until = undone.iter().flatten().map(|undone| undone.until).min();
                until.map_or(Duration::MAX, |until| until.saturating_duration_since(Instant::now()))
            }
            Err(error) => outage.failed(&format!("{:#}", anyhow::Error::from(error))),
        };
        let woken = async {
            tokio::select! {
                () = bell.notified(), if next != SOON => {}
                () = tokio::time::sleep(next.min(LOOK_EVERY)) => {}
            }
        };
        if stop.run_until_cancelled(beat.during(woken)).await.is_none() {
            return;
        }
    }
}

/// A bell that was missed (the clock was set, the machine slept) is made up for within this time.
const LOOK_EVERY: Duration = Duration::from_secs(60);

/// The first mode that is due; one that is `undone` only when no other is, and its pause is over.
async fn first_due(
    store: &Store,
    timetables: &[Timetable],
    undone: &[Option<Undone>],
) -> Result<Option<usize>, StoreError> {
    // MySQL's clock, because the runs' starts are told by it.
    let (now, _) = store.clock().await?;
    let mut last = None;
    for (place, timetable) in timetables.iter().enumerate() {
        if timetable.is_due(store, now).await? {
            match undone.get(place).and_then(Option::as_ref) {
                None => return Ok(Some(place)),
                Some(undone) if undone.until <= Instant::now() => last = Some(place),
                Some(_) => {}
            }
        }
    }
    Ok(last)
}
