//! One measurement of some numbers: sample, fence, read, judge.

use std::collections::{BTreeMap, HashMap};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use super::Run;
use super::drift::{Logged, Verdict, judge, judge_waiting};
use super::outbox_lag::OutboxLag;
use super::report::Steps;
use crate::cache::counters::Sample;
use crate::cache::layout::Loaded;
use crate::model::{CounterKey, Metric};
use crate::outbox_offsets::OutboxOffsets;
use crate::runtime::fault;
use crate::store::counters::Truth;

/// What one measurement saw of one number.
#[derive(Clone, Debug)]
pub(super) struct Measurement {
    pub sample: Sample,
    /// When Redis had answered, by our clock.
    pub taken: Instant,
    pub verdict: Verdict,
    pub truth: Truth,
}

/// One measurement of numbers, without those that are unknown.
#[derive(Default)]
pub(super) struct Measurements {
    pub measurements: BTreeMap<CounterKey, Measurement>,
    /// What MySQL says of all of them.
    pub truths: HashMap<CounterKey, Truth>,
}

impl Run<'_> {
    /// One measurement of numbers that are sorted by key. The fence is sent `grace` after the sample; for what the daemon adds to Redis there is
    /// none. Like records of the metric `recounted` are counted.
    pub(super) async fn measure(
        &mut self,
        numbers: &[CounterKey],
        grace: Duration,
        recounted: Option<Metric>,
    ) -> Result<Measurements> {
        let applied = self.applied(numbers.iter().any(|number| self.is_by_daemon(*number))).await?;
        let Some(samples) = self.sample(numbers).await? else { return Ok(Measurements::default()) };
        let taken = Instant::now();
        fault::point(if grace.is_zero() { "reconcile:sampled" } else { "reconcile:sampled-again" });
        if numbers.iter().any(|number| !self.is_by_daemon(*number)) {
            self.fence(grace).await?;
        }
        let began = Instant::now();
        let (truths, since) = self.on.store.truths(numbers, recounted, applied.as_ref()).await?;
        let lag = OutboxLag::new(since, applied.unwrap_or_default());
        Steps::add(&mut self.report.steps_ms.read, began.elapsed());
        let measurement = |(number, sample): (CounterKey, Sample)| {
            let truth = truths.get(&number).map(|truth| self.as_corrected(number, *truth));
            let verdict = self.judge(number, &sample, truth, &lag);
            (number, Measurement { sample, taken, verdict, truth: truth.unwrap_or_default() })
        };
        let measurements = samples.into_iter().map(measurement).collect();
        Ok(Measurements { measurements, truths })
    }

    /// Judges a sample by what MySQL says.
    pub(super) fn judge(&self, number: CounterKey, sample: &Sample, truth: Option<Truth>, lag: &OutboxLag) -> Verdict {
        if self.is_by_daemon(number) {
            judge_waiting(sample, truth, lag.of(number, &sample.offsets))
        } else {
            judge(sample, truth.as_ref(), self.on.limits.skew())
        }
    }

    /// With what a run that isn't dry would have added to `counter`.
    fn as_corrected(&self, (target, metric): CounterKey, mut truth: Truth) -> Truth {
        if metric == self.on.metrics.like() && truth.rows.is_none() {
            truth.counted += self.uncorrected.get(&target).copied().unwrap_or_default();
        }
        truth
    }

    /// Up to which rows the outboxes are in Redis, where it matters: to be read before the sample.
    pub(super) async fn applied(&self, matters: bool) -> Result<Option<OutboxOffsets>> {
        Ok(if matters { Some(self.on.store.outbox_applied().await?) } else { None })
    }

    /// The same for busy numbers: their events are logged from before the sample until the read. Those that have an event
    /// within `skew` of the cut stay busy. What the daemon adds to Redis is only looked at again: it was busy because its rows were deleted.
    pub(super) async fn measure_watched(
        &mut self,
        numbers: &[CounterKey],
        grace: Duration,
        skew: Duration,
    ) -> Result<BTreeMap<CounterKey, Measurement>> {
        let (again, watched): (Vec<CounterKey>, Vec<CounterKey>) =
            numbers.iter().partition(|number| self.is_by_daemon(**number));
        let mut measurements = self.measure(&again, grace, None).await?.measurements;
        if watched.is_empty() {
            return Ok(measurements);
        }
        let watch = self.next_number();
        let limits = &self.on.limits;
        let seconds = (limits.publish_grace.0 + limits.fence_max.0).as_secs() + 60;
        let partitions = self.on.broker.partitions();
        self.on.store.watch(watch, &watched, partitions, seconds).await?;
        let samples = self.sample(&watched).await?.unwrap_or_default();
        let taken = Instant::now();
        fault::point("reconcile:sampled-watched");
        self.fence(grace).await?;
        let began = Instant::now();
        let read = self.on.store.watched(&watched, watch, partitions).await?;
        self.on.unwatch(self.number).await;
        Steps::add(&mut self.report.steps_ms.read, began.elapsed());
        let (truths, logged) =
            read.context("the watch ended too early: the process was frozen, or another run has begun")?;
        let logged = Logged::new(self.on.metrics.like(), logged);
        measurements.extend(samples.into_iter().map(|(number, sample)| {
            let truth = self.as_corrected(number, truths.get(&number).copied().unwrap_or_default());
            let verdict = match logged.value_at(number, sample.cut, skew, truth.counted) {
                Some(value) => Verdict::Drift(sample.value - value),
                None => Verdict::Busy,
            };
            (number, Measurement { sample, taken, verdict, truth })
        }));
        Ok(measurements)
    }

    /// Samples Redis, without what is unknown; none where nothing is left.
    async fn sample(&mut self, numbers: &[CounterKey]) -> Result<Option<BTreeMap<CounterKey, Sample>>> {
        let began = Instant::now();
        let samples = self.on.cache.sample(&self.on.names, numbers).await?;
        Steps::add(&mut self.report.steps_ms.sample, began.elapsed());
        let run = self.number;
        let known = |(number, sample): (&CounterKey, Option<Sample>)| Some((*number, sample?));
        let samples: BTreeMap<CounterKey, Sample> =
            numbers.iter().zip(samples).filter_map(known).filter(|(_, sample)| is_known(sample, run)).collect();
        Ok(if samples.is_empty() { None } else { Some(samples) })
    }
}

/// Whether what is missing in the sample's bucket is zero, and not unknown. `run` may compare what it loads itself.
pub(super) fn is_known(sample: &Sample, run: u64) -> bool {
    match sample.loaded {
        Loaded::Yes { .. } => true,
        Loaded::Loading { generation, .. } => generation == run,
        Loaded::No => false,
    }
}
