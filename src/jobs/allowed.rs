//! Applies operators' pauses to a run: if a job is paused, a new run does not begin, and a run in progress stops at its
//! next page.

use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use super::JobError;
use crate::config::Config;
use crate::servers::Servers;
use crate::servers::control::{READ_EVERY, needed_by};
use tallyd_core::job_name::JobName;

/// A run that is not paused.
pub(super) struct Allowed {
    /// The token is cancelled at the stop, and when the run is paused.
    pub stop: CancellationToken,
    /// The tasks that read operators' orders. If a command executes the run, its process has no other task that reads
    /// these orders. The tasks are aborted when this struct is dropped.
    _following: JoinSet<()>,
}

impl Allowed {
    /// Reads the current orders, and starts tasks that watch for new orders.
    ///
    /// # Errors
    /// Fails with [`JobError::Paused`] if the job is paused. Also fails if MySQL fails.
    pub(super) async fn begin(
        servers: &Servers,
        config: &Config,
        job: JobName,
        stop: &CancellationToken,
    ) -> Result<Self, JobError> {
        let (control, needs) = (servers.control.clone(), needed_by(job, config));
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
                // A failure is ignored here, because the run itself fails if MySQL does not answer.
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
