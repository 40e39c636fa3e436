//! One look at some targets: sample, fence, read, judge.

use std::collections::{BTreeMap, HashMap};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use super::Run;
use super::drift::{Logged, Verdict, judge, judge_waiting};
use super::report::Steps;
use super::waiting::Waiting;
use crate::cache::counters::Sample;
use crate::cache::layout::Loaded;
use crate::marks::Marks;
use crate::model::Target;
use crate::runtime::fault;
use crate::store::counters::Truth;

/// What one look at one target saw.
#[derive(Clone, Debug)]
pub(super) struct Look {
    pub sample: Sample,
    /// When Redis had answered, by our clock.
    pub taken: Instant,
    pub verdict: Verdict,
    pub truth: Truth,
}

/// One look at targets, without those that are unknown.
#[derive(Default)]
pub(super) struct Looks {
    pub looks: BTreeMap<Target, Look>,
    /// What MySQL says of all of them.
    pub truths: HashMap<Target, Truth>,
}

impl Run<'_> {
    /// One look at targets that are sorted by key. The fence is sent `grace` after the sample; for what the daemon adds to Redis there is none.
    pub(super) async fn look(&mut self, targets: &[Target], grace: Duration) -> Result<Looks> {
        let needs_fence = targets.iter().any(|target| !self.is_by_daemon(target.kind));
        let applied = self.applied(targets.iter().any(|target| self.is_by_daemon(target.kind))).await?;
        let Some(samples) = self.sample(targets).await? else { return Ok(Looks::default()) };
        let taken = Instant::now();
        fault::point(if grace.is_zero() { "reconcile:sampled" } else { "reconcile:sampled-again" });
        if needs_fence {
            self.fence(grace).await?;
        }
        let began = Instant::now();
        let (truths, waiting) = match applied {
            None => (self.on.store.truths(self.metric, targets, self.recounts()).await?, Waiting::default()),
            Some(applied) => {
                let (truths, since) = self.on.store.truths_since(self.metric, targets, &applied).await?;
                (truths, Waiting::new(since, applied))
            }
        };
        Steps::add(&mut self.report.steps_ms.read, began.elapsed());
        let skew = self.on.limits.skew();
        let look = |(target, sample): (Target, Sample)| {
            let truth = truths.get(&target).copied();
            let verdict = if self.is_by_daemon(target.kind) {
                judge_waiting(&sample, truth, waiting.of(target, &sample.marks))
            } else {
                judge(&sample, truth.as_ref(), skew)
            };
            (target, Look { sample, taken, verdict, truth: truth.unwrap_or_default() })
        };
        let looks = samples.into_iter().map(look).collect();
        Ok(Looks { looks, truths })
    }

    /// Up to which rows the outboxes are in Redis, where it matters: to be read before the sample.
    pub(super) async fn applied(&self, matters: bool) -> Result<Option<Marks>> {
        Ok(if matters { Some(self.on.store.outbox_applied().await?) } else { None })
    }

    /// The same for busy targets: their events are logged from before the sample until the read. Those that have an event
    /// within `skew` of the cut stay busy. What the daemon adds to Redis is only looked at again: it was busy because its rows were deleted.
    pub(super) async fn look_watched(
        &mut self,
        targets: &[Target],
        grace: Duration,
        skew: Duration,
    ) -> Result<BTreeMap<Target, Look>> {
        let (again, watched): (Vec<Target>, Vec<Target>) =
            targets.iter().partition(|target| self.is_by_daemon(target.kind));
        let mut looks = self.look(&again, grace).await?.looks;
        if watched.is_empty() {
            return Ok(looks);
        }
        let watch = self.next_number();
        let limits = &self.on.limits;
        let seconds = (limits.publish_grace.0 + limits.fence_max.0).as_secs() + 60;
        let partitions = self.on.broker.partitions();
        self.on.store.watch(watch, self.metric, &watched, partitions, seconds).await?;
        let samples = self.sample(&watched).await?.unwrap_or_default();
        let taken = Instant::now();
        fault::point("reconcile:sampled-watched");
        self.fence(grace).await?;
        let began = Instant::now();
        let read = self.read_watched(&watched, watch, partitions).await?;
        self.on.unwatch(self.number).await;
        Steps::add(&mut self.report.steps_ms.read, began.elapsed());
        let (truths, logged) =
            read.context("the watch ended too early: the process was frozen, or another run has begun")?;
        looks.extend(samples.into_iter().map(|(target, sample)| {
            let mut truth = truths.get(&target).copied().unwrap_or_default();
            // What a run that isn't dry would have added.
            truth.counted += self.uncorrected.get(&target).copied().filter(|_| self.is_like()).unwrap_or_default();
            let verdict = match logged.value_at(target, sample.cut, skew, truth.counted) {
                Some(value) => Verdict::Drift(sample.value - value),
                None => Verdict::Busy,
            };
            (target, Look { sample, taken, verdict, truth })
        }));
        Ok(looks)
    }

    /// What MySQL says now, and what was logged since the watch began; none where it has ended too early.
    async fn read_watched(
        &self,
        targets: &[Target],
        watch: u64,
        partitions: u16,
    ) -> Result<Option<(HashMap<Target, Truth>, Logged)>> {
        let (store, metric) = (&self.on.store, self.metric);
        if self.is_like() {
            let read = store.watched(metric, targets, watch, partitions).await?;
            return Ok(read.map(|(truths, events)| (truths, Logged::likes(events))));
        }
        let read = store.watched_counts(metric, targets, watch, partitions).await?;
        Ok(read.map(|(truths, counts)| (truths, Logged::counts(counts))))
    }

    /// Samples Redis, without what is unknown; none where nothing is left.
    async fn sample(&mut self, targets: &[Target]) -> Result<Option<BTreeMap<Target, Sample>>> {
        let began = Instant::now();
        let samples = self.on.cache.sample(&self.on.names, self.metric, targets).await?;
        Steps::add(&mut self.report.steps_ms.sample, began.elapsed());
        let number = self.number;
        let known = |(target, sample): (&Target, Option<Sample>)| Some((*target, sample?));
        let samples: BTreeMap<Target, Sample> =
            targets.iter().zip(samples).filter_map(known).filter(|(_, sample)| is_known(sample, number)).collect();
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
