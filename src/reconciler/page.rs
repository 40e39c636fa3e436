//! A page of targets: one look at all of them; then two at those that it could not clear, and the repair.
//!
//! The first look is cheap: its fence goes out at once. Nearly every target is right, and cleared by it. What is off, or
//! busy, is *pending*, and looked at again with the others of many pages, a whole `publish_grace` later. What is never
//! quiet is watched meanwhile.

use std::collections::{BTreeMap, HashMap};
use std::time::{Duration, Instant};

use anyhow::Result;
use tracing::warn;

use super::drift::Verdict;
use super::look::{Look, Looks};
use super::report::{LISTED_MAX, Steps, TargetReport};
use super::{JOB, Run};
use crate::cache::counters::{Repair, Repaired};
use crate::caution::agreed;
use crate::fence::NotNow;
use crate::model::{Micros, Target};
use crate::runtime::fault;
use crate::store::counters::Truth;
use crate::store::jobs::LEASE;
use crate::store::repairs::Intent;

/// Targets that are watched at once: the consumers look each event up among them.
pub(super) const WATCHED_MAX: usize = 1_000;

/// Once so many targets are pending they are looked at again, at most as many at once, and no page is looked at before.
pub(super) const PENDING_MAX: usize = 10_000;

/// How long after it is noted a repair may be made: less than the lease of the run.
const REPAIR_WITHIN: Duration = LEASE.saturating_sub(Duration::from_secs(2));

/// What one look has not decided.
pub(super) type Pending = BTreeMap<Target, Doubt>;

/// Why a target is looked at again.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Doubt {
    /// The drift that was seen; none where the target was busy.
    pub drift: Option<i64>,
    /// Its row of `counter` was compared with its like records already.
    pub told: bool,
}

impl Run<'_> {
    /// Looks at one page of targets that are sorted by key.
    pub(super) async fn compare(&mut self, targets: &[Target]) -> Result<()> {
        // Before the look, which may brake.
        self.report.checked += targets.len() as u64;
        let Looks { looks, truths } = self.look(targets, Duration::ZERO).await?;
        self.note_unknown(targets.iter().filter(|target| !looks.contains_key(target)));
        if self.recounts() {
            self.correct_counters(&truths, |_| true).await?;
        }
        for (target, look) in &looks {
            match look.verdict {
                Verdict::Drift(0) => self.note_exact(*target, look),
                Verdict::Drift(drift) => self.doubt(*target, Doubt { drift: Some(drift), told: true }),
                Verdict::Busy => self.doubt(*target, Doubt { drift: None, told: true }),
            }
        }
        Ok(())
    }

    /// Has the target looked at again.
    pub(super) fn doubt(&mut self, target: Target, doubt: Doubt) {
        self.pending.insert(target, doubt);
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
        fault::point("reconcile:looked");
        // What was counted in Redis before the first look, and published late, has come by the second.
        let grace = self.on.limits.publish_grace.0;
        self.pause(grace).await;
        let Looks { looks, truths } = self.look(&pending.keys().copied().collect::<Vec<_>>(), grace).await?;
        self.note_unknown(pending.keys().filter(|target| !looks.contains_key(target)));
        if self.recounts() {
            // In a dry run this look finds off what the first one may have told of.
            let dry_run = self.report.dry_run;
            let told = |target: &Target| dry_run && pending.get(target).is_some_and(|doubt| doubt.told);
            self.correct_counters(&truths, |target| !told(target)).await?;
        }
        let (mut busy, mut fresh) = (BTreeMap::new(), BTreeMap::new());
        for (target, look) in &looks {
            match (pending.get(target).and_then(|doubt| doubt.drift), look.verdict) {
                (first, Verdict::Busy) => drop(busy.insert(*target, first)),
                (None, Verdict::Drift(0)) => self.note_exact(*target, look),
                (None, Verdict::Drift(drift)) => drop(fresh.insert(*target, drift)),
                // Judged below.
                (Some(_), Verdict::Drift(_)) => {}
            }
        }
        let seen = pending.iter().filter_map(|(target, doubt)| Some((*target, doubt.drift?))).collect();
        self.repair_agreed(&seen, &looks).await?;
        let Looks { looks: third, .. } = self.look(&fresh.keys().copied().collect::<Vec<_>>(), grace).await?;
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
        let (grace, skew) = (self.on.limits.publish_grace.0, self.on.limits.skew());
        let all: Vec<Target> = targets.iter().map(|(target, _)| *target).collect();
        let looked = self.look_watched(&all, grace, skew).await?;
        let seen_once: BTreeMap<Target, i64> =
            targets.iter().filter_map(|(target, first)| Some((*target, (*first)?))).collect();
        let (again, fresh): (BTreeMap<_, _>, BTreeMap<_, _>) =
            looked.into_iter().partition(|(target, _)| seen_once.contains_key(target));
        self.note_undecided(&again).await?;
        self.repair_agreed(&seen_once, &again).await?;
        let mut off = BTreeMap::new();
        for (target, look) in &fresh {
            match look.verdict {
                Verdict::Drift(0) => self.note_exact(*target, look),
                Verdict::Drift(drift) => drop(off.insert(*target, drift)),
                Verdict::Busy => {}
            }
        }
        self.note_undecided(&fresh).await?;
        let second = self.look_watched(&off.keys().copied().collect::<Vec<_>>(), grace, skew).await?;
        self.note_undecided(&second).await?;
        self.repair_agreed(&off, &second).await
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
            self.report.drifted_by_size.note(delta.unsigned_abs());
            let is_set = self.on.rules.of(target.kind, self.metric).settable && !self.is_by_daemon(target.kind);
            let not_set_since = is_set.then_some(look.sample.cut);
            repairs
                .push(Repair { not_set_since, ..self.adding(*target, look.sample.value, delta, look.sample.loaded) });
        }
        if self.report.dry_run || repairs.is_empty() {
            for Repair { target, .. } in &repairs {
                if let Some(look) = second.get(target) {
                    self.list(*target, look, 0, "drifted");
                }
            }
            return Ok(());
        }
        fault::point("reconcile:agreed");
        let largest = repairs.iter().map(|repair| repair.delta.unsigned_abs()).max().unwrap_or(0);
        self.brake(largest)?;
        let deltas: BTreeMap<Target, i64> = repairs.iter().map(|repair| (repair.target, repair.delta)).collect();
        let mut left = Vec::new();
        for (target, result) in self.repair(&repairs, second).await? {
            let (Some(delta), Some(look)) = (deltas.get(&target), second.get(&target)) else { continue };
            match result {
                Repaired::Done => {
                    self.report.repaired += 1;
                    self.list(target, look, *delta, "repaired");
                }
                Repaired::BelowZero | Repaired::Stale => {
                    self.report.left += 1;
                    left.push((target, *delta));
                    self.list(target, look, 0, "left");
                }
            }
        }
        self.keep_for_next(&left).await
    }

    /// Repairs, and notes each: before it is made and after.
    async fn repair(&mut self, repairs: &[Repair], looks: &BTreeMap<Target, Look>) -> Result<Vec<(Target, Repaired)>> {
        let began = Instant::now();
        let (pass, metric) = (self.next_number(), self.metric);
        // Noting them makes the lease last from then: until it ends no other run measures.
        let until = |target| {
            looks.get(target).map_or(Micros(0), |look| look.sample.cut.after(look.taken.elapsed() + REPAIR_WITHIN))
        };
        let repairs: Vec<Repair> =
            repairs.iter().map(|repair| Repair { until: until(&repair.target), ..*repair }).collect();
        let before = |target| looks.get(&target).map_or(0, |look| look.sample.value);
        let intents: Vec<Intent> = repairs
            .iter()
            .map(|Repair { target, delta, .. }| Intent { target: *target, before: before(*target), added: *delta })
            .collect();
        self.on.store.note_repairs(JOB, self.number, pass, metric, &intents).await?;
        self.check_data_set().await?;
        fault::point("reconcile:noted");
        let done = self.on.cache.repair(&self.on.names, metric, pass, &repairs).await?;
        fault::point("reconcile:repaired");
        let outcomes: Vec<(Target, &str)> = done.iter().map(|(target, result)| (*target, result.name())).collect();
        self.on.store.note_outcomes(pass, metric, &outcomes).await?;
        Steps::add(&mut self.report.steps_ms.repair, began.elapsed());
        Ok(done)
    }

    /// A replica that was promoted after the looks can lack the drift that they saw.
    pub(super) async fn check_data_set(&self) -> Result<()> {
        if self.on.cache.data_set().await? == self.data_set {
            return Ok(());
        }
        Err(NotNow("Redis was restarted, or failed over, since the run began".to_owned()).into())
    }

    /// `counter` must equal the rows in every snapshot (invariant 3); where it doesn't, a hand or a bug was at it.
    async fn correct_counters(
        &mut self,
        truths: &HashMap<Target, Truth>,
        wanted: impl Fn(&Target) -> bool,
    ) -> Result<()> {
        let off: BTreeMap<Target, Intent> = truths
            .iter()
            .map(|(target, Truth { counted, rows, .. })| {
                let added = rows.unwrap_or(*counted) - counted;
                (*target, Intent { target: *target, before: *counted, added })
            })
            .filter(|(target, intent)| intent.added != 0 && wanted(target))
            .collect();
        if off.is_empty() {
            return Ok(());
        }
        self.report.counters_off += off.len() as u64;
        if !self.report.dry_run {
            self.brake(off.values().map(|intent| intent.added.unsigned_abs()).max().unwrap_or(0))?;
        }
        let pass = self.next_number();
        fault::point("reconcile:correcting");
        for (target, intent) in off {
            let (kind, target_id, delta) = (self.on.kinds.name(target.kind), target.id.0, intent.added);
            warn!(
                event = "counter-off",
                kind, target_id, delta, "counter of {kind}:{target_id} differs from its like records by {delta}"
            );
            if !self.report.dry_run {
                self.on.store.correct_counter(JOB, self.number, pass, self.metric, intent).await?;
            } else if self.uncorrected.len() < PENDING_MAX {
                self.uncorrected.insert(target, delta);
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

    /// Targets that had an event so close to the cut, by a producer's clock, that no look could say which was first: the
    /// next run looks at them first, so that what was compared may be called compared.
    async fn note_undecided(&mut self, looks: &BTreeMap<Target, Look>) -> Result<()> {
        let undecided: Vec<(Target, i64)> = with_busy(looks).map(|target| (target, 0)).collect();
        for (target, look) in looks.iter().filter(|(_, look)| look.verdict == Verdict::Busy) {
            self.report.undecided += 1;
            if self.lists_all {
                self.list(*target, look, 0, "undecided");
            }
        }
        self.keep_for_next(&undecided).await
    }

    /// The next run looks at them first, and the cut of all others goes on.
    async fn keep_for_next(&mut self, targets: &[(Target, i64)]) -> Result<()> {
        if targets.is_empty() || self.report.dry_run {
            return Ok(());
        }
        let mut targets = targets.to_vec();
        targets.sort_unstable();
        let without_room = self.on.store.keep_drift_seen(self.metric, &targets).await?;
        self.all_kept &= without_room == 0;
        Ok(())
    }

    pub(super) fn note_unknown<'a>(&mut self, targets: impl Iterator<Item = &'a Target>) {
        for target in targets {
            self.report.unknown += 1;
            if self.lists_all {
                self.report.targets.push(TargetReport::unknown(self.name(*target), self.on.metrics.name(self.metric)));
            }
        }
    }

    fn list(&mut self, target: Target, look: &Look, added: i64, verdict: &'static str) {
        // What the truth was at the cut is not known of an undecided one: it is told as of now.
        let drift =
            if let Verdict::Drift(drift) = look.verdict { drift } else { look.sample.value - look.truth.counted };
        let redis = look.sample.value;
        // A target has few of all the numbers that there are.
        let is_void = !self.is_like() && redis == 0 && look.truth.update_at.is_none();
        if !is_void && (self.lists_all || self.report.targets.len() < LISTED_MAX) {
            self.report.targets.push(TargetReport {
                target: self.name(target),
                metric: self.on.metrics.name(self.metric),
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

fn with_busy(looks: &BTreeMap<Target, Look>) -> impl Iterator<Item = Target> {
    looks.iter().filter(|(_, look)| look.verdict == Verdict::Busy).map(|(target, _)| *target)
}
