//! Runs each job once under its lock. The schedule, the commands and the tests call these functions.

use std::time::Duration;

use tokio_util::sync::CancellationToken;

use super::JobError;
use super::archive::{self, Archiver, Scope};
use super::fence;
use super::reconcile::{self, Reconciler};
use super::run::{Allowed, OFTEN_KEEP};
use super::runner::{LockRequest, Ran, run_once};
use super::snapshots::{self, RESTORE_MODE, Restore, SNAPSHOT_MODE};
use crate::config::Config;
use crate::runtime::progress::ProgressSink;
use crate::servers::Servers;
use crate::servers::control::needed_by;
use tallyd_core::job_name::JobName;

/// Compares the counters in Redis with MySQL, and repairs Redis.
pub async fn reconcile(
    servers: &Servers,
    config: &Config,
    options: &reconcile::RunOptions,
    to: ProgressSink,
    stop: &CancellationToken,
) -> Result<Ran<reconcile::report::Report>, JobError> {
    fence::knows_all(&servers.store, &servers.broker).await?;
    let allowed = Allowed::begin(servers, needed_by(JobName::Reconcile, config), stop).await?;
    let reconciler = Reconciler::new(config, servers)?;
    let job = LockRequest {
        name: JobName::Reconcile.name(),
        mode: options.mode.name(),
        owner: &servers.owner,
        keep: config.reconcile.repair_keep.0,
    };
    run_once(&servers.store, job, |run| async move { reconciler.run(run, options, to, &allowed.stop).await }).await
}

/// Archives the boards in `scope`.
pub async fn archive(
    servers: &Servers,
    config: &Config,
    scope: &Scope,
    to: ProgressSink,
    stop: &CancellationToken,
) -> Result<Ran<archive::Report>, JobError> {
    let allowed = Allowed::begin(servers, needed_by(JobName::Archive, config), stop).await?;
    let archiver = Archiver::new(config, servers.store.clone(), servers.cache.clone());
    let job = archive_job(servers, scope.mode(), config.reconcile.repair_keep.0);
    run_once(&servers.store, job, |run| async move { archiver.run_now(run, scope, to, &allowed.stop).await }).await
}

#[derive(Clone, Copy, Debug)]
pub enum Snapshots<'a> {
    Due,
    Of {
        scope: &'a Scope,
        /// Whether the snapshot is taken even if Redis lost the board, or most of the board.
        force: bool,
    },
}

/// Takes snapshots of boards, under the archiver's lock.
pub async fn snapshot(
    servers: &Servers,
    config: &Config,
    of: Snapshots<'_>,
    to: ProgressSink,
    stop: &CancellationToken,
) -> Result<Ran<archive::Report>, JobError> {
    let (scope, force, allowed) = match of {
        Snapshots::Due => {
            (None, false, Some(Allowed::begin(servers, needed_by(JobName::Archive, config), stop).await?))
        }
        // An operator requested this snapshot, so it is taken even if the job is paused.
        Snapshots::Of { scope, force } => (Some(scope), force, None),
    };
    let stop = allowed.as_ref().map_or(stop, |allowed| &allowed.stop);
    let snapshots = snapshots(servers, config);
    let job = archive_job(servers, SNAPSHOT_MODE, OFTEN_KEEP);
    run_once(&servers.store, job, |run| async move { snapshots.save_now(run, scope, force, to, stop).await }).await
}

/// Restores one period of a board in Redis, under the archiver's lock.
pub async fn restore(
    servers: &Servers,
    config: &Config,
    board: (&str, &str),
    how: Restore,
    to: ProgressSink,
    stop: &CancellationToken,
) -> Result<Ran<archive::Report>, JobError> {
    let snapshots = snapshots(servers, config);
    let (now, _) = servers.store.clock().await?;
    let job = archive_job(servers, RESTORE_MODE, config.reconcile.repair_keep.0);
    let work = |run| async move { snapshots.restore(run, board, how, now, to, stop).await };
    run_once(&servers.store, job, work).await
}

fn snapshots(servers: &Servers, config: &Config) -> snapshots::Snapshots {
    snapshots::Snapshots::new(config, servers.store.clone(), servers.cache.clone())
}

fn archive_job<'a>(servers: &'a Servers, mode: &'a str, keep: Duration) -> LockRequest<'a> {
    LockRequest { name: JobName::Archive.name(), mode, owner: &servers.owner, keep }
}
