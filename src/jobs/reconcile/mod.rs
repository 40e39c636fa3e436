//! Compares Redis' counters with MySQL and repairs drift, while the site keeps writing likes.
//!
//! A page of counters is measured in four steps. The run takes a sample of Redis (at an instant of Redis' clock, the
//! cut). The run sends a fence through every partition and waits until the fences are committed. Then the run reads
//! MySQL and compares the values. Nearly all counters are right at this measurement. The other counters are suspects,
//! and are measured once more. If API servers write the suspects to Redis, the run waits `publish_grace` before the
//! second sample, and again before the second fence. If two measurements find a drift in the same direction, the
//! smaller drift is repaired. A counter is *busy* if an event newer than the cut was applied to it. Such a counter is
//! measured again together with a few other counters. If the counter is still busy, it is watched. While a counter is
//! watched, the consumers log its events with the rows' former states. The run computes the counter's value at the cut
//! from its current value and this log.
//!
//! A run has three steps. `load` loads lost buckets. `scan` selects the counters and the order in which they are
//! compared. `compare` handles one page at a time (`measure`, recheck, `repair`). Before each page the `throttle` waits
//! until the servers have capacity. The state that these modules share is in `context`, not in this file.
//!
//! Possible races, each with its outcome:
//!
//! * A: an API server counts a like in Redis. B: the first measurement takes its sample and sends its fence. C: the
//!   like's event is published. The first measurement finds a drift of +1. The second measurement takes its sample
//!   `publish_grace` later, and sends its fence after another `publish_grace`. So the second measurement includes C,
//!   and nothing is repaired. If C is later than both fences, the like appears as a drift and is repaired. This also
//!   happens if a late event causes a drift in the first measurement, and another late event causes a drift in the
//!   second measurement. A later run measures after these events were applied, and reverts the repair.
//! * A: the sample. B: a like. The like's `at` is after the cut, so the row of `counter` shows that the counter is
//!   busy.
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
//!   has loaded the bucket again, a counter that is missing in the bucket has an unknown value, not zero.
//! * Two reconciles want to run. The job's lock lets only one of them run. If the lease of the first run ended while
//!   that run was frozen, the fences of this run never pass, because the second run's fences have higher numbers. MySQL
//!   refuses the writes of the first run.
//! * A row of `counter` is corrected while the consumer writes it. The run reads the row of `counter` and the target's
//!   like records in one snapshot. Then the run adds the difference between both values to the row.
//!
//! A reconcile must never set a counter or change MySQL's likes. Until a fence is committed, a reconcile must not
//! compare a value.

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

use anyhow::Result;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tracing::warn;

use crate::config::{Config, Rules};
use crate::jobs::JobError;
use crate::jobs::fence::Fences;
use crate::runtime::progress::{ProgressSink, follow};
use tallyd_core::repair_limits::LimitExceeded;
use tallyd_mysql::Store;
use tallyd_redis::keys::KindNames;

use compare::Comparer;
pub use context::{JOB, Mode, RunOptions};
use context::{RunContext, Servers};
use report::{End, Progress, Report};

/// Compares Redis with MySQL and repairs Redis. Only one run is active at a time.
#[derive(Clone)]
pub struct Reconciler {
    servers: Servers,
}

struct Run<'a> {
    context: &'a RunContext<'a>,
    comparer: Comparer<'a>,
}

impl Reconciler {
    /// Makes a reconciler of these servers.
    ///
    /// # Errors
    /// Fails if the address of a replica is invalid.
    pub fn new(config: &Config, servers: &crate::servers::Servers) -> Result<Self> {
        let cache = servers.cache.named(&config.metrics);
        let replicas = Store::replicas(&config.mysql, &config.reconcile.replicas).map_err(anyhow::Error::msg)?;
        let servers = Servers {
            store: servers.store.clone(),
            also: cache.also(&config.redis, &config.metrics)?,
            cache,
            broker: servers.broker.clone(),
            shared: servers.clone(),
            replicas,
            limits: config.reconcile.clone(),
            kinds: config.kinds.clone(),
            names: KindNames::new(&config.kinds),
            metrics: config.metrics.clone(),
            rules: Rules::from(config),
        };
        Ok(Self { servers })
    }

    /// Executes the run `number` of the job and shows its progress. The caller holds the job's lock. Ends between two
    /// pages when `stop` is cancelled.
    ///
    /// # Errors
    /// Fails with [`JobError::NotNow`] if the run cannot wait for events in flight. Also fails if a server fails.
    /// Completed repairs are kept.
    pub async fn run(
        &self,
        number: u64,
        options: &RunOptions,
        to: ProgressSink,
        stop: &CancellationToken,
    ) -> Result<Report> {
        let (progress, shown) = watch::channel(Progress::default());
        let ran = tokio::select! {
            ran = self.run_showing(number, options, progress, stop) => ran,
            () = follow(to, shown) => anyhow::bail!("the output of the run is closed, so the run stops"),
        };
        for (_, replica) in &self.servers.replicas {
            replica.close().await;
        }
        ran
    }

    async fn run_showing(
        &self,
        number: u64,
        options: &RunOptions,
        progress: watch::Sender<Progress>,
        stop: &CancellationToken,
    ) -> Result<Report> {
        let servers = &self.servers;
        // Removes the watches of an earlier run that was killed.
        servers.unwatch(number).await;
        let fences = if servers.rules.has_counts_by_api(&servers.kinds, &servers.metrics) {
            let Servers { store, broker, limits, .. } = servers;
            let publisher = broker.connect_publisher("reconcile").await?;
            Some(Fences { job: JOB, store, broker, publisher, fence_max: limits.fence_max.0 })
        } else {
            None
        };
        let context = RunContext::new(servers, options, number, progress, stop).await?;
        let mut run = Run { context: &context, comparer: Comparer::new(&context, fences) };
        let result = run.run().await;
        servers.unwatch(number).await;
        run.comparer.tell_metrics();
        match result {
            Err(error) if stop.is_cancelled() && matches!(error.downcast_ref(), Some(JobError::NotNow(_))) => {}
            Err(error) if error.is::<LimitExceeded>() => {
                warn!(event = "reconcile-braked", reason = %error, "the reconcile stopped before more repairs: {error}");
                run.comparer.report.end(End::LimitExceeded, error.to_string());
            }
            result => result?,
        }
        if !options.dry_run {
            servers.forget_old_repairs().await;
        }
        Ok(run.into_report())
    }
}

impl Run<'_> {
    /// Loads the counters that Redis lost. Then compares the counters that the run's mode selects.
    async fn run(&mut self) -> Result<()> {
        let Self { context, comparer } = self;
        load::check_layouts(context.servers).await?;
        if let Mode::Targets(targets) = &context.options.mode {
            return scan::compare_targets(comparer, targets).await;
        }
        load::unload_stale(context).await?;
        load::load_lost(context, &mut comparer.measure, &mut comparer.report).await?;
        // The run waits for the servers here, because the wait for the first fence has a shorter timeout.
        comparer.wait().await?;
        match context.options.mode {
            Mode::Full | Mode::Layout => scan::compare_full(comparer).await,
            Mode::Scrub => scan::compare_slice(comparer).await,
            _ => scan::compare_changed(comparer).await,
        }
    }

    /// Returns the report, with the reason why the run ended.
    fn into_report(self) -> Report {
        let mut report = self.comparer.into_report();
        // An exceeded safety limit has priority over other reasons, because an operator must check it.
        if report.ended != End::LimitExceeded {
            self.context.early_end.note(&self.context.options.mode, &mut report);
        }
        report
    }
}
