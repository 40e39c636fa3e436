//! The table of all jobs. The daemon's loops and the observer read it.

use std::sync::Arc;

use futures_util::FutureExt;

use super::archive::{self, Archiver, Scope};
use super::board_run::NEEDS;
use super::reconcile::{self, Mode, Reconciler};
use super::snapshots::{SNAPSHOT_MODE, Snapshots};
use tallyd_base::config::{Config, Reconcile};
use tallyd_base::jobs::run::{RunOptions, scheduled};
use tallyd_base::jobs::schedule::RetryAfter;
use tallyd_base::jobs::{JobEntry, JobError, JobSpec, Request, RunFn, Work};

/// What detectors ask for, and no schedule.
#[derive(Clone, Debug, Default)]
pub struct Requests {
    pub rebuild: Request,
    pub snapshot: Request,
}

pub fn table(requests: &Requests) -> Vec<JobEntry> {
    let Requests { rebuild, snapshot } = requests.clone();
    vec![
        JobEntry {
            name: reconcile::JOB,
            task: "reconciler",
            specs: Arc::new(move |config| reconciles(config, &rebuild)),
            first: None,
        },
        JobEntry {
            name: archive::JOB,
            task: "archiver",
            specs: Arc::new(move |config| archive(config, &snapshot)),
            first: None,
        },
        tallyd_filters::job(),
        tallyd_recount::job(),
    ]
}

fn reconciles(config: &Config, rebuild: &Request) -> Vec<JobSpec> {
    let Reconcile { changed_cron, full_cron, scrub_cron, .. } = &config.reconcile;
    let row = |rank, mode: Mode, pattern: &str, run: RunFn| JobSpec {
        rank,
        ..JobSpec::new(mode.name(), pattern, reconcile::needs(config), run)
    };
    vec![
        row(3, Mode::Changed, changed_cron, |work| reconciled(work, Mode::Changed).boxed()),
        row(1, Mode::Full, full_cron, |work| reconciled(work, Mode::Full).boxed()),
        row(2, Mode::Scrub, scrub_cron, |work| reconciled(work, Mode::Scrub).boxed()),
        // First of several, because readers query MySQL until its run is done.
        JobSpec {
            request: rebuild.clone(),
            ..row(0, Mode::Rebuild, "", |work| reconciled(work, Mode::Rebuild).boxed())
        },
    ]
}

fn archive(config: &Config, snapshot: &Request) -> Vec<JobSpec> {
    let row = |mode: &str, pattern: &str, run: RunFn| JobSpec::new(mode, pattern, &NEEDS, run);
    vec![
        row(archive::MODE, &config.archive.cron, |work| archived(work).boxed()),
        JobSpec { rank: 1, request: snapshot.clone(), ..row(SNAPSHOT_MODE, "", |work| saved(work).boxed()) },
    ]
}

async fn reconciled(work: Work, mode: Mode) -> Result<RetryAfter, JobError> {
    let options = RunOptions { resume: mode == Mode::Full, ..RunOptions::default() };
    scheduled(&work, &Reconciler::scheduled(&work.config, &work.servers, mode)?, options).await
}

async fn archived(work: Work) -> Result<RetryAfter, JobError> {
    scheduled(&work, &Archiver::new(&work.config, Scope::default()), RunOptions::default()).await
}

async fn saved(work: Work) -> Result<RetryAfter, JobError> {
    let due = Snapshots::new(&work.config, None, false);
    Ok(match scheduled(&work, &due, RunOptions::default()).await? {
        // The snapshot clock decides when the next snapshot is due.
        RetryAfter::LongerPause => RetryAfter::NextTime,
        retry => retry,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use tallyd_base::jobs::FirstRun;
    use tallyd_base::servers::CONNECTIONS_OF_LEASES;

    #[test]
    fn each_job_has_its_modes_in_their_order_and_a_connection_for_its_lease() {
        let requests = Requests::default();
        let jobs = table(&requests);
        assert_eq!(jobs.len(), CONNECTIONS_OF_LEASES as usize);
        let query = "SELECT video_id, 1 FROM c WHERE video_id > :after LIMIT :limit";
        let recounts = ["comment", "share"]
            .map(|metric| format!("[[recount]]\nkind = \"video\"\nmetric = \"{metric}\"\nquery = \"{query}\"\n"));
        let text =
            format!("[filter]\nlikes_min = 9\n[metrics]\nlike = 1\ncomment = 2\nshare = 3\n{}", recounts.concat());
        let config = tallyd_base::config::parse(&text, "config.toml", []).unwrap();
        let modes = |name: &str| {
            let job = jobs.iter().find(|job| job.name == name).unwrap();
            let mut specs = (job.specs)(&config);
            specs.sort_by_key(|spec| spec.rank);
            specs
        };
        for (job, expected, first_run) in [
            (reconcile::JOB, vec!["rebuild", "full", "scrub", "changed"], FirstRun::Immediately),
            (archive::JOB, vec!["closed", "snapshot"], FirstRun::Immediately),
            (tallyd_filters::JOB, vec!["keep"], FirstRun::Immediately),
            (tallyd_recount::JOB, vec!["video:comment", "video:share"], FirstRun::AtItsTime),
        ] {
            let specs = modes(job);
            assert_eq!(specs.iter().map(|spec| spec.mode.as_str()).collect::<Vec<_>>(), expected);
            assert!(specs.iter().all(|spec| spec.first_run == first_run), "{job}");
        }
        requests.rebuild.make();
        assert!(modes(reconcile::JOB)[0].request.is_made() && !modes(archive::JOB)[1].request.is_made());
        requests.snapshot.make();
        assert!(modes(archive::JOB)[1].request.is_made());
    }
}
