//! The table of all jobs and their modes. The daemon's loops, its cron triggers, the observer and `config check` read
//! this table. The order of the table's rows affects only the order in which commands show the modes.

use futures_util::FutureExt;

use super::archive::{self, Scope};
use super::reconcile::{self, Mode};
use super::recount::Recounter;
use super::run::{self, RunOptions};
use super::runner::{Outcome, Ran, Report};
use super::runs::{self, Snapshots};
use super::schedule::RetryAfter;
use super::snapshots::SNAPSHOT_MODE;
use super::{Cron, FirstRun, JobError, JobSpec, Request, Run, Wakes, Work, filters};
use crate::config::Config;
use crate::runtime::progress::ProgressSink;
use tallyd_core::job_name::{JobMode, JobName};

#[derive(Clone, Debug, Default)]
pub struct Requests {
    /// The request that is made when Redis lost buckets.
    pub rebuild: Request,
    /// The request that is made when a snapshot of a board is due.
    pub snapshot: Request,
}

impl Requests {
    pub fn new(wakes: &Wakes) -> Self {
        Self { rebuild: Request::new(wakes.of(JobName::Reconcile)), snapshot: Request::new(wakes.of(JobName::Archive)) }
    }
}

pub fn specs_of(job: JobName, config: &Config, requests: &Requests) -> Vec<JobSpec> {
    table(config, requests).into_iter().filter(|spec| spec.job == job).collect()
}

/// Returns all modes of all jobs in this configuration, with their schedules.
pub fn modes(config: &Config) -> Vec<JobMode> {
    let specs = table(config, &Requests::default()).into_iter();
    let mode = |spec: JobSpec| JobMode {
        job: spec.job,
        pattern: spec.pattern(config).to_owned(),
        time_zone: config.daemon.time_zone.clone(),
        mode: spec.mode,
    };
    specs.map(mode).collect()
}

fn table(config: &Config, requests: &Requests) -> Vec<JobSpec> {
    let mut table = reconcile(requests);
    table.extend(archive(requests));
    if config.filter.is_on() {
        let (mode, cron): (&str, Cron) = (filters::MODE, |config, _| config.filter.schedule());
        table.push(JobSpec::new(JobName::Filters, mode, cron, |work| filtered(work).boxed()));
    }
    table.extend(config.recounts.iter().enumerate().map(|(rank, recount)| JobSpec {
        first_run: FirstRun::AtItsTime,
        rank,
        ..JobSpec::new(JobName::Recount, &recount.name(), recount_cron, |work| recounted(work).boxed())
    }));
    table
}

fn reconcile(requests: &Requests) -> Vec<JobSpec> {
    let row = |mode: Mode, cron: Cron, run: Run| JobSpec::new(JobName::Reconcile, mode.name(), cron, run);
    vec![
        JobSpec {
            rank: 3,
            ..row(
                Mode::Changed,
                |config, _| &config.reconcile.changed_cron,
                |work| reconciled(work, Mode::Changed).boxed(),
            )
        },
        JobSpec {
            rank: 1,
            ..row(Mode::Full, |config, _| &config.reconcile.full_cron, |work| reconciled(work, Mode::Full).boxed())
        },
        JobSpec {
            rank: 2,
            ..row(Mode::Scrub, |config, _| &config.reconcile.scrub_cron, |work| reconciled(work, Mode::Scrub).boxed())
        },
        // If several modes are due, this one runs first, because readers query MySQL until its run is done.
        JobSpec {
            rank: 0,
            request: requests.rebuild.clone(),
            ..row(Mode::Rebuild, never, |work| reconciled(work, Mode::Rebuild).boxed())
        },
    ]
}

fn archive(requests: &Requests) -> [JobSpec; 2] {
    let row = |mode: &str, cron: Cron, run: Run| JobSpec::new(JobName::Archive, mode, cron, run);
    [
        JobSpec { rank: 0, ..row(archive::MODE, |config, _| &config.archive.cron, |work| archived(work).boxed()) },
        JobSpec {
            rank: 1,
            request: requests.snapshot.clone(),
            ..row(SNAPSHOT_MODE, never, |work| saved(work).boxed())
        },
    ]
}

fn never<'a>(_: &'a Config, _: &str) -> &'a str {
    ""
}

fn recount_cron<'a>(config: &'a Config, mode: &str) -> &'a str {
    let found = config.recounts.iter().find(|recount| recount.name() == mode);
    found.map_or("", |recount| &recount.cron)
}

async fn reconciled(Work { servers, config, stop, .. }: Work, mode: Mode) -> Result<RetryAfter, JobError> {
    runs::reconcile(&servers, &config, &reconcile::RunOptions::scheduled(mode), ProgressSink::Log, &stop)
        .await
        .map(retry_after)
}

async fn archived(Work { servers, config, stop, .. }: Work) -> Result<RetryAfter, JobError> {
    runs::archive(&servers, &config, &Scope::default(), ProgressSink::Log, &stop).await.map(retry_after)
}

async fn saved(Work { servers, config, stop, .. }: Work) -> Result<RetryAfter, JobError> {
    Ok(match runs::snapshot(&servers, &config, Snapshots::Due, ProgressSink::Log, &stop).await? {
        // The result of the run does not matter here, because the snapshot clock decides when the next snapshot is due.
        Ran::Ended(_) => RetryAfter::NextTime,
        held => retry_after(held),
    })
}

async fn filtered(Work { servers, config, stop, .. }: Work) -> Result<RetryAfter, JobError> {
    runs::filters(&servers, &config, &stop).await.map(retry_after)
}

async fn recounted(Work { servers, config, mode, stop }: Work) -> Result<RetryAfter, JobError> {
    // A reload of the configuration can have removed the recount.
    let Some(recount) = config.recounts.iter().find(|recount| recount.name() == mode) else {
        return Ok(RetryAfter::NextTime);
    };
    let recounter = Recounter::new(&config, recount)?;
    run::once(&servers, &config, &recounter, RunOptions::default(), ProgressSink::Log, &stop).await.map(retry_after)
}

fn retry_after<R: Report>(ran: Ran<R>) -> RetryAfter {
    match ran {
        Ran::Held { .. } => RetryAfter::Pause,
        Ran::Ended(report) => match report.outcome() {
            Outcome::Done | Outcome::LimitExceeded | Outcome::Refused => RetryAfter::NextTime,
            Outcome::Failed | Outcome::Stopped | Outcome::DryRun => RetryAfter::LongerPause,
        },
    }
}
