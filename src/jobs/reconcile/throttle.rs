//! Sets the pace of a run, based on the load of the servers and on the run's deadline.

use std::time::{Duration, Instant};

use anyhow::Result;
use tracing::info;

use super::context::{JOB, RunContext};
use tallyd_base::jobs::run::RunHead;
use tallyd_base::servers::pace::{Health, Pace};
use tallyd_rabbitmq::Publisher;

pub(super) struct Throttle<'a> {
    run: &'a RunContext<'a>,
    pace: Pace,
}

impl<'a> Throttle<'a> {
    pub(super) fn new(run: &'a RunContext<'a>) -> Self {
        let servers = run.servers;
        let health = Health {
            servers: run.base.servers.clone(),
            replicas: servers.replicas.clone(),
            site: None,
            limits: servers.limits.clone(),
            number: run.base.number,
        };
        let job = (JOB, log_wait as fn(&str));
        Self { run, pace: Pace::new(health, run.base.stop.clone(), job, servers.limits.page_targets) }
    }

    pub(super) fn page(&self) -> usize {
        self.pace.page()
    }

    pub(super) fn parallel_ranges(&self) -> usize {
        if self.pace.has_room() { 2 } else { 1 }
    }

    pub(super) fn note(&mut self, targets: usize, took: Duration) {
        self.pace.note(targets, took);
    }

    /// Ends at the stop and the deadline. Gives up after `wait_max`, because other runs wait for the end of this one.
    pub(super) async fn wait(&mut self, publisher: Option<&Publisher>) -> Result<()> {
        let RunContext { early_end, job, base, .. } = self.run;
        if early_end.gave_up() {
            return Ok(());
        }
        let patience = job.wait_max.map(|max| Instant::now() + max);
        let until = base.deadline().into_iter().chain(patience).min();
        self.pace.wait(until, publisher).await?;
        if patience.is_some_and(|patience| Instant::now() > patience) {
            early_end.give_up();
        }
        Ok(())
    }

    pub(super) fn report(self, head: &mut RunHead) {
        head.waited = self.pace.waited();
    }
}

fn log_wait(reason: &str) {
    info!(event = "reconcile-waiting", reason, "waiting, live traffic goes first: {reason}");
}
