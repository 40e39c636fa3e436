//! The state that all parts of a run share: the options, the servers, the passes, and the reason for an early end.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tracing::warn;

use super::report::{End, Progress, Report};
use crate::config::{Kinds, Metrics, Reconcile as Limits, Rules, Writes};
use crate::jobs::JobError;
use tallyd_core::job_name::JobName;
use tallyd_core::model::{CounterKey, Kind, Metric, Micros, Target};
use tallyd_mysql::Store;
use tallyd_mysql::jobs::number_of;
use tallyd_rabbitmq::Broker;
use tallyd_redis::Cache;
use tallyd_redis::keys::KindNames;

/// The name of the job in `job_lock` and `job_run`.
pub const JOB: &str = JobName::Reconcile.name();

/// Maximum time that a scheduled run waits for the servers. The wait is limited, because another run that must load
/// lost buckets can be waiting for the end of this run.
const WAIT_MAX: Duration = Duration::from_secs(600);

/// The targets that a run compares.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Targets that changed since the last run.
    Changed,
    /// All targets. The run recounts `like_record`, compares `counter` with the result, and searches Redis for counters
    /// that MySQL does not have.
    Full,
    /// The next slice of a full run's targets. The run also searches the next slice of Redis' buckets for counters that
    /// MySQL does not have.
    Scrub,
    /// Targets that changed since the last run. Runs in this mode are started when Redis has lost buckets. Every run
    /// loads lost buckets first.
    Rebuild,
    /// All targets of a second layout. The layout was loaded before this run. The run does not change the recorded cut
    /// (the time up to which Redis was compared), because this cut belongs to the layout that the daemon compares.
    Layout,
    /// The given targets. The like records of these targets are recounted.
    Targets(Vec<Target>),
}

impl Mode {
    /// Returns the mode's name in tables, logs and reports.
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

/// The options of a run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RunOptions {
    pub mode: Mode,
    /// The run only compares, and changes nothing.
    pub dry_run: bool,
    /// The run repairs without a safety limit.
    pub force: bool,
    /// The run resumes the last full run that did not finish.
    pub resume: bool,
    /// The run loads all counters again.
    pub reload: bool,
    /// The run ends at the first page boundary after this time.
    pub run_time_max: Option<Duration>,
    /// The run ends after it has waited this long for the servers to have capacity for a page.
    pub wait_max: Option<Duration>,
}

impl RunOptions {
    /// Returns the options of a scheduled run.
    pub fn scheduled(mode: Mode) -> Self {
        Self {
            resume: mode == Mode::Full,
            reload: false,
            mode,
            dry_run: false,
            force: false,
            run_time_max: None,
            wait_max: Some(WAIT_MAX),
        }
    }

    /// Whether the run ends early if another run must load lost buckets. Scheduled `full` and `scrub` runs can end
    /// early without loss: the next run of the same mode resumes where this run ends.
    pub(super) fn gives_way(&self) -> bool {
        self.wait_max.is_some() && matches!(self.mode, Mode::Full | Mode::Scrub)
    }
}

/// The servers of the run, and the configuration.
#[derive(Clone)]
pub(super) struct Servers {
    pub store: Store,
    pub cache: Cache,
    /// The cache in the second layout, in which API servers also count.
    pub also: Option<Cache>,
    pub broker: Broker,
    /// MySQL's replicas, each with its name.
    pub replicas: Vec<(String, Store)>,
    pub shared: crate::servers::Servers,

    pub limits: Limits,
    pub kinds: Kinds,
    pub names: KindNames,
    pub metrics: Metrics,
    pub rules: Rules,
}

impl Servers {
    /// Returns a target's name in reports and logs: `video:42`.
    pub(super) fn name(&self, target: Target) -> String {
        format!("{}:{}", self.kinds.name(target.kind), target.id)
    }

    /// Whether the daemon adds the counter to Redis.
    pub(super) fn is_by_daemon(&self, (target, metric): CounterKey) -> bool {
        self.rules.of(target.kind, metric).writer == Writes::Daemon
    }

    /// Whether API servers add any of these counters to Redis.
    pub(super) fn is_any_by_api(&self, keys: &[CounterKey]) -> bool {
        keys.iter().any(|key| !self.is_by_daemon(*key))
    }

    /// Whether API servers add any counter of that kind to Redis.
    pub(super) fn has_counts_by_api(&self, kind: Kind) -> bool {
        self.metrics.codes().iter().any(|metric| self.rules.of(kind, *metric).writer == Writes::Api)
    }

    /// Returns the keys of all counters of these targets. If the targets are sorted, the keys are sorted, too.
    pub(super) fn counter_keys(&self, targets: impl IntoIterator<Item = Target>) -> Vec<CounterKey> {
        let metrics = self.metrics.codes();
        targets.into_iter().flat_map(|target| metrics.iter().map(move |metric| (target, *metric))).collect()
    }

    /// Reads the time from Redis' clock.
    pub(super) async fn redis_now(&self) -> Result<Micros> {
        self.cache.now().await.context("read Redis' clock")
    }

    /// Ends all watches of the run. If MySQL does not end the watches, the run continues. The next run ends these
    /// watches, and watches also expire.
    pub(super) async fn unwatch(&self, run: u64) {
        if let Err(error) = self.store.unwatch(run).await {
            let error = format!("{:#}", anyhow::Error::from(error));
            warn!(event = "prune-failed", error, "the logged events of watched targets could not be deleted: {error}");
        }
    }

    /// Deletes old records of repairs. If this fails, the run does not fail, because the next run deletes the records.
    pub(super) async fn forget_old_repairs(&self) {
        if let Err(error) = self.store.prune_repairs(self.limits.repair_keep.0).await {
            let error = format!("{:#}", anyhow::Error::from(error));
            warn!(event = "prune-failed", error, "old records of repairs could not be deleted: {error}");
        }
    }
}

/// The state that all parts of a run share.
pub(super) struct RunContext<'a> {
    pub servers: &'a Servers,
    pub options: &'a RunOptions,
    /// The run's number in `job_run`.
    pub number: u64,
    pub early_end: EarlyEnd<'a>,
    pub progress: watch::Sender<Progress>,
    /// The data set that Redis had when the run began.
    data_set: String,
    /// How many passes (fences, watches or repairs) have begun.
    passes: AtomicU64,
}

impl<'a> RunContext<'a> {
    pub(super) async fn new(
        servers: &'a Servers,
        options: &'a RunOptions,
        number: u64,
        progress: watch::Sender<Progress>,
        stop: &'a CancellationToken,
    ) -> Result<Self> {
        let data_set = servers.cache.data_set().await.context("ask Redis for its data set")?;
        let early_end = EarlyEnd::new(options, stop);
        Ok(Self { servers, options, number, early_end, progress, data_set, passes: AtomicU64::new(0) })
    }

    /// Returns the number of the next fence, watch or repair. This number is higher than all earlier numbers.
    pub(super) fn next_pass(&self) -> u64 {
        number_of(self.number, self.passes.fetch_add(1, Ordering::Relaxed) + 1)
    }

    /// Returns the metric whose rows are recounted, or `None` if the run trusts `counter`. The true count of likes is
    /// the count of like records. For all other metrics the true value is in `counter`.
    pub(super) fn recounted(&self) -> Option<Metric> {
        let recounts = matches!(self.options.mode, Mode::Full | Mode::Layout | Mode::Scrub | Mode::Targets(_));
        recounts.then(|| self.servers.metrics.like())
    }

    /// Fails if Redis' data set has changed since the run began. If a replica was promoted after a measurement, its
    /// values can differ from the measured values. Then a repair would be wrong.
    pub(super) async fn check_data_set(&self) -> Result<()> {
        if self.servers.cache.data_set().await? == self.data_set {
            return Ok(());
        }
        Err(JobError::NotNow("Redis was restarted or failed over after the run began".to_owned()).into())
    }

    /// Records in Redis the time up to which Redis has been compared.
    pub(super) async fn note_compared(&self, cut: Micros) -> Result<()> {
        self.check_data_set().await?;
        self.servers.cache.note_compared(cut).await.context("write the time of this comparison to Redis")
    }
}

/// The reasons why a run ends before it has compared all its targets.
pub(super) struct EarlyEnd<'a> {
    pub stop: &'a CancellationToken,
    began: Instant,
    run_time_max: Option<Duration>,
    /// Whether the run stopped waiting, because the servers had no free capacity for too long.
    gave_up: AtomicBool,
    /// The reason why the run must end and let another run load lost buckets.
    makes_way: OnceLock<&'static str>,
    /// Whether the run had to end and left some targets uncompared.
    cut_short: AtomicBool,
}

impl<'a> EarlyEnd<'a> {
    fn new(options: &RunOptions, stop: &'a CancellationToken) -> Self {
        Self {
            stop,
            began: Instant::now(),
            run_time_max: options.run_time_max,
            gave_up: AtomicBool::new(false),
            makes_way: OnceLock::new(),
            cut_short: AtomicBool::new(false),
        }
    }

    /// Whether the run must end. Call this function only if there is another page. If it returns `true`, the caller
    /// skips that page.
    pub(super) fn is_due(&self) -> bool {
        let is_due = self.stop.is_cancelled()
            || self.gave_up()
            || self.makes_way.get().is_some()
            || self.run_time_max.is_some_and(|max| self.began.elapsed() > max);
        if is_due {
            self.cut_short.store(true, Ordering::Relaxed);
        }
        is_due
    }

    /// Whether the run was stopped. Call this function only if there is more to do, as for `is_due`.
    pub(super) fn is_stopped(&self) -> bool {
        self.stop.is_cancelled() && self.is_due()
    }

    /// Whether a page was skipped.
    pub(super) fn was_due(&self) -> bool {
        self.cut_short.load(Ordering::Relaxed)
    }

    /// Returns the instant at which the run must end, if its time is limited.
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.run_time_max.map(|max| self.began + max)
    }

    pub(super) fn gave_up(&self) -> bool {
        self.gave_up.load(Ordering::Relaxed)
    }

    /// Ends the run because it has waited for the servers for too long.
    pub(super) fn give_up(&self) {
        self.gave_up.store(true, Ordering::Relaxed);
    }

    /// Ends the run, so that another run can load lost buckets.
    pub(super) fn make_way(&self, reason: &'static str) {
        self.makes_way.get_or_init(|| reason);
    }

    /// Sleeps for this time, but returns immediately at the stop.
    pub(super) async fn pause(&self, pause: Duration) {
        self.stop.run_until_cancelled(tokio::time::sleep(pause)).await;
    }

    /// Writes into the report why the run ended early, if it did.
    pub(super) fn note(&self, mode: &Mode, report: &mut Report) {
        if self.stop.is_cancelled() {
            report.end(End::Stopped, "it was stopped".to_owned());
        } else if let Some(reason) = self.makes_way.get() {
            report.end(End::TimeOver, (*reason).to_owned());
        } else if self.gave_up() {
            let reason = report.waited_for.as_deref().unwrap_or_default();
            report.end(End::TimeOver, format!("it had waited for the servers for {} s: {reason}", WAIT_MAX.as_secs()));
        } else if self.was_due() {
            let goes_on = match mode {
                Mode::Full => "run `tallyd reconcile --resume` to continue",
                Mode::Layout => "run the same command again to continue",
                Mode::Scrub => "the next scrub continues",
                _ => "the next run of this mode compares the remaining targets",
            };
            report.end(End::TimeOver, format!("its run time was over: {goes_on}"));
        }
    }
}
