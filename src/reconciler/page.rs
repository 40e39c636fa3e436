//! A page of targets: one look at all of them; then two at those that it could not clear, and the repair.
//!
//! The first look is cheap: its fence goes out at once. Nearly every target is right, and cleared by it. What is off, or
//! busy, is *pending*, and looked at again with the others of many pages, a whole `publish_grace` later. What is never
//! quiet is watched meanwhile.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use anyhow::{Context, Result};
use tracing::warn;

use super::drift::{Verdict, agreed, judge, value_at};
use super::report::{LISTED_MAX, TargetReport};
use super::{JOB, Run};
use crate::cache::counters::{Repair, Repaired, Sample};
use crate::cache::layout::Loaded;
use crate::model::Target;
use crate::store::counters::{Targets, Truth};
use crate::store::repairs::Intent;

/// Targets that are watched at once: the consumers look each event up among them.
pub(super) const WATCHED_MAX: usize = 1_000;

/// Once so many targets are pending they are looked at again, at most as many at once, and no page is looked at before.
pub(super) const PENDING_MAX: usize = 10_000;

/// What one look has not decided: the drift that it saw, none where the target was busy.
pub(super) type Pending = BTreeMap<Target, Option<i64>>;

/// One look at one target.
#[derive(Clone, Copy, Debug)]
pub(super) struct Look {
    pub sample: Sample,
    pub verdict: Verdict,
    pub truth: Truth,
}

impl Run<'_> {
    /// Looks at one page. False where that can't be done: a range has too many targets that `counter` lacks.
    pub(super) async fn compare(&mut self, page: Targets<'_>) -> Result<bool> {
        let targets = page.all();
        // Before the look, which may brake.
        self.report.checked += targets.len() as u64;
        let Some(looks) = self.look(page, false).await? else {
            self.report.checked -= targets.len() as u64;
            return Ok(false);
        };
        self.note_unknown(targets.iter().filter(|target| !looks.contains_key(target)));
        if matches!(page, Targets::Range(_)) {
            for (target, _) in looks.iter().filter(|(_, look)| look.sample.exists) {
                *self.fields_seen.entry(self.on.cache.keys.bucket(*target)).or_default() += 1;
            }
        }
        for (target, look) in &looks {
            match look.verdict {
                Verdict::Drift(0) => self.note_exact(*target, look),
                Verdict::Drift(drift) => drop(self.pending.insert(*target, Some(drift))),
                Verdict::Busy => drop(self.pending.insert(*target, None)),
            }
        }
        Ok(true)
    }

    /// Looks again at what is pending, and repairs what two looks agree on.
    pub(super) async fn settle(&mut self) -> Result<()> {
        while let Some((first, _)) = self.pending.iter().nth(PENDING_MAX) {
            let first = *first;
            let rest = self.pending.split_off(&first);
            let some = std::mem::replace(&mut self.pending, rest);
            self.settle_some(some).await?;
        }
        let rest = std::mem::take(&mut self.pending);
        if rest.is_empty() { Ok(()) } else { self.settle_some(rest).await }
    }

    async fn settle_some(&mut self, pending: Pending) -> Result<()> {
        // What was counted in Redis before the first look, and published late, has come by the second.
        self.pause(self.on.limits.publish_grace.0).await;
        let looks = self.look_again(&pending.keys().copied().collect::<Vec<_>>()).await?;
        self.note_unknown(pending.keys().filter(|target| !looks.contains_key(target)));
        let (mut busy, mut fresh) = (Pending::new(), BTreeMap::new());
        for (target, look) in &looks {
            match (pending.get(target).copied().flatten(), look.verdict) {
                (first, Verdict::Busy) => drop(busy.insert(*target, first)),
                (None, Verdict::Drift(0)) => self.note_exact(*target, look),
                (None, Verdict::Drift(drift)) => drop(fresh.insert(*target, drift)),
                // Judged below.
                (Some(_), Verdict::Drift(_)) => {}
            }
        }
        let seen = pending.iter().filter_map(|(target, first)| Some((*target, (*first)?))).collect();
        self.repair_agreed(&seen, &looks).await?;
        let third = self.look_again(&fresh.keys().copied().collect::<Vec<_>>()).await?;
        busy.extend(with_busy(&third).map(|target| (target, fresh.get(&target).copied())));
        self.repair_agreed(&fresh, &third).await?;
        self.report.busy += busy.len() as u64;
        let busy: Vec<(Target, Option<i64>)> = busy.into_iter().collect();
        for some in busy.chunks(WATCHED_MAX) {
            self.settle_busy(some).await?;
        }
        Ok(())
    }

    /// Looks twice at watched targets, or once where an earlier look found them off.
    async fn settle_busy(&mut self, targets: &[(Target, Option<i64>)]) -> Result<()> {
        let grace = self.on.limits.publish_grace.0;
        let all: Vec<Target> = targets.iter().map(|(target, _)| *target).collect();
        let looked = self.look_watched(&all, grace).await?;
        let seen_once: BTreeMap<Target, i64> =
            targets.iter().filter_map(|(target, first)| Some((*target, (*first)?))).collect();
        let (again, fresh): (BTreeMap<_, _>, BTreeMap<_, _>) =
            looked.into_iter().partition(|(target, _)| seen_once.contains_key(target));
        self.repair_agreed(&seen_once, &again).await?;
        let mut off = BTreeMap::new();
        for (target, look) in &fresh {
            match look.verdict {
                Verdict::Drift(0) => self.note_exact(*target, look),
                Verdict::Drift(drift) => drop(off.insert(*target, drift)),
                Verdict::Busy => {}
            }
        }
        let second = self.look_watched(&off.keys().copied().collect::<Vec<_>>(), grace).await?;
        self.repair_agreed(&off, &second).await
    }

    /// One look at targets that are sorted by key: sample, fence, read. Looking `again`, it waits for late publishes. None
    /// where a range has too many targets that `counter` lacks; few of them become pending.
    async fn look(&mut self, targets: Targets<'_>, again: bool) -> Result<Option<BTreeMap<Target, Look>>> {
        let samples = self.sample(targets.all()).await?.unwrap_or_default();
        if samples.is_empty() && matches!(targets, Targets::These(_)) {
            return Ok(Some(BTreeMap::new()));
        }
        self.fence(if again { self.on.limits.publish_grace.0 } else { Duration::ZERO }).await?;
        let Some(truths) = self.on.store.truths(self.on.metric, targets, self.recounts).await? else {
            return Ok(None);
        };
        let uncounted = truths.keys().filter(|target| targets.all().binary_search(target).is_err());
        if let Targets::Range(_) = targets {
            let uncounted: Vec<Target> = uncounted.copied().collect();
            self.report.checked += uncounted.len() as u64;
            self.pending.extend(uncounted.into_iter().map(|target| (target, None)));
        }
        // In a dry run a second look finds off what the first one has told of.
        if self.recounts && !(again && self.report.dry_run) {
            self.correct_counters(&truths).await?;
        }
        Ok(Some(judged(samples, |target, sample| {
            let truth = truths.get(target);
            (judge(sample, truth), truth.copied().unwrap_or_default())
        })))
    }

    async fn look_again(&mut self, targets: &[Target]) -> Result<BTreeMap<Target, Look>> {
        Ok(self.look(Targets::These(targets), true).await?.unwrap_or_default())
    }

    /// The same for busy targets: their events are logged from before the sample until the read.
    pub(super) async fn look_watched(&mut self, targets: &[Target], grace: Duration) -> Result<BTreeMap<Target, Look>> {
        if targets.is_empty() {
            return Ok(BTreeMap::new());
        }
        let watch = self.next_number();
        let limits = &self.on.limits;
        let seconds = (limits.publish_grace.0 + limits.fence_max.0).as_secs() + 60;
        let partitions = self.on.broker.partitions();
        self.on.store.watch(watch, targets, partitions, seconds).await?;
        let samples = self.sample(targets).await?.unwrap_or_default();
        self.fence(grace).await?;
        let watched = self.on.store.watched(self.on.metric, targets, watch, partitions).await?;
        self.on.store.unwatch(self.number).await?;
        let (truths, mut events) =
            watched.context("the watch ended too early: the process was frozen, or another run has begun")?;
        events.sort_by_key(|logged| logged.event.target);
        Ok(judged(samples, |target, sample| {
            let from = events.partition_point(|logged| logged.event.target < *target);
            let until = events.partition_point(|logged| logged.event.target <= *target);
            let truth = truths.get(target).copied().unwrap_or_default();
            let value = value_at(sample.cut, truth.counted, events.get(from..until).unwrap_or_default());
            (Verdict::Drift(sample.value - value), truth)
        }))
    }

    /// Samples Redis, without what is unknown; none where nothing is left.
    async fn sample(&mut self, targets: &[Target]) -> Result<Option<BTreeMap<Target, Sample>>> {
        if targets.is_empty() {
            return Ok(None);
        }
        let mut samples = self.on.cache.sample(&self.on.names, self.on.metric, targets).await?;
        samples.retain(|_, sample| match sample.loaded {
            Loaded::Yes { .. } => true,
            Loaded::Loading { generation, .. } => generation == self.number,
            Loaded::No => false,
        });
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
        if self.report.dry_run || repairs.is_empty() {
            for Repair { target, .. } in &repairs {
                if let Some(look) = second.get(target) {
                    self.list(*target, look, 0, "drifted");
                }
            }
            return Ok(());
        }
        let largest = repairs.iter().map(|repair| repair.delta.unsigned_abs()).max().unwrap_or(0);
        self.brake(largest)?;
        let deltas: BTreeMap<Target, i64> = repairs.iter().map(|repair| (repair.target, repair.delta)).collect();
        for (target, result) in self.repair(&repairs, second).await? {
            let (Some(delta), Some(look)) = (deltas.get(&target), second.get(&target)) else { continue };
            match result {
                Repaired::Done => {
                    self.report.repaired += 1;
                    self.list(target, look, *delta, "repaired");
                }
                Repaired::BelowZero | Repaired::Stale => {
                    self.report.left += 1;
                    self.list(target, look, 0, "left");
                }
            }
        }
        Ok(())
    }

    /// Repairs, and notes each: before it is made and after.
    async fn repair(&mut self, repairs: &[Repair], looks: &BTreeMap<Target, Look>) -> Result<Vec<(Target, Repaired)>> {
        let (pass, metric) = (self.next_number(), self.on.metric);
        let before = |target| looks.get(&target).map_or(0, |look| look.sample.value);
        let intents: Vec<Intent> = repairs
            .iter()
            .map(|Repair { target, delta, .. }| Intent { target: *target, before: before(*target), added: *delta })
            .collect();
        self.on.store.note_repairs(JOB, self.number, pass, metric, &intents).await?;
        let done = self.on.cache.repair(&self.on.names, metric, pass, repairs).await?;
        let outcomes: Vec<(Target, &str)> = done.iter().map(|(target, result)| (*target, result.name())).collect();
        self.on.store.note_outcomes(pass, metric, &outcomes).await?;
        Ok(done)
    }

    /// `counter` must equal the rows in every snapshot (invariant 3); where it doesn't, a hand or a bug was at it.
    async fn correct_counters(&mut self, truths: &HashMap<Target, Truth>) -> Result<()> {
        let off: BTreeMap<Target, Intent> = truths
            .iter()
            .map(|(target, Truth { counted, rows, .. })| {
                let added = rows.unwrap_or(*counted) - counted;
                (*target, Intent { target: *target, before: *counted, added })
            })
            .filter(|(_, intent)| intent.added != 0)
            .collect();
        if off.is_empty() {
            return Ok(());
        }
        self.report.counters_off += off.len() as u64;
        if !self.report.dry_run {
            self.brake(off.values().map(|intent| intent.added.unsigned_abs()).max().unwrap_or(0))?;
        }
        let pass = self.next_number();
        for (target, intent) in off {
            let (kind, target_id, delta) = (self.on.kinds.name(target.kind), target.id.0, intent.added);
            warn!(
                event = "counter-off",
                kind, target_id, delta, "counter of {kind}:{target_id} differs from its like records by {delta}"
            );
            if !self.report.dry_run {
                self.on.store.correct_counter(JOB, self.number, pass, self.on.metric, intent).await?;
            }
        }
        Ok(())
    }

    fn note_exact(&mut self, target: Target, look: &Look) {
        self.report.exact += 1;
        if self.lists_all {
            self.list(target, look, 0, "exact");
        }
    }

    fn note_unknown<'a>(&mut self, targets: impl Iterator<Item = &'a Target>) {
        for target in targets {
            self.report.unknown += 1;
            if self.lists_all {
                self.report.targets.push(TargetReport::unknown(self.name(*target)));
            }
        }
    }

    fn list(&mut self, target: Target, look: &Look, added: i64, verdict: &'static str) {
        let Verdict::Drift(drift) = look.verdict else { return };
        if self.lists_all || self.report.targets.len() < LISTED_MAX {
            let redis = look.sample.value;
            self.report.targets.push(TargetReport {
                target: self.name(target),
                redis,
                mysql: redis - drift,
                counter: Some(look.truth.counted),
                rows: look.truth.rows,
                added,
                verdict,
            });
        }
    }
}

fn judged(
    samples: BTreeMap<Target, Sample>,
    judge: impl Fn(&Target, &Sample) -> (Verdict, Truth),
) -> BTreeMap<Target, Look> {
    let look = |(target, sample)| {
        let (verdict, truth) = judge(&target, &sample);
        (target, Look { sample, verdict, truth })
    };
    samples.into_iter().map(look).collect()
}

fn with_busy(looks: &BTreeMap<Target, Look>) -> impl Iterator<Item = Target> {
    looks.iter().filter(|(_, look)| look.verdict == Verdict::Busy).map(|(target, _)| *target)
}
