//! The table of all jobs and their modes. The daemon's loops and the observer read it. The order of its rows affects only
//! the order in which commands show the modes.

use futures_util::FutureExt;

use super::archive::{self, Archiver, Scope};
use super::board_run::NEEDS;
use super::filters::{self, Filters};
use super::reconcile::{self, Mode, Reconciler};
use super::recount::{self, Recounter};
use super::run::{self, RunOptions, RunReport};
use super::runner::{Outcome, Ran};
use super::schedule::RetryAfter;
use super::snapshots::{SNAPSHOT_MODE, Snapshots};
use super::{FirstRun, JobError, JobSpec, Request, Run, Work};
use crate::config::{Config, Reconcile, Recount};
use crate::runtime::progress::ProgressSink;
use tallyd_core::job_name::{JobMode, JobName};

#[derive(Clone, Debug, Default)]
pub struct Requests {
    pub rebuild: Request,
    pub snapshot: Request,
}

pub fn modes(config: &Config) -> Vec<JobMode> {
    let mode = |spec: JobSpec| JobMode {
        job: spec.job,
        mode: spec.mode,
        pattern: spec.pattern,
        time_zone: config.daemon.time_zone.clone(),
    };
    JobName::ALL.into_iter().flat_map(|job| specs(job, config, &Requests::default())).map(mode).collect()
}

pub(super) fn specs(job: JobName, config: &Config, requests: &Requests) -> Vec<JobSpec> {
    match job {
        JobName::Reconcile => reconciles(config, requests),
        JobName::Archive => archive(config, requests),
        JobName::Filters if config.filter.is_on() => {
            vec![JobSpec::new(job, filters::MODE, config.filter.schedule(), filters::NEEDS, |work| {
                filtered(work).boxed()
            })]
        }
        JobName::Filters => Vec::new(),
        JobName::Recount => recounts(config),
    }
}

fn reconciles(config: &Config, requests: &Requests) -> Vec<JobSpec> {
    let Reconcile { changed_cron, full_cron, scrub_cron, .. } = &config.reconcile;
    let row = |rank, mode: Mode, pattern: &str, run: Run| JobSpec {
        rank,
        ..JobSpec::new(JobName::Reconcile, mode.name(), pattern, reconcile::needs(config), run)
    };
    vec![
        row(3, Mode::Changed, changed_cron, |work| reconciled(work, Mode::Changed).boxed()),
        row(1, Mode::Full, full_cron, |work| reconciled(work, Mode::Full).boxed()),
        row(2, Mode::Scrub, scrub_cron, |work| reconciled(work, Mode::Scrub).boxed()),
        // First of several, because readers query MySQL until its run is done.
        JobSpec {
            request: requests.rebuild.clone(),
            ..row(0, Mode::Rebuild, "", |work| reconciled(work, Mode::Rebuild).boxed())
        },
    ]
}

fn archive(config: &Config, requests: &Requests) -> Vec<JobSpec> {
    let row = |mode: &str, pattern: &str, run: Run| JobSpec::new(JobName::Archive, mode, pattern, &NEEDS, run);
    vec![
        row(archive::MODE, &config.archive.cron, |work| archived(work).boxed()),
        JobSpec { rank: 1, request: requests.snapshot.clone(), ..row(SNAPSHOT_MODE, "", |work| saved(work).boxed()) },
    ]
}

fn recounts(config: &Config) -> Vec<JobSpec> {
    let row = |(rank, block): (usize, &Recount)| JobSpec {
        first_run: FirstRun::AtItsTime,
        rank,
        ..JobSpec::new(JobName::Recount, &block.name(), &block.cron, recount::NEEDS, |work| recounted(work).boxed())
    };
    config.recounts.iter().enumerate().map(row).collect()
}

async fn reconciled(Work { servers, config, stop, .. }: Work, mode: Mode) -> Result<RetryAfter, JobError> {
    let options = RunOptions { resume: mode == Mode::Full, ..RunOptions::default() };
    let reconciler = Reconciler::scheduled(&config, &servers, mode)?;
    run::once(&servers, &config, &reconciler, options, ProgressSink::Log, &stop).await.map(retry_after)
}

async fn archived(Work { servers, config, stop, .. }: Work) -> Result<RetryAfter, JobError> {
    let archiver = Archiver::new(&config, Scope::default());
    run::once(&servers, &config, &archiver, RunOptions::default(), ProgressSink::Log, &stop).await.map(retry_after)
}

async fn saved(Work { servers, config, stop, .. }: Work) -> Result<RetryAfter, JobError> {
    let due = Snapshots::new(&config, None, false);
    Ok(match run::once(&servers, &config, &due, RunOptions::default(), ProgressSink::Log, &stop).await? {
        // The snapshot clock decides when the next snapshot is due.
        Ran::Ended(_) => RetryAfter::NextTime,
        held => retry_after(held),
    })
}

async fn filtered(Work { servers, config, stop, .. }: Work) -> Result<RetryAfter, JobError> {
    let filters = Filters::new(&config);
    run::once(&servers, &config, &filters, RunOptions::default(), ProgressSink::Log, &stop).await.map(retry_after)
}

async fn recounted(Work { servers, config, mode, stop }: Work) -> Result<RetryAfter, JobError> {
    // A reload of the configuration can have removed the recount.
    let Some(recount) = config.recounts.iter().find(|recount| recount.name() == mode) else {
        return Ok(RetryAfter::NextTime);
    };
    let recounter = Recounter::new(&config, recount)?;
    run::once(&servers, &config, &recounter, RunOptions::default(), ProgressSink::Log, &stop).await.map(retry_after)
}

fn retry_after<R: RunReport>(ran: Ran<R>) -> RetryAfter {
    match ran {
        Ran::Held { .. } => RetryAfter::Pause,
        Ran::Ended(report) => match report.outcome() {
            Outcome::Done | Outcome::LimitExceeded | Outcome::Refused => RetryAfter::NextTime,
            Outcome::Failed | Outcome::Stopped | Outcome::DryRun => RetryAfter::LongerPause,
        },
    }
}
