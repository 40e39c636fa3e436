//! The state that all parts of a run share: the options, the servers, the passes, and the reason for an early end.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use tracing::warn;

use super::Reconciler;
use tallyd_base::config::{Kinds, Metrics, Reconcile as Limits, Rules, Writes};
use tallyd_base::jobs::JobError;
use tallyd_base::jobs::run::{Ended, KEEP, Run, RunHead};
use tallyd_core::model::{CounterKey, Kind, Metric, Micros, Target};
use tallyd_mysql::Store;
use tallyd_rabbitmq::Broker;
use tallyd_redis::Cache;
use tallyd_redis::keys::KindNames;

pub const JOB: &str = "reconcile";

/// Limited, because another run that must load lost buckets can be waiting for the end of this run.
pub(super) const WAIT_MAX: Duration = Duration::from_secs(600);

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Mode {
    Changed,
    /// Recounts `like_record`, and searches Redis for counters that MySQL does not have.
    Full,
    Scrub,
    /// As `Changed`, started when Redis has lost buckets. Every run loads lost buckets first.
    Rebuild,
    /// A second layout, which was loaded before. Leaves the cut, which belongs to the layout that the daemon compares.
    Layout,
    Targets(Vec<Target>),
}

impl Mode {
    pub fn name(&self) -> &'static str {
        match self {
            Self::Changed => "changed",
            Self::Full => "full",
            Self::Scrub => "scrub",
            Self::Rebuild => "rebuild",
            Self::Layout => "layout",
            Self::Targets(_) => "targets",
        }
    }
}

#[derive(Clone)]
pub(super) struct Servers {
    pub store: Store,
    pub cache: Cache,
    pub also: Option<Cache>,
    pub broker: Broker,
    pub replicas: Vec<(String, Store)>,

    pub limits: Limits,
    pub kinds: Kinds,
    pub names: KindNames,
    pub metrics: Metrics,
    pub rules: Rules,
}

impl Servers {
    pub(super) fn name(&self, target: Target) -> String {
        format!("{}:{}", self.kinds.name(target.kind), target.id)
    }

    pub(super) fn is_by_daemon(&self, (target, metric): CounterKey) -> bool {
        self.rules.of(target.kind, metric).writer == Writes::Daemon
    }

    pub(super) fn is_any_by_api(&self, keys: &[CounterKey]) -> bool {
        keys.iter().any(|key| !self.is_by_daemon(*key))
    }

    pub(super) fn has_counts_by_api(&self, kind: Kind) -> bool {
        self.metrics.codes().iter().any(|metric| self.rules.of(kind, *metric).writer == Writes::Api)
    }

    pub(super) fn counter_keys(&self, targets: impl IntoIterator<Item = Target>) -> Vec<CounterKey> {
        let metrics = self.metrics.codes();
        targets.into_iter().flat_map(|target| metrics.iter().map(move |metric| (target, *metric))).collect()
    }

    pub(super) async fn redis_now(&self) -> Result<Micros> {
        self.cache.now().await.context("read Redis' clock")
    }

    /// A failure is no failure of the run: the next run ends these watches, and watches also expire.
    pub(super) async fn unwatch(&self, run: u64) {
        if let Err(error) = self.store.unwatch(run).await {
            let error = format!("{:#}", anyhow::Error::from(error));
            warn!(event = "prune-failed", error, "the logged events of watched targets could not be deleted: {error}");
        }
    }

    /// A failure is no failure of the run, because the next run deletes them.
    pub(super) async fn forget_old_repairs(&self) {
        if let Err(error) = self.store.prune_repairs(KEEP).await {
            let error = format!("{:#}", anyhow::Error::from(error));
            warn!(event = "prune-failed", error, "old records of repairs could not be deleted: {error}");
        }
    }
}

pub(super) struct RunContext<'a> {
    pub servers: &'a Servers,
    pub job: &'a Reconciler,
    pub base: &'a Run<'a, Reconciler>,
    pub early_end: EarlyEnd<'a>,
    data_set: String,
}

impl<'a> RunContext<'a> {
    pub(super) async fn new(job: &'a Reconciler, base: &'a Run<'a, Reconciler>) -> Result<Self> {
        let servers = &job.servers;
        let data_set = servers.cache.data_set().await.context("ask Redis for its data set")?;
        Ok(Self { servers, job, base, early_end: EarlyEnd::new(job, base), data_set })
    }

    /// `None` if the run trusts `counter`. Only for likes the true value is in other rows.
    pub(super) fn recounted(&self) -> Option<Metric> {
        let recounts = matches!(self.job.mode, Mode::Full | Mode::Layout | Mode::Scrub | Mode::Targets(_));
        recounts.then(|| self.servers.metrics.like())
    }

    /// After a promotion, values can differ from the measured ones, and a repair would be wrong.
    pub(super) async fn check_data_set(&self) -> Result<()> {
        if self.servers.cache.data_set().await? == self.data_set {
            return Ok(());
        }
        Err(JobError::NotNow("Redis was restarted or failed over after the run began".to_owned()).into())
    }

    pub(super) async fn note_compared(&self, cut: Micros) -> Result<()> {
        self.check_data_set().await?;
        self.servers.cache.note_compared(cut).await.context("write the time of this comparison to Redis")
    }
}

pub(super) struct EarlyEnd<'a> {
    job: &'a Reconciler,
    base: &'a Run<'a, Reconciler>,
    gave_up: AtomicBool,
    /// The reason why the run must end and let another run load lost buckets.
    makes_way: OnceLock<&'static str>,
    cut_short: AtomicBool,
}

impl<'a> EarlyEnd<'a> {
    fn new(job: &'a Reconciler, base: &'a Run<'a, Reconciler>) -> Self {
        let (gave_up, makes_way) = (AtomicBool::new(false), OnceLock::new());
        Self { job, base, gave_up, makes_way, cut_short: AtomicBool::new(false) }
    }

    /// Call this function only if there is another page. If it returns `true`, the caller skips that page.
    pub(super) fn is_due(&self) -> bool {
        let is_due = self.base.stop.is_cancelled()
            || self.gave_up()
            || self.makes_way.get().is_some()
            || self.base.deadline().is_some_and(|deadline| Instant::now() > deadline);
        if is_due {
            self.cut_short.store(true, Ordering::Relaxed);
        }
        is_due
    }

    /// Call this function only if there is more to do, as for `is_due`.
    pub(super) fn is_stopped(&self) -> bool {
        self.base.stop.is_cancelled() && self.is_due()
    }

    pub(super) fn was_due(&self) -> bool {
        self.cut_short.load(Ordering::Relaxed)
    }

    pub(super) fn gave_up(&self) -> bool {
        self.gave_up.load(Ordering::Relaxed)
    }

    pub(super) fn give_up(&self) {
        self.gave_up.store(true, Ordering::Relaxed);
    }

    pub(super) fn make_way(&self, reason: &'static str) {
        self.makes_way.get_or_init(|| reason);
    }

    pub(super) fn note(&self, head: &mut RunHead) {
        if self.base.stop.is_cancelled() {
            head.end(Ended::Stopped, "it was stopped");
        } else if let Some(reason) = self.makes_way.get() {
            head.end(Ended::TimeOver, *reason);
        } else if self.gave_up() {
            let reason = head.waited.waited_for.as_deref().unwrap_or_default();
            let why = format!("it had waited for the servers for {} s: {reason}", WAIT_MAX.as_secs());
            head.end(Ended::TimeOver, why);
        } else if self.was_due() {
            let goes_on = match self.job.mode {
                Mode::Full => "run `tallyd reconcile --resume` to continue",
                Mode::Layout => "run the same command again to continue",
                Mode::Scrub => "the next scrub continues",
                _ => "the next run of this mode compares the remaining targets",
            };
            head.end(Ended::TimeOver, format!("its run time was over: {goes_on}"));
        }
    }
}
