//! Runs each job once under its lock. The schedule, the commands and the tests call these functions.

use tokio_util::sync::CancellationToken;

use super::JobError;
use super::fence;
use super::reconcile::{self, Reconciler};
use super::run::Allowed;
use super::runner::{LockRequest, Ran, run_once};
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
