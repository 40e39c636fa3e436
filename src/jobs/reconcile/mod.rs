//! Redis' counters compared with MySQL, and what has drifted repaired, while likes go on.
//!
//! The way of a page of targets: sample Redis (the cut, by Redis' own clock) -> send a fence through every partition and
//! wait until it is committed -> read MySQL -> judge. Nearly all are right. What is off is measured once more, this time
//! with `publish_grace` before the sample and before the fence, and only a drift seen twice in one direction is added
//! back, by the smaller of the two. A target that something newer than the cut was applied to is *busy*: it is looked at
//! again with few others, and watched if that doesn't help. While watched, the consumers log its events with the rows'
//! former states, and from the value now and that log its value as of the cut is exact.
//!
//! The races, and what decides them:
//!
//! * A: a like counts in Redis. B: the first look's sample and fence. C: the like's event is published. The look sees +1.
//!   The second one samples `publish_grace` later, and sends its fence once more so much later: C is before the read, and
//!   nothing is repaired, unless the API server stalls between A and C for longer than twice that. Where one late like
//!   misleads the first look and another one the second, once that is enough. The next run that finds the events takes
//!   back what was repaired.
//! * A: the sample. B: a like. Its `at` is after the cut, so the row of `counter` says that the target is busy.
//! * A: two looks agree on a drift. B: a like. C: the repair. It adds a difference and so keeps B (invariant 4).
//! * A: the repair times out. B: a later run looks. C: the repair runs after all. The script checks that the bucket's
//!   field `_` is as the sample saw it, and every repair changes that field: of A and a repair of B only one is added.
//! * A: two looks agree. B: the run freezes, its lease ends, and a later run finds the target right. C: the repair runs. It is
//!   refused: it has a deadline by Redis' clock, before which no other run can have begun.
//! * A: two looks agree. B: Redis fails over to a replica that lacks the drift. The repair is not made.
//! * A: Redis is flushed between look and repair: `_` is gone, the script refuses. What is missing from such a bucket is
//!   unknown, not zero, until a run has loaded it again (load.rs).
//! * Two reconciles: the job's lock admits one. If the first one's lease ran out while it was frozen, its fences are
//!   lower than the second one's and never pass, and MySQL refuses its writes.
//! * A row of `counter` is corrected while the consumer writes it: difference and rows are read in one snapshot, and
//!   the correction is added.
//!
//! What it must never do: set a counter, change MySQL's likes, judge a value without a fence.

pub mod drift;
mod load;
pub mod loss_detector;
mod measure;
mod orphans;
mod outbox_lag;
mod page;
mod range;
pub mod report;
mod run_options;
mod scan;
mod scrub;
mod stale;
mod throttle;

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tracing::warn;

use crate::broker::Broker;
use crate::cache::Cache;
use crate::cache::keys::KindNames;
use crate::config::{Config, Kinds, Metrics, Reconcile as Limits, Rules, Writes};
use crate::jobs::fence::{Fences, NotNow};
use crate::model::{CounterKey, Kind, Metric, Micros, Target, TargetId};
use crate::repair_limits::{LimitExceeded, RepairLimits};
use crate::runtime::progress::{ProgressSink, follow};
use crate::store::Store;
use crate::store::jobs::number_of;

use page::Suspects;
use report::progress::Progress;
use report::{End, Report, Steps};
use run_options::WAIT_MAX;
pub use run_options::{Mode, RunOptions};
use throttle::Throttle;

/// The name of the job in `job_lock` and `job_run`.
pub const JOB: &str = "reconcile";

/// What a reconcile stands on.
#[derive(Clone)]
pub struct Reconciler {
    store: Store,
    cache: Cache,
    /// The second layout that API servers count in.
    also: Option<Cache>,
    broker: Broker,
    limits: Limits,
    kinds: Kinds,
    names: KindNames,
    metrics: Metrics,
    rules: Rules,
    /// MySQL's replicas, by name.
    replicas: Vec<(String, Store)>,
}

/// One run on its way.
struct Run<'a> {
    on: &'a Reconciler,
    options: &'a RunOptions,
    fences: Fences<'a>,
    throttle: Throttle,
    progress: watch::Sender<Progress>,
    number: u64,
    /// What Redis had when the run began.
    data_set: String,
    /// How many numbers (fences, watches, repairs) the run has used.
    used: u64,
    /// How many rows of `counter` are still to be listed.
    slice_left: u64,
    /// How many rows of `counter` were listed, or targets that were given.
    listed: u64,
    /// The servers had no time for too long.
    gave_up: bool,
    /// Why a scheduled run makes way: Redis lost buckets.
    makes_way: Option<&'static str>,
    /// What a dry run would have added to rows of `counter`.
    uncorrected: HashMap<Target, i64>,
    /// The last target of the last page.
    reached: Target,
    stop: &'a CancellationToken,
    began: Instant,
    /// Something was not looked at, because the run was over.
    cut_short: AtomicBool,
    /// Whether there was room to note all that the next run must look at.
    all_kept: bool,
    suspects: Suspects,
    /// By bucket of the kind that a full run is at: how many numbers that MySQL knows are not zero in Redis, modulo 2^16. Empty where nobody asks.
    counted_seen: Vec<u16>,
    report: Report,
}

impl Reconciler {
    /// A reconciler of these servers.
    ///
    /// # Errors
    /// The address of a replica can't be used.
    pub fn new(config: &Config, store: Store, cache: Cache, broker: Broker) -> Result<Self> {
        let replicas = Store::replicas(&config.mysql, &config.reconcile.replicas).map_err(anyhow::Error::msg)?;
        Ok(Self {
            store,
            also: cache.also(&config.redis, &config.metrics)?,
            cache,
            broker,
            limits: config.reconcile.clone(),
            kinds: config.kinds.clone(),
            names: KindNames::new(&config.kinds),
            metrics: config.metrics.clone(),
            rules: Rules::new(config),
            replicas,
        })
    }

    /// Does the run `number` of the job, which the caller holds the lock of, and shows how far it is. Ends between two pages when `stop` is
    /// cancelled.
    ///
    /// # Errors
    /// [`NotNow`] when events on the way can't be waited for; the servers' errors. Whatever was repaired stays repaired.
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
            () = follow(to, shown) => anyhow::bail!("nobody is shown the run any longer"),
        };
        for (_, replica) in &self.replicas {
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
        // What an earlier run that was killed has left behind.
        self.unwatch(number).await;
        let publisher = self.broker.connect_publisher("reconcile").await?;
        let fences = Fences {
            job: JOB,
            store: &self.store,
            broker: &self.broker,
            publisher,
            fence_max: self.limits.fence_max.0,
        };
        let mut run = Run {
            on: self,
            options,
            fences,
            throttle: Throttle::new(number, &self.limits),
            progress,
            number,
            data_set: self.cache.data_set().await.context("ask Redis which data set it has")?,
            used: 0,
            slice_left: u64::MAX,
            listed: 0,
            gave_up: false,
            makes_way: None,
            uncorrected: HashMap::new(),
            reached: Target { kind: Kind(0), id: TargetId(0) },
            stop,
            began: Instant::now(),
            cut_short: AtomicBool::new(false),
            all_kept: true,
            suspects: Suspects::new(),
            counted_seen: Vec::new(),
            report: Report::new(&options.mode, options.dry_run),
        };
        let result = run.compare_all().await;
        self.unwatch(number).await;
        match result {
            Err(error) if stop.is_cancelled() && error.is::<NotNow>() => {}
            Err(error) if error.is::<LimitExceeded>() => {
                warn!(event = "reconcile-braked", reason = %error, "nothing more is repaired: {error}");
                run.report.end(End::LimitExceeded, error.to_string());
            }
            result => result?,
        }
        if !options.dry_run {
            self.forget_old_repairs().await;
        }
        Ok(run.ended())
    }

    /// Not worth failing a run for: the next one does it, and a watch ends with its time.
    async fn unwatch(&self, number: u64) {
        if let Err(error) = self.store.unwatch(number).await {
            let error = format!("{:#}", anyhow::Error::from(error));
            warn!(event = "prune-failed", error, "what was logged of watched targets could not be forgotten: {error}");
        }
    }

    /// Not worth failing a run for: the next one does it.
    async fn forget_old_repairs(&self) {
        if let Err(error) = self.store.prune_repairs(self.limits.repair_keep.0).await {
            let error = format!("{:#}", anyhow::Error::from(error));
            warn!(event = "prune-failed", error, "old repairs could not be forgotten: {error}");
        }
    }
}

impl Run<'_> {
    /// The report, with why it ended.
    fn ended(mut self) -> Report {
        if self.report.ended == End::LimitExceeded {
            // Whatever else it was, somebody must look at it.
        } else if self.stop.is_cancelled() {
            self.report.end(End::Stopped, "told to stop".to_owned());
        } else if let Some(reason) = self.makes_way {
            self.report.end(End::TimeOver, reason.to_owned());
        } else if self.gave_up {
            let reason = self.throttle.waited_for.as_deref().unwrap_or_default();
            self.report.end(End::TimeOver, format!("it waited for {} s: {reason}", WAIT_MAX.as_secs()));
        } else if self.cut_short.load(Ordering::Relaxed) {
            let goes_on = match self.options.mode {
                Mode::Full => "`tallyd reconcile --resume` goes on",
                Mode::Layout => "the same command goes on",
                Mode::Scrub => "the next scrub goes on",
                _ => "the next run of its kind looks at the rest",
            };
            self.report.end(End::TimeOver, format!("its time was over: {goes_on}"));
        }
        self.report.clean = self.report.is_clean();
        self.report.waited_s = self.throttle.waited.as_secs();
        self.report.waits = self.throttle.waits;
        self.report.waited_for = self.throttle.waited_for.take();
        self.report
    }

    /// Whether no other page may begin. Asked only where there is one: what it says no to is left out.
    fn is_over(&self) -> bool {
        let over = self.stop.is_cancelled()
            || self.gave_up
            || self.makes_way.is_some()
            || self.options.run_time_max.is_some_and(|max| self.began.elapsed() > max);
        if over {
            self.cut_short.store(true, Ordering::Relaxed);
        }
        over
    }

    /// Stops before repairs that are too many, or one of which is too large.
    fn check_limits(&self, largest: u64) -> Result<(), LimitExceeded> {
        if self.options.force {
            return Ok(());
        }
        let Limits { repair_targets_max_percent, repair_abs_max, .. } = self.on.limits;
        let (command, reload) = if self.options.mode == Mode::Layout {
            ("the same command with --force", None)
        } else {
            ("`tallyd reconcile --force`", Some("`tallyd reconcile --reload`"))
        };
        let limits =
            RepairLimits { targets_max_percent: repair_targets_max_percent, abs_max: repair_abs_max, command, reload };
        let Report { checked, drifted, counters_off, .. } = self.report;
        limits.check(checked, drifted.max(counters_off), largest)
    }

    /// Waits, or until the stop.
    async fn pause(&self, pause: Duration) {
        self.stop.run_until_cancelled(tokio::time::sleep(pause)).await;
    }

    /// Shows how far the run is.
    fn show(&self, place: Option<Target>) {
        let Report { checked, drifted, .. } = self.report;
        let (pending, place) = (self.suspects.len() as u64, place.map(|place| self.name(place)));
        let done = self.listed;
        self.progress.send_modify(|progress| {
            *progress = Progress { checked, done, drifted, pending, place, ..std::mem::take(progress) };
        });
    }

    /// Waits `grace`, and then until every event that was published by then is in MySQL.
    async fn fence(&mut self, grace: Duration) -> Result<()> {
        let (number, began) = (self.next_number(), Instant::now());
        let passed = async {
            tokio::time::sleep(grace).await;
            self.fences.pass(number).await
        };
        // The daemon's own consumers stop too: then nobody lets the fence pass.
        let stopped = || NotNow("told to stop".to_owned()).into();
        let passed = self.stop.run_until_cancelled(passed).await.unwrap_or_else(|| Err(stopped()));
        Steps::add(&mut self.report.steps_ms.fence, began.elapsed());
        passed
    }

    fn name(&self, target: Target) -> String {
        format!("{}:{}", self.on.kinds.name(target.kind), target.id)
    }

    /// The metric of which like records are recounted: they are the truth of likes, `counter` is that of all else. None where `counter` is trusted.
    fn recounted(&self) -> Option<Metric> {
        let recounts = matches!(self.options.mode, Mode::Full | Mode::Layout | Mode::Scrub | Mode::Targets(_));
        recounts.then(|| self.on.metrics.like())
    }

    /// Whether the daemon adds the number to Redis.
    fn is_by_daemon(&self, (target, metric): CounterKey) -> bool {
        self.on.rules.of(target.kind, metric).writer == Writes::Daemon
    }

    /// All numbers of targets that are sorted by key.
    fn numbers(&self, targets: impl IntoIterator<Item = Target>) -> Vec<CounterKey> {
        let metrics = self.on.metrics.codes();
        targets.into_iter().flat_map(|target| metrics.iter().map(move |metric| (target, *metric))).collect()
    }

    /// Notes that a number which MySQL knows is not zero in Redis.
    fn note_seen(&mut self, target: Target) {
        let bucket = self.on.cache.keys.bucket(target) as usize;
        if let Some(count) = self.counted_seen.get_mut(bucket) {
            *count = count.wrapping_add(1);
        }
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
