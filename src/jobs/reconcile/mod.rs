//! Compares Redis' counters with MySQL and repairs drift, while the site keeps writing likes.
//!
//! A page of counters is measured in four steps: the run samples Redis (at an instant of Redis' clock, the cut), sends
//! a fence through every partition, waits until the fences are committed, reads MySQL and compares. Nearly all counters
//! are right at this measurement. The others are suspects, and are measured once more. If API servers write the
//! suspects to Redis, the run waits `publish_grace` before the second sample, and again before the second fence. If two
//! measurements find a drift in the same direction, the smaller drift is repaired. A counter is *busy* if an event
//! newer than the cut was applied to it. Such a counter is measured again together with a few others. If it is still
//! busy, it is watched: the consumers log its events with the rows' former states, and the run computes the counter's
//! value at the cut from its current value and this log.
//!
//! `load` loads lost buckets. `scan` selects the counters and their order. `compare` handles one page at a time
//! (`measure`, recheck, `repair`). Before each page the `throttle` waits until the servers have capacity. These modules
//! share the state in `context`.
//!
//! Possible races, each with its outcome:
//!
//! * A: an API server counts a like in Redis. B: the first measurement takes its sample and sends its fence. C: the
//!   like's event is published. The first measurement finds a drift of +1. The second one takes its sample
//!   `publish_grace` later, and sends its fence after another `publish_grace`, so it includes C, and nothing is
//!   repaired. If C is later than both fences, the like appears as a drift and is repaired. So do two late events that
//!   each cause a drift in one measurement. A later run measures after these events were applied, and reverts the
//!   repair.
//! * A: the sample. B: a like. Its `at` is after the cut, so the row of `counter` shows that the counter is busy.
//! * A: two measurements agree on a drift. B: a like. C: the repair. The repair adds a difference, so the like of B
//!   stays counted (invariant 4).
//! * A: the repair times out. B: a later run measures. C: Redis runs the repair of A late. The repair script checks
//!   that the bucket's field `_` has not changed since the sample, and every repair changes that field. So only one
//!   repair is made: either A's, or that of the later run.
//! * A: two measurements agree. B: the run freezes, its lease ends, and a later run finds the counter right. C: the
//!   repair runs. The script refuses a repair whose deadline by Redis' clock has passed. No other run can begin before
//!   this deadline.
//! * A: two measurements agree. B: Redis fails over to a replica that does not have the drift. The repair is not made,
//!   because Redis has a different data set than at the start of the run.
//! * A: a measurement. B: Redis is flushed. C: the repair. The script refuses it, because `_` is missing. Until a run
//!   has loaded the bucket again, a counter that is missing in it has an unknown value, not zero.
//! * Two reconciles want to run. The job's lock lets only one of them run. If the lease of a frozen run ended, its
//!   fences never pass, because the second run's fences have higher numbers, and MySQL refuses its writes.
//! * A row of `counter` is corrected while the consumer writes it. The run reads the row and the target's like records
//!   in one snapshot, and adds the difference between both values to the row.
//!
//! A reconcile must never set a counter, change MySQL's likes, or compare a value before its fence is committed.

mod compare;
mod context;
mod load;
pub(crate) mod loss_detector;
mod measure;
mod orphans;
mod raised;
mod repair;
pub mod report;
mod scan;
mod throttle;

use std::borrow::Cow;
use std::time::Duration;

use anyhow::Result;
use tracing::warn;

use tallyd_base::config::{Config, Rules};
use tallyd_base::jobs::run::{Ended, Job, Run};
use tallyd_core::control::Task;
use tallyd_mysql::Store;
use tallyd_redis::keys::KindNames;

use compare::Comparer;
pub use context::{JOB, Mode};
use context::{RunContext, Servers, WAIT_MAX};
use report::{Progress, Report};

pub struct Reconciler {
    mode: Mode,
    pub reload: bool,
    pub wait_max: Option<Duration>,
    servers: Servers,
}

impl Reconciler {
    pub fn new(config: &Config, servers: &tallyd_base::servers::Servers, mode: Mode) -> Result<Self> {
        let cache = servers.cache.named(&config.metrics);
        let replicas = Store::replicas(&config.mysql, &config.reconcile.replicas).map_err(anyhow::Error::msg)?;
        let servers = Servers {
            store: servers.store.clone(),
            also: cache.also(&config.redis, &config.metrics)?,
            cache,
            broker: servers.broker.clone(),
            replicas,
            limits: config.reconcile.clone(),
            kinds: config.kinds.clone(),
            names: KindNames::new(&config.kinds),
            metrics: config.metrics.clone(),
            rules: Rules::from(config),
        };
        Ok(Self { mode, reload: false, wait_max: None, servers })
    }

    pub fn scheduled(config: &Config, servers: &tallyd_base::servers::Servers, mode: Mode) -> Result<Self> {
        Ok(Self { wait_max: Some(WAIT_MAX), ..Self::new(config, servers, mode)? })
    }

    /// Without loss: the next run of the same mode resumes where this run ends.
    fn gives_way(&self) -> bool {
        self.wait_max.is_some() && matches!(self.mode, Mode::Full | Mode::Scrub)
    }
}

/// Fences need consumers.
pub fn needs(config: &Config) -> &'static [Task] {
    if Rules::from(config).has_counts_by_api(&config.kinds, &config.metrics) {
        &[Task::Reconcile, Task::Consumer]
    } else {
        &[Task::Reconcile]
    }
}

impl Job for Reconciler {
    const NAME: &'static str = JOB;
    const SENDS_FENCES: bool = true;
    type Report = Report;
    type Progress = Progress;

    fn needs(&self, config: &Config) -> &'static [Task] {
        needs(config)
    }

    fn mode(&self) -> Cow<'_, str> {
        Cow::Borrowed(self.mode.name())
    }

    fn begin(&self) -> (Report, Progress) {
        (Report::new(&self.mode), Progress::default())
    }

    /// Fails with [`JobError::NotNow`](tallyd_base::jobs::JobError::NotNow) if the run cannot wait for events in flight.
    async fn work(&self, run: &mut Run<'_, Self>) -> Result<()> {
        let (servers, report) = (&self.servers, std::mem::take(&mut run.report));
        servers.unwatch(run.number).await;
        let fences = match servers.rules.has_counts_by_api(&servers.kinds, &servers.metrics) {
            true => Some(run.fences(servers.limits.fence_max.0).await?),
            false => None,
        };
        if !run.options.dry_run {
            servers.forget_old_repairs().await;
        }
        let context = RunContext::new(self, run).await?;
        let mut comparer = Comparer::new(&context, fences, report);
        let compared = comparer.compare_mode().await;
        servers.unwatch(run.number).await;
        comparer.publish_metrics();
        let mut report = comparer.into_report();
        // An exceeded safety limit has priority over other reasons, because an operator must check it.
        if report.head.ended != Ended::LimitExceeded {
            context.early_end.note(&mut report.head);
        }
        run.report = report;
        compared
    }

    fn log_limit(&self, reason: &str) {
        warn!(event = "reconcile-braked", reason, "the reconcile stopped before more repairs: {reason}");
    }

    async fn close(&self) {
        for (_, replica) in &self.servers.replicas {
            replica.close().await;
        }
    }
}

impl Comparer<'_> {
    async fn compare_mode(&mut self) -> Result<()> {
        let context = self.run;
        load::check_layouts(context.servers).await?;
        if let Mode::Targets(targets) = &context.job.mode {
            return scan::compare_targets(self, targets).await;
        }
        load::unload_stale(context).await?;
        load::load_lost(context, &mut self.measure, &mut self.report).await?;
        // Waits here, because the wait for the first fence has a shorter timeout.
        self.wait().await?;
        match context.job.mode {
            Mode::Full | Mode::Layout => scan::compare_full(self).await,
            Mode::Scrub => scan::compare_slice(self).await,
            _ => scan::compare_changed(self).await,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tallyd_base::config::{Rule, Writes};

    #[test]
    fn a_reconcile_needs_consumers_only_for_numbers_of_api_servers() {
        let mut config = Config::default();
        assert_eq!(needs(&config), [Task::Reconcile]);
        config.rules = vec![Rule { writer: Writes::Api, ..Rule::of("like") }];
        assert_eq!(needs(&config), [Task::Reconcile, Task::Consumer]);
        let of_each_kind = |kind: &String| Rule { kind: Some(kind.clone()), ..Rule::of("like") };
        config.rules.extend(config.kinds.0.keys().map(of_each_kind).collect::<Vec<_>>());
        assert_eq!(needs(&config), [Task::Reconcile], "no kind follows the rule for all");
    }
}
