//! One page of targets: two looks, then the repair; what is never quiet is watched meanwhile.

use std::collections::{BTreeMap, HashMap};

use anyhow::{Context, Result};
use tracing::warn;

use super::drift::{Verdict, agreed, judge, value_at};
use super::report::{LISTED_MAX, TargetReport};
use super::{JOB, Run};
use crate::cache::counters::{Repair, Repaired, Sample};
use crate::cache::layout::Loaded;
use crate::model::Target;
use crate::store::counters::Truth;

/// Targets that are watched at once: the consumers look each event up among them.
const WATCHED_MAX: usize = 1_000;

/// One look at one target.
#[derive(Clone, Copy, Debug)]
struct Look {
    sample: Sample,
    verdict: Verdict,
}

impl Run<'_> {
    /// Compares one page: two looks at what is off, then the repair; then the same for what was busy.
    pub(super) async fn compare(&mut self, page: &[Target]) -> Result<()> {
        self.report.checked += page.len() as u64;
        let first = self.look(page, self.recounts).await?;
        self.note_unknown(page, &first);
        let off = self.sort_out(&first);
        let mut busy: BTreeMap<Target, Option<i64>> =
            with(&first, |verdict| verdict == Verdict::Busy).map(|target| (target, None)).collect();
        let second = self.look(&off.keys().copied().collect::<Vec<_>>(), self.recounts).await?;
        busy.extend(
            with(&second, |verdict| verdict == Verdict::Busy).map(|target| (target, off.get(&target).copied())),
        );
        self.repair_agreed(&off, &second).await?;
        self.report.busy += busy.len() as u64;
        let busy: Vec<(Target, Option<i64>)> = busy.into_iter().collect();
        for some in busy.chunks(WATCHED_MAX) {
            self.compare_busy(some).await?;
        }
        Ok(())
    }

    /// Looks twice at watched targets, or once where an earlier look found them off.
    async fn compare_busy(&mut self, targets: &[(Target, Option<i64>)]) -> Result<()> {
        let all: Vec<Target> = targets.iter().map(|(target, _)| *target).collect();
        let looked = self.look_watched(&all).await?;
        let seen_once: BTreeMap<Target, i64> =
            targets.iter().filter_map(|(target, first)| Some((*target, (*first)?))).collect();
        let (again, fresh): (BTreeMap<_, _>, BTreeMap<_, _>) =
            looked.into_iter().partition(|(target, _)| seen_once.contains_key(target));
        self.repair_agreed(&seen_once, &again).await?;
        let off = self.sort_out(&fresh);
        let second = self.look_watched(&off.keys().copied().collect::<Vec<_>>()).await?;
        self.repair_agreed(&off, &second).await
    }

    /// Counts those that are right, and gives the others' drifts.
    fn sort_out(&mut self, looks: &BTreeMap<Target, Look>) -> BTreeMap<Target, i64> {
        let mut off = BTreeMap::new();
        for (target, look) in looks {
            match look.verdict {
                Verdict::Drift(0) => {
                    self.report.exact += 1;
                    if self.lists_all {
                        self.list(*target, look, 0, "exact");
                    }
                }
                Verdict::Drift(drift) => {
                    off.insert(*target, drift);
                }
                Verdict::Busy => {}
            }
        }
        off
    }

    /// One look at `targets`, sorted by key: sample, fence, read.
    async fn look(&mut self, targets: &[Target], recount: bool) -> Result<BTreeMap<Target, Look>> {
        let Some(samples) = self.sample(targets).await? else { return Ok(BTreeMap::new()) };
        self.fence().await?;
        let truths = self.on.store.truths(self.on.metric, targets, recount).await?;
        if recount {
            self.correct_counters(&truths).await?;
        }
        Ok(judged(samples, |target, sample| judge(sample, truths.get(target))))
    }

    /// The same for busy targets: their events are logged from before the sample until the read.
    async fn look_watched(&mut self, targets: &[Target]) -> Result<BTreeMap<Target, Look>> {
        if targets.is_empty() {
            return Ok(BTreeMap::new());
        }
        let watch = self.next_number();
        let limits = &self.on.limits;
        let seconds = (limits.publish_grace.0 + limits.fence_max.0).as_secs() + 60;
        let partitions = self.on.broker.partitions();
        self.on.store.watch(watch, targets, partitions, seconds).await?;
        let samples = self.sample(targets).await?.unwrap_or_default();
        self.fence().await?;
        let watched = self.on.store.watched(self.on.metric, targets, watch, partitions).await?;
        self.on.store.unwatch(self.number).await?;
        let (truths, mut events) =
            watched.context("the watch ended too early: the process was frozen, or another run has begun")?;
        events.sort_by_key(|logged| logged.event.target);
        Ok(judged(samples, |target, sample| {
            let from = events.partition_point(|logged| logged.event.target < *target);
            let until = events.partition_point(|logged| logged.event.target <= *target);
            let now = truths.get(target).map_or(0, |truth| truth.counted);
            let value = value_at(sample.cut, now, events.get(from..until).unwrap_or_default());
            Verdict::Drift(sample.value - value)
        }))
    }

    /// Samples Redis, without what is unknown; none where nothing is left.
    async fn sample(&mut self, targets: &[Target]) -> Result<Option<BTreeMap<Target, Sample>>> {
        if targets.is_empty() {
            return Ok(None);
        }
        let mut samples = self.on.cache.sample(&self.on.names, self.on.metric, targets).await?;
        samples.retain(|_, sample| sample.loaded != Loaded::No);
        Ok(if samples.is_empty() { None } else { Some(samples) })
    }

    /// Adds what two looks agree on.
    async fn repair_agreed(&mut self, first: &BTreeMap<Target, i64>, second: &BTreeMap<Target, Look>) -> Result<()> {
        let mut repairs = Vec::new();
        for (target, look) in second {
            let (Some(first), Verdict::Drift(drift)) = (first.get(target), look.verdict) else { continue };
            let delta = agreed(*first, drift);
            if delta == 0 {
                self.report.transient += 1;
                if self.lists_all {
                    self.list(*target, look, 0, "transient");
                }
                continue;
            }
            self.report.drifted += 1;
            self.report.drift_sum += delta.unsigned_abs();
            repairs.push(Repair { target: *target, delta, loaded: look.sample.loaded });
        }
        let done = if self.report.dry_run {
            repairs.iter().map(|repair| (repair.target, None)).collect()
        } else {
            self.repair(&repairs).await?
        };
        let deltas: BTreeMap<Target, i64> = repairs.iter().map(|repair| (repair.target, repair.delta)).collect();
        for (target, result) in done {
            let (Some(delta), Some(look)) = (deltas.get(&target), second.get(&target)) else { continue };
            match result {
                None => self.list(target, look, 0, "drifted"),
                Some(Repaired::Done) => {
                    self.report.repaired += 1;
                    self.list(target, look, *delta, "repaired");
                }
                Some(Repaired::BelowZero | Repaired::Stale) => {
                    self.report.left += 1;
                    self.list(target, look, 0, "left");
                }
            }
        }
        Ok(())
    }

    async fn repair(&mut self, repairs: &[Repair]) -> Result<Vec<(Target, Option<Repaired>)>> {
        if repairs.is_empty() {
            return Ok(Vec::new());
        }
        let pass = self.next_number();
        let done = self.on.cache.repair(&self.on.names, self.on.metric, pass, repairs).await?;
        Ok(done.into_iter().map(|(target, result)| (target, Some(result))).collect())
    }

    /// `counter` must equal the rows in every snapshot (invariant 3); where it doesn't, a hand or a bug was at it.
    async fn correct_counters(&mut self, truths: &HashMap<Target, Truth>) -> Result<()> {
        for (target, truth) in truths {
            let delta = truth.rows.unwrap_or(truth.counted) - truth.counted;
            if delta == 0 {
                continue;
            }
            self.report.counters_off += 1;
            let (kind, target_id) = (self.on.kinds.name(target.kind), target.id.0);
            warn!(
                event = "counter-off",
                kind, target_id, delta, "counter of {kind}:{target_id} differs from its like records by {delta}"
            );
            if !self.report.dry_run {
                self.on.store.correct_counter(JOB, self.number, self.on.metric, *target, delta).await?;
            }
        }
        Ok(())
    }

    fn note_unknown(&mut self, page: &[Target], looks: &BTreeMap<Target, Look>) {
        for target in page.iter().filter(|target| !looks.contains_key(target)) {
            self.report.unknown += 1;
            if self.lists_all {
                let target = self.name(*target);
                self.report.targets.push(TargetReport { target, redis: 0, mysql: 0, added: 0, verdict: "unknown" });
            }
        }
    }

    fn list(&mut self, target: Target, look: &Look, added: i64, verdict: &'static str) {
        let Verdict::Drift(drift) = look.verdict else { return };
        if self.lists_all || self.report.targets.len() < LISTED_MAX {
            let (redis, mysql) = (look.sample.value, look.sample.value - drift);
            let target = self.name(target);
            self.report.targets.push(TargetReport { target, redis, mysql, added, verdict });
        }
    }
}

fn judged(samples: BTreeMap<Target, Sample>, judge: impl Fn(&Target, &Sample) -> Verdict) -> BTreeMap<Target, Look> {
    samples.into_iter().map(|(target, sample)| (target, Look { sample, verdict: judge(&target, &sample) })).collect()
}

fn with(looks: &BTreeMap<Target, Look>, wanted: impl Fn(Verdict) -> bool) -> impl Iterator<Item = Target> {
    looks.iter().filter(move |(_, look)| wanted(look.verdict)).map(|(target, _)| *target)
}
