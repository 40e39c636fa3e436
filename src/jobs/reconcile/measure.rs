//! Measures counters. A measurement samples Redis (at an instant called the cut), waits until a fence is committed,
//! reads MySQL, and compares the values.
//!
//! MySQL reads few counters by their keys, and many as a range of ids, because one scan replaces many point reads.
//! While MySQL reads one range, the caller samples the next one.

use std::collections::{BTreeMap, HashMap};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use super::context::{RunContext, Servers};
use super::report::{Report, Steps, TargetReport, Verdict};
use tallyd_base::jobs::fence::{self, Fences};
use tallyd_base::runtime::fault;
use tallyd_core::drift::{Judgement, Logged, Sample, Truth, judge, judge_waiting};
use tallyd_core::model::{CounterKey, Metric, Micros, Target};
use tallyd_core::outbox::{OutboxLag, OutboxOffsets};
use tallyd_mysql::Store;
use tallyd_mysql::outbox::Asked;
use tallyd_mysql::ranges::{Range, Recount};
use tallyd_rabbitmq::Publisher;
use tallyd_redis::layout::Loaded;

/// Limited because the consumers look up every event in the list of watched counters.
pub(super) const WATCHED_MAX: usize = 1_000;

const UNCORRECTED_MAX: usize = 10_000;

pub(super) struct Measure<'a> {
    run: &'a RunContext<'a>,
    /// `None` if the daemon adds all counters to Redis. Then RabbitMQ is not needed.
    fences: Option<Fences<'a>>,
    /// What a real run would have added to each target's row of `counter`. Only a dry run fills this map.
    uncorrected: HashMap<Target, i64>,
    pub steps: Steps,
}

#[derive(Clone, Debug)]
pub(super) struct Measurement {
    pub sample: Sample,
    /// The instant at which Redis' answer had arrived, by this process' clock.
    pub taken: Instant,
    pub judgement: Judgement,
    pub truth: Truth,
}

#[derive(Default)]
pub(super) struct Measurements {
    pub measurements: BTreeMap<CounterKey, Measurement>,
    pub truths: HashMap<CounterKey, Truth>,
}

/// Its fence is committed, so MySQL can be read.
pub(super) struct SampledRange {
    pub range: Range,
    pub samples: Vec<Option<Sample>>,
    /// The outbox rows in Redis before the sample. Only metrics that the daemon writes to Redis need them.
    pub applied: Option<OutboxOffsets>,
}

impl<'a> Measure<'a> {
    pub(super) fn new(run: &'a RunContext<'a>, fences: Option<Fences<'a>>) -> Self {
        Self { run, fences, uncorrected: HashMap::new(), steps: Steps::default() }
    }

    /// `keys` is sorted. The fence is sent `grace` after the sample. For the metric `recounted`, MySQL also counts the
    /// rows of `like_record`. If the counters' buckets are being loaded, `loaded` has the last outbox rows of the load.
    pub(super) async fn measure(
        &mut self,
        keys: &[CounterKey],
        grace: Duration,
        recounted: Option<Metric>,
        loaded: &OutboxOffsets,
    ) -> Result<Measurements> {
        let servers = self.run.servers;
        let mut applied = self.applied(keys).await?;
        if let Some(applied) = &mut applied {
            applied.raise_all(loaded);
        }
        let samples = self.sample(keys).await?;
        if samples.is_empty() {
            return Ok(Measurements::default());
        }
        let taken = Instant::now();
        fault::point(if grace.is_zero() { "reconcile:sampled" } else { "reconcile:sampled-again" });
        if servers.is_any_by_api(keys) {
            self.fence(grace).await?;
        }
        let began = Instant::now();
        let sampled = |key: CounterKey| samples.get(&key).map(|sample| &sample.offsets);
        let asked = applied.as_ref().map(|applied| Asked { applied, sampled: &sampled });
        let (truths, lag) = servers.store.truths(keys, recounted, asked).await?;
        Steps::add(&mut self.steps.read, began.elapsed());
        let measurement = |(key, sample): (CounterKey, Sample)| {
            let truth = truths.get(&key).map(|truth| self.as_corrected(key, *truth));
            let judgement = self.judge(key, &sample, truth, &lag);
            (key, Measurement { sample, taken, judgement, truth: truth.unwrap_or_default() })
        };
        let measurements = samples.into_iter().map(measurement).collect();
        Ok(Measurements { measurements, truths })
    }

    /// `keys` is sorted. The consumers log all events from before the sample until the run has read MySQL. A counter
    /// with an event within `skew` of the cut stays busy. API servers must write these counters to Redis.
    pub(super) async fn measure_watched(
        &mut self,
        keys: &[CounterKey],
        grace: Duration,
        skew: Duration,
    ) -> Result<BTreeMap<CounterKey, Measurement>> {
        let servers = self.run.servers;
        let watch = self.run.base.next_number();
        let seconds = (servers.limits.publish_grace.0 + servers.limits.fence_max.0).as_secs() + 60;
        let partitions = fence::knows_all(&servers.store, &servers.broker).await?;
        servers.store.watch(watch, keys, &partitions, seconds).await?;
        let samples = self.sample(keys).await?;
        let taken = Instant::now();
        fault::point("reconcile:sampled-watched");
        self.fence(grace).await?;
        let began = Instant::now();
        let read = servers.store.watched(keys, watch, &partitions).await?;
        servers.unwatch(self.run.base.number).await;
        Steps::add(&mut self.steps.read, began.elapsed());
        let (truths, logged) =
            read.context("the watch ended too early: the process froze, or another run has begun")?;
        let logged = Logged::new(servers.metrics.like(), logged);
        let measurement = |(key, sample): (CounterKey, Sample)| {
            let truth = self.as_corrected(key, truths.get(&key).copied().unwrap_or_default());
            let judgement = match logged.value_at(key, sample.cut, skew, truth.counted) {
                Some(value) => Judgement::Drift(sample.value - value),
                None => Judgement::Busy,
            };
            (key, Measurement { sample, taken, judgement, truth })
        };
        Ok(samples.into_iter().map(measurement).collect())
    }

    pub(super) async fn sample_range(&mut self, range: Range) -> Result<SampledRange> {
        let servers = self.run.servers;
        let began = Instant::now();
        let keys: Vec<CounterKey> = range.counters.iter().map(|counted| counted.number).collect();
        let applied = self.applied(&keys).await?;
        let samples = servers.cache.sample(&servers.names, &keys).await?;
        Steps::add(&mut self.steps.sample, began.elapsed());
        fault::point("reconcile:sampled");
        if servers.is_any_by_api(&keys) {
            self.fence(Duration::ZERO).await?;
        }
        Ok(SampledRange { range, samples, applied })
    }

    pub(super) fn judge(&self, key: CounterKey, sample: &Sample, truth: Option<Truth>, lag: &OutboxLag) -> Judgement {
        let servers = self.run.servers;
        if servers.is_by_daemon(key) {
            judge_waiting(sample, truth, lag.of(key, &sample.offsets))
        } else {
            judge(sample, truth.as_ref(), servers.limits.skew())
        }
    }

    /// A counter missing in a sample is zero if this is true (also while this run loads its bucket), else unknown.
    pub(super) fn is_known(&self, sample: &Sample) -> bool {
        match sample.loaded {
            Loaded::Yes { .. } => true,
            Loaded::Loading { generation, .. } => generation == self.run.base.number,
            Loaded::No => false,
        }
    }

    /// Every event counted by API servers before this instant is in MySQL. Excludes the last `publish_grace`, whose
    /// events are perhaps unpublished. Redis' clock dates the events of API servers, and MySQL's those of the daemon,
    /// so the earlier one decides.
    pub(super) async fn fenced_now(&mut self) -> Result<Micros> {
        let servers = self.run.servers;
        let (by_mysql, _) = servers.store.clock().await?;
        let now = servers.redis_now().await?.min(by_mysql);
        if self.fences.is_none() {
            return Ok(now);
        }
        self.fence(Duration::ZERO).await?;
        Ok(now.before(servers.limits.publish_grace.0))
    }

    pub(super) async fn fence_patiently(&mut self) -> Result<()> {
        let Some(fences) = &mut self.fences else { return Ok(()) };
        let patience = std::mem::replace(&mut fences.fence_max, Duration::MAX);
        let passed = self.fence(Duration::ZERO).await;
        if let Some(fences) = &mut self.fences {
            fences.fence_max = patience;
        }
        passed
    }

    pub(super) async fn in_flight(&self) -> Result<Option<u64>> {
        match &self.fences {
            Some(fences) => fences.waiting().await,
            None => Ok(None),
        }
    }

    pub(super) fn publisher(&self) -> Option<&Publisher> {
        self.fences.as_ref().map(|fences| &fences.publisher)
    }

    pub(super) fn is_uncorrected(&self, target: Target) -> bool {
        self.uncorrected.contains_key(&target)
    }

    pub(super) fn leave_uncorrected(&mut self, target: Target, delta: i64) {
        if self.uncorrected.len() < UNCORRECTED_MAX {
            self.uncorrected.insert(target, delta);
        }
    }

    /// Skips counters that the daemon adds to Redis: a real run would add the same amount there, through the outbox.
    fn as_corrected(&self, (target, metric): CounterKey, mut truth: Truth) -> Truth {
        let servers = self.run.servers;
        let is_like = metric == servers.metrics.like();
        if is_like && truth.rows.is_none() && !servers.is_by_daemon((target, metric)) {
            truth.counted += self.uncorrected.get(&target).copied().unwrap_or_default();
        }
        truth
    }

    /// These rows must be read before the sample. `None` if the daemon adds none of the counters to Redis.
    async fn applied(&self, keys: &[CounterKey]) -> Result<Option<OutboxOffsets>> {
        let servers = self.run.servers;
        if !keys.iter().any(|key| servers.is_by_daemon(*key)) {
            return Ok(None);
        }
        Ok(Some(servers.store.outbox_applied().await?))
    }

    /// Leaves out counters whose value is unknown.
    async fn sample(&mut self, keys: &[CounterKey]) -> Result<BTreeMap<CounterKey, Sample>> {
        let servers = self.run.servers;
        let began = Instant::now();
        let samples = servers.cache.sample(&servers.names, keys).await?;
        Steps::add(&mut self.steps.sample, began.elapsed());
        let known = |(key, sample): (&CounterKey, Option<Sample>)| Some((*key, sample?));
        Ok(keys.iter().zip(samples).filter_map(known).filter(|(_, sample)| self.is_known(sample)).collect())
    }

    /// Includes every event that was published within `grace`.
    async fn fence(&mut self, grace: Duration) -> Result<()> {
        let Some(fences) = &self.fences else { return Ok(()) };
        let pass = self.run.base.next_number();
        let began = Instant::now();
        let passed = async {
            tokio::time::sleep(grace).await;
            fences.pass(pass).await
        };
        // At the stop the daemon's own consumers stop, too, so no consumer would commit the fence.
        let passed = self.run.base.unless_stopped(passed).await;
        Steps::add(&mut self.steps.fence, began.elapsed());
        passed?
    }
}

impl SampledRange {
    /// Returns `None` if too many targets of the range have no counter.
    pub(super) async fn recount(&self, store: &Store) -> Result<Option<Recount>> {
        let sampled = |key: CounterKey| {
            let place = self.range.counters.binary_search_by_key(&key, |counted| counted.number).ok()?;
            self.samples.get(place)?.as_ref().map(|sample| &sample.offsets)
        };
        let asked = self.applied.as_ref().map(|applied| Asked { applied, sampled: &sampled });
        Ok(store.recount_range(&self.range, asked).await?)
    }
}

impl Measurement {
    pub(super) fn list(&self, report: &mut Report, servers: &Servers, key: CounterKey, added: i64, verdict: Verdict) {
        let (target, metric) = key;
        // The value at the cut is unknown for an undecided counter, so the report has MySQL's value at the measurement.
        let drift = match self.judgement {
            Judgement::Drift(drift) => drift,
            Judgement::Busy => self.sample.value - self.truth.counted,
        };
        let redis = self.sample.value;
        // A target usually has counters for only a few of all metrics, so counters without any data are not listed.
        let is_void = metric != servers.metrics.like() && redis == 0 && self.truth.update_at.is_none();
        if is_void || !report.has_room() {
            return;
        }
        report.targets.push(TargetReport {
            target: servers.name(target),
            metric: servers.metrics.name(metric),
            redis,
            mysql: redis - drift,
            counter: Some(self.truth.counted),
            rows: self.truth.rows,
            added,
            verdict,
        });
    }
}

pub(super) fn with_busy(measurements: &BTreeMap<CounterKey, Measurement>) -> impl Iterator<Item = CounterKey> {
    measurements.iter().filter(|(_, measurement)| measurement.judgement == Judgement::Busy).map(|(key, _)| *key)
}
