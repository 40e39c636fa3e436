//! Redis' counters compared with MySQL, and what has drifted repaired, while likes go on.
//!
//! The way of a page of targets: sample Redis (the cut, by Redis' own clock) -> wait `publish_grace` -> send a fence
//! through every partition and wait until it is committed -> read MySQL -> judge. What is off is measured once more,
//! and only a drift seen twice in one direction is added back, by the smaller of the two. A target that something newer
//! than the cut was applied to is *busy*: it is watched. While watched, the consumers log its events with the rows'
//! former states, and from the value now and that log its value as of the cut is exact.
//!
//! The races, and what decides them:
//!
//! * A: a like counts in Redis. B: the sample. C: the like's event is committed. The cut is after A, the fence after
//!   `publish_grace`, so C comes before the read: no drift. If the API server stalls between A and its publish for
//!   longer, the first look sees +1; by the second the event has come, and nothing is repaired.
//! * A: the sample. B: a like. Its `at` is after the cut, so the row of `counter` says that the target is busy.
//! * A: two looks agree on a drift. B: a like. C: the repair. It adds a difference and so keeps B (invariant 4).
//! * A: the repair times out. B: a later run looks. C: the repair runs after all. The script checks that the bucket's
//!   field `_` is as the sample saw it, and every repair changes that field: of A and a repair of B only one is added.
//! * A: Redis is flushed between look and repair: `_` is gone, the script refuses. What is missing from such a bucket is
//!   unknown, not zero. A full run marks it (`~run`), repairs its targets, and says that it is loaded only if the mark
//!   is still there at the end.
//! * Two reconciles: the job's lock admits one. If the first one's lease ran out while it was frozen, its fences are
//!   lower than the second one's and never pass, and MySQL refuses its writes.
//! * A row of `counter` is corrected while the consumer writes it: difference and rows are read in one snapshot, and
//!   the correction is added.
//!
//! What it must never do: set a counter, change MySQL's likes, judge a value without a fence.

mod cut;
pub mod drift;
mod page;
pub mod report;

use std::collections::BTreeSet;

use anyhow::{Context, Result};
use tokio_util::sync::CancellationToken;
use tracing::info;

use crate::broker::Broker;
use crate::cache::Cache;
use crate::cache::keys::KindNames;
use crate::config::{Config, Kinds, Reconcile as Limits};
use crate::model::{Kind, Metric, Micros, Target, TargetId};
use crate::store::Store;
use crate::store::changed::ChangedBefore;
use crate::store::jobs::number_of;

use cut::Fences;
pub use cut::NotNow;
use report::Report;

/// The name of the job in `job_lock` and `job_run`.
pub const JOB: &str = "reconcile";

/// Buckets whose fields are listed at once: about 16,000 ids.
const LISTED_BUCKETS: u32 = 128;

/// Which targets a run looks at.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Those that changed since the last run. Becomes full where Redis has buckets that nobody has loaded.
    Changed,
    /// All: like_record is recounted, `counter` checked against it, and Redis searched for what MySQL doesn't know.
    Full,
    /// These, recounted.
    Targets(Vec<Target>),
}

impl Mode {
    /// Its name in tables, logs and reports.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Changed => "changed",
            Self::Full => "full",
            Self::Targets(_) => "targets",
        }
    }
}

/// What a reconcile stands on.
#[derive(Clone)]
pub struct Reconciler {
    store: Store,
    cache: Cache,
    broker: Broker,
    limits: Limits,
    kinds: Kinds,
    names: KindNames,
    metric: Metric,
}

/// One run on its way.
struct Run<'a> {
    on: &'a Reconciler,
    fences: Fences<'a>,
    number: u64,
    /// How many numbers (fences, watches, repairs) the run has used.
    used: u64,
    recounts: bool,
    lists_all: bool,
    stop: &'a CancellationToken,
    report: Report,
}

impl Reconciler {
    /// A reconciler of these servers.
    pub fn new(config: &Config, store: Store, cache: Cache, broker: Broker) -> Self {
        Self {
            store,
            cache,
            broker,
            limits: config.reconcile.clone(),
            kinds: config.kinds.clone(),
            names: KindNames::new(&config.kinds),
            metric: config.metrics.like(),
        }
    }

    /// Does the run `number` of the job, which the caller holds the lock of. With `dry_run` it only looks. Ends between
    /// two pages when `stop` is cancelled.
    ///
    /// # Errors
    /// [`NotNow`] when events on the way can't be waited for; the servers' errors. Whatever was repaired stays repaired.
    pub async fn run(&self, number: u64, mode: &Mode, dry_run: bool, stop: &CancellationToken) -> Result<Report> {
        // What an earlier run that was killed has left behind.
        self.store.unwatch(number).await?;
        let publisher = self.broker.connect_publisher("reconcile").await?;
        let fences = Fences { store: &self.store, broker: &self.broker, publisher, fence_max: self.limits.fence_max.0 };
        let report = Report { mode: mode.name(), dry_run, ..Report::default() };
        let recounts = *mode != Mode::Changed;
        let lists_all = matches!(mode, Mode::Targets(_));
        let mut run = Run { on: self, fences, number, used: 0, recounts, lists_all, stop, report };
        let result = run.compare_all(mode).await;
        let ended = self.store.unwatch(number).await;
        match result {
            Err(error) if stop.is_cancelled() && error.is::<NotNow>() => {}
            result => result?,
        }
        ended?;
        if stop.is_cancelled() {
            run.report.ended_early = Some("told to stop".to_owned());
        }
        Ok(run.report)
    }
}

impl Run<'_> {
    async fn compare_all(&mut self, mode: &Mode) -> Result<()> {
        if let Mode::Targets(targets) = mode {
            let targets: BTreeSet<Target> = targets.iter().copied().collect();
            return self.compare_pages(&targets.into_iter().collect::<Vec<_>>()).await;
        }
        let mut unloaded = 0;
        for kind in self.on.kinds.0.keys() {
            unloaded += self.on.cache.count_unloaded(kind).await?;
        }
        if *mode == Mode::Changed && unloaded == 0 {
            return self.compare_changed().await;
        }
        if *mode == Mode::Changed {
            info!(
                event = "reconcile-becomes-full",
                unloaded, "Redis has {unloaded} buckets that are not loaded: comparing all targets"
            );
            (self.recounts, self.report.mode) = (true, Mode::Full.name());
        }
        let began = self.now().await?;
        // So that no event up to `began` is committed only after the lists were read.
        self.fence().await?;
        self.compare_full().await?;
        self.report.cut = Some(began.0);
        Ok(())
    }

    /// Compares what changed from the last run's cut until now, by Redis' clock.
    async fn compare_changed(&mut self) -> Result<()> {
        let until = self.now().await?;
        // So that no event up to `until` is committed only after the list was read.
        self.fence().await?;
        let from = self.on.store.last_cut(JOB).await?.unwrap_or(Micros(0));
        let start = from.before(self.on.limits.overlap.0).max(Micros(0));
        let mut before = ChangedBefore::NEWEST;
        let limit = self.on.limits.page_targets;
        loop {
            let rows = self.on.store.changed_targets(self.on.metric, start, before, limit).await?;
            let targets: BTreeSet<Target> = rows.iter().map(|row| row.target).collect();
            self.compare_pages(&targets.into_iter().collect::<Vec<_>>()).await?;
            let Some(last) = rows.last().filter(|_| rows.len() == limit && !self.stop.is_cancelled()) else { break };
            before = *last;
        }
        // What was left must be looked at again, by the next run of this kind.
        self.report.cut = Some(if self.report.left == 0 { until.0 } else { from.0 });
        Ok(())
    }

    /// Compares every target that MySQL or Redis knows, and loads the buckets that nobody has loaded.
    async fn compare_full(&mut self) -> Result<()> {
        let kinds: Vec<(String, Kind)> =
            self.on.kinds.0.iter().map(|(name, code)| (name.clone(), Kind(*code))).collect();
        if !self.report.dry_run {
            for (name, _) in &kinds {
                self.on.cache.begin_load(name, self.number).await?;
            }
        }
        for (name, kind) in &kinds {
            // In this order: a target that MySQL comes to know meanwhile is still on the second list.
            self.compare_phantoms(name, *kind).await?;
            self.compare_known(*kind).await?;
        }
        if !self.report.dry_run && !self.stop.is_cancelled() && self.report.left == 0 {
            for (name, _) in &kinds {
                self.report.buckets_loaded += self.on.cache.end_load(name, self.number).await?;
            }
        }
        Ok(())
    }

    async fn compare_known(&mut self, kind: Kind) -> Result<()> {
        let mut after = TargetId(0);
        while !self.stop.is_cancelled() {
            let ids = self.on.store.known_targets(kind, self.on.metric, after, self.on.limits.page_targets).await?;
            let Some(last) = ids.last() else { break };
            after = *last;
            self.compare_pages(&ids.into_iter().map(|id| Target { kind, id }).collect::<Vec<_>>()).await?;
        }
        Ok(())
    }

    /// What Redis has and MySQL doesn't: likes whose events were lost to the last one.
    async fn compare_phantoms(&mut self, name: &str, kind: Kind) -> Result<()> {
        let buckets = self.on.cache.keys.buckets();
        let mut phantoms = Vec::new();
        for from in (0..buckets).step_by(LISTED_BUCKETS as usize) {
            let until = buckets.min(from + LISTED_BUCKETS);
            let targets = self.on.cache.targets_in(name, kind, from..until).await?;
            phantoms.extend(self.unknown_to_mysql(targets).await?);
            if self.stop.is_cancelled() {
                break;
            }
            if phantoms.len() >= self.on.limits.page_targets || until == buckets {
                phantoms.sort_unstable();
                self.report.phantoms += phantoms.len() as u64;
                self.compare_pages(&std::mem::take(&mut phantoms)).await?;
            }
        }
        Ok(())
    }

    /// Those of `targets`, sorted by key, that have neither a counter nor a like record.
    async fn unknown_to_mysql(&self, mut targets: Vec<Target>) -> Result<Vec<Target>> {
        // Counters first: they are few point reads each, and nearly every target has one.
        for recount in [false, true] {
            let truths = self.on.store.truths(self.on.metric, &targets, recount).await?;
            targets.retain(|target| truths.get(target).is_none_or(|truth| truth.update_at.is_none()));
        }
        Ok(targets)
    }

    /// Compares `targets`, sorted by key, page by page.
    async fn compare_pages(&mut self, targets: &[Target]) -> Result<()> {
        for page in targets.chunks(self.on.limits.page_targets) {
            if self.stop.is_cancelled() {
                break;
            }
            self.compare(page).await?;
        }
        Ok(())
    }

    /// Waits until every event up to now is in MySQL.
    async fn fence(&mut self) -> Result<()> {
        let number = self.next_number();
        let passed = async {
            tokio::time::sleep(self.on.limits.publish_grace.0).await;
            self.fences.pass(number).await
        };
        // The daemon's own consumers stop too: then nobody lets the fence pass.
        let stopped = || NotNow("told to stop".to_owned()).into();
        self.stop.run_until_cancelled(passed).await.unwrap_or_else(|| Err(stopped()))
    }

    fn name(&self, target: Target) -> String {
        format!("{}:{}", self.on.kinds.name(target.kind), target.id)
    }

    fn next_number(&mut self) -> u64 {
        self.used += 1;
        number_of(self.number, self.used)
    }

    /// Redis' clock.
    async fn now(&self) -> Result<Micros> {
        self.on.cache.now().await.context("ask for Redis' clock")
    }
}
