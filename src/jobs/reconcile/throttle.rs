//! Sets the pace of a run, based on the load of the servers and on the run's deadline. Also shows why the run waits.

use std::time::{Duration, Instant};

use anyhow::Result;
use tracing::info;

use super::context::{JOB, RunContext};
use super::report::Report;
use crate::servers::pace::{Health, Pace};
use tallyd_rabbitmq::Publisher;

/// Sets the size of a run's pages, and decides when the next page can begin.
pub(super) struct Throttle<'a> {
    run: &'a RunContext<'a>,
    pace: Pace,
}

impl<'a> Throttle<'a> {
    pub(super) fn new(run: &'a RunContext<'a>) -> Self {
        let servers = run.servers;
        let health = Health {
            servers: servers.shared.clone(),
            replicas: servers.replicas.clone(),
            site: None,
            limits: servers.limits.clone(),
            number: run.number,
        };
        let job = (JOB, say as fn(&str));
        Self { run, pace: Pace::new(health, run.early_end.stop.clone(), job, servers.limits.page_targets) }
    }

    /// Returns the number of targets in the next page.
    pub(super) fn page(&self) -> usize {
        self.pace.page()
    }

    /// Returns how many ranges MySQL may recount at the same time.
    pub(super) fn parallel_ranges(&self) -> usize {
        if self.pace.has_room() { 2 } else { 1 }
    }

    /// Sets the size of the next page. The run needed the time `took` for a page of `targets` targets.
    pub(super) fn note(&mut self, targets: usize, took: Duration) {
        self.pace.note(targets, took);
    }

    /// Waits until the servers have capacity for the next page. If the run is stopped or its deadline passes, the wait
    /// ends, too. If the run has a `wait_max`, the run gives up after this time, because other runs wait for its end.
    pub(super) async fn wait(&mut self, publisher: Option<&Publisher>) -> Result<()> {
        let RunContext { early_end, options, progress, .. } = self.run;
        if early_end.gave_up() {
            return Ok(());
        }
        let patience = options.wait_max.map(|max| Instant::now() + max);
        let until = early_end.deadline().into_iter().chain(patience).min();
        let show = |reason: Option<&str>| progress.send_modify(|progress| progress.waiting = reason.map(str::to_owned));
        self.pace.wait(until, publisher, show).await?;
        if patience.is_some_and(|patience| Instant::now() > patience) {
            early_end.give_up();
        }
        Ok(())
    }

    /// Writes into the report how long the run waited, and why.
    pub(super) fn report(self, report: &mut Report) {
        let (waited, waits, waited_for) = self.pace.waited();
        (report.waited_s, report.waits, report.waited_for) = (waited.as_secs(), waits, waited_for);
    }
}

fn say(reason: &str) {
    info!(event = "reconcile-waiting", reason, "waiting, live traffic goes first: {reason}");
}
