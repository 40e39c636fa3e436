//! A page of numbers: one measurement of all of them; then others at those that it could not clear, and the repair.
//!
//! The first measurement is cheap: its fence goes out at once. Nearly every number is right, and cleared by it. The others are *suspects*, and looked at
//! again with those of many pages, a whole `publish_grace` later; what is busy still is watched meanwhile. One rule decides: a measurement that finds a
//! drift keeps it with the suspect, and the next measurement that can say anything repairs what it agrees on.

use std::collections::{BTreeMap, HashMap};
use std::time::{Duration, Instant};

use anyhow::Result;
use tracing::warn;

use super::drift::Verdict;
use super::measure::{Measurement, Measurements};
use super::report::{Steps, TargetReport, TargetVerdict};
use super::{JOB, Run};
use crate::cache::counters::{Repair, Repaired};
use crate::jobs::fence::NotNow;
use crate::model::{CounterKey, Micros, Target};
use crate::repair_limits::confirmed_delta;
use crate::runtime::fault;
use crate::store::counters::Truth;
use crate::store::jobs::LEASE;
use crate::store::repairs::Intent;

/// Numbers that are watched at once: the consumers look each event up among them.
pub(super) const WATCHED_MAX: usize = 1_000;

/// Once there are so many suspects they are measured again, at most as many at once, and no page is looked at before.
pub(super) const SUSPECTS_MAX: usize = 10_000;

/// How long after it is noted a repair may be made: less than the lease of the run.
const REPAIR_WITHIN: Duration = LEASE.saturating_sub(Duration::from_secs(2));

/// Numbers that no measurement has decided: the drift that one has found; none where all found them busy.
pub(super) type Suspects = BTreeMap<CounterKey, Option<i64>>;

impl Run<'_> {
    /// Measurements at one page of numbers that are sorted by key.
    pub(super) async fn compare(&mut self, numbers: &[CounterKey]) -> Result<()> {
        // Before the measurement, which may exceed the limits.
        self.report.checked += numbers.len() as u64;
        let Measurements { measurements, truths } = self.measure(numbers, Duration::ZERO, self.recounted()).await?;
        self.note_unknown(numbers.iter().filter(|number| !measurements.contains_key(number)));
        self.correct_counters(&truths).await?;
        for (number, measurement) in &measurements {
            match measurement.verdict {
                Verdict::Drift(0) => self.note_exact(*number, measurement),
                Verdict::Drift(drift) => self.suspect(*number, Some(drift)),
                Verdict::Busy => self.suspect(*number, None),
            }
        }
        Ok(())
    }

    /// Has the number looked at again.
    pub(super) fn suspect(&mut self, number: CounterKey, drift: Option<i64>) {
        self.suspects.insert(number, drift);
    }

    /// Measures the suspects again until there are none.
    pub(super) async fn recheck(&mut self) -> Result<()> {
        while !self.suspects.is_empty() {
            let mut some = std::mem::take(&mut self.suspects);
            if let Some((first, _)) = some.iter().nth(SUSPECTS_MAX) {
                let first = *first;
                self.suspects = some.split_off(&first);
            }
            self.recheck_some(some).await?;
        }
        Ok(())
    }

    async fn recheck_some(&mut self, suspects: Suspects) -> Result<()> {
        fault::point("reconcile:looked");
        let (grace, skew) = (self.on.limits.publish_grace.0, self.on.limits.skew());
        // What was counted in Redis before the first measurement, and published late, has come by the second.
        self.pause(grace).await;
        let numbers: Vec<CounterKey> = suspects.keys().copied().collect();
        // What is shown of a target that somebody has named is all as of the same measurement.
        let recounted = self.recounted().filter(|_| self.report.lists_all);
        let Measurements { measurements, truths } = self.measure(&numbers, grace, recounted).await?;
        self.note_unknown(numbers.iter().filter(|number| !measurements.contains_key(number)));
        self.correct_counters(&truths).await?;
        let busy: Vec<CounterKey> = with_busy(&measurements).collect();
        self.decide(&suspects, &measurements).await?;
        for some in busy.chunks(WATCHED_MAX) {
            let measurements = self.measure_watched(some, grace, skew).await?;
            let before = self.suspects.len();
            self.note_undecided(&measurements).await?;
            self.decide(&suspects, &measurements).await?;
            // What stays suspect counts when it is decided.
            self.report.busy += (measurements.len() + before - self.suspects.len()) as u64;
        }
        Ok(())
    }

    /// Repairs those on which a measurement agrees with an earlier one. What it is the first to find off stays suspect.
    async fn decide(&mut self, suspects: &Suspects, measurements: &BTreeMap<CounterKey, Measurement>) -> Result<()> {
        let mut seen = BTreeMap::new();
        for (number, measurement) in measurements {
            match (suspects.get(number).copied().flatten(), measurement.verdict) {
                (_, Verdict::Busy) => {}
                (Some(first), Verdict::Drift(_)) => drop(seen.insert(*number, first)),
                (None, Verdict::Drift(0)) => self.note_exact(*number, measurement),
                (None, Verdict::Drift(drift)) => self.suspect(*number, Some(drift)),
            }
        }
        self.repair_agreed(&seen, measurements).await
    }

    /// Adds what two measurements agree on.
    async fn repair_agreed(
        &mut self,
        first: &BTreeMap<CounterKey, i64>,
        second: &BTreeMap<CounterKey, Measurement>,
    ) -> Result<()> {
        let mut repairs = Vec::new();
        for (number, measurement) in second {
            let (Some(first), Verdict::Drift(drift)) = (first.get(number), measurement.verdict) else { continue };
            let delta = confirmed_delta(*first, drift);
            if delta == 0 {
                self.report.transient += 1;
                if self.report.lists_all {
                    self.list(*number, measurement, 0, TargetVerdict::Transient);
                }
                continue;
            }
            self.report.drifted += 1;
            self.report.drift_sum += delta.unsigned_abs();
            self.report.drifted_by_size.note(delta.unsigned_abs());
            let is_set = self.on.rules.of(number.0.kind, number.1).settable && !self.is_by_daemon(*number);
            let not_set_since = is_set.then_some(measurement.sample.cut);
            repairs.push(Repair {
                not_set_since,
                ..self.adding(*number, measurement.sample.value, delta, measurement.sample.loaded)
            });
        }
        if self.report.dry_run || repairs.is_empty() {
            for Repair { number, .. } in &repairs {
                if let Some(measurement) = second.get(number) {
                    self.list(*number, measurement, 0, TargetVerdict::Drifted);
                }
            }
            return Ok(());
        }
        fault::point("reconcile:agreed");
        let largest = repairs.iter().map(|repair| repair.delta.unsigned_abs()).max().unwrap_or(0);
        self.check_limits(largest)?;
        let deltas: BTreeMap<CounterKey, i64> = repairs.iter().map(|repair| (repair.number, repair.delta)).collect();
        let mut left = Vec::new();
        for (number, result) in self.repair(&repairs, second).await? {
            let (Some(delta), Some(measurement)) = (deltas.get(&number), second.get(&number)) else { continue };
            match result {
                Repaired::Done => {
                    self.report.repaired += 1;
                    self.list(number, measurement, *delta, TargetVerdict::Repaired);
                }
                Repaired::BelowZero | Repaired::Stale => {
                    self.report.left += 1;
                    left.push((number, *delta));
                    self.list(number, measurement, 0, TargetVerdict::Left);
                }
            }
        }
        self.keep_for_next(&left).await
    }

    /// Repairs, and notes each: before it is made and after.
    async fn repair(
        &mut self,
        repairs: &[Repair],
        measurements: &BTreeMap<CounterKey, Measurement>,
    ) -> Result<Vec<(CounterKey, Repaired)>> {
        let began = Instant::now();
        let pass = self.next_number();
        // Noting them makes the lease last from then: until it ends no other run measures.
        let until = |number| {
            measurements.get(number).map_or(Micros(0), |measurement| {
                measurement.sample.cut.after(measurement.taken.elapsed() + REPAIR_WITHIN)
            })
        };
        let repairs: Vec<Repair> =
            repairs.iter().map(|repair| Repair { until: until(&repair.number), ..*repair }).collect();
        let before = |number| measurements.get(&number).map_or(0, |measurement| measurement.sample.value);
        let intents: Vec<Intent> = repairs
            .iter()
            .map(|Repair { number, delta, .. }| Intent { number: *number, before: before(*number), added: *delta })
            .collect();
        self.on.store.note_repairs(JOB, self.number, pass, &intents).await?;
        self.check_data_set().await?;
        fault::point("reconcile:noted");
        let done = self.on.cache.repair(&self.on.names, pass, &repairs).await?;
        fault::point("reconcile:repaired");
        let outcomes: Vec<(CounterKey, &str)> = done.iter().map(|(number, result)| (*number, result.name())).collect();
        self.on.store.note_outcomes(pass, &outcomes).await?;
        Steps::add(&mut self.report.steps_ms.repair, began.elapsed());
        Ok(done)
    }

    /// A replica that was promoted after the measurements can lack the drift that they saw.
    pub(super) async fn check_data_set(&self) -> Result<()> {
        if self.on.cache.data_set().await? == self.data_set {
            return Ok(());
        }
        Err(NotNow("Redis was restarted, or failed over, since the run began".to_owned()).into())
    }

    /// `counter` must equal the rows in every snapshot (invariant 3); where it doesn't, a hand or a bug was at it. What was not recounted has no
    /// rows here.
    pub(super) async fn correct_counters(&mut self, truths: &HashMap<CounterKey, Truth>) -> Result<()> {
        let off: BTreeMap<Target, Intent> = truths
            .iter()
            .filter_map(|(number, Truth { counted, rows, .. })| {
                let intent = Intent { number: *number, before: *counted, added: (*rows)? - counted };
                Some((number.0, intent)).filter(|_| intent.added != 0)
            })
            // A dry run finds them off at each measurement.
            .filter(|(target, _)| !self.uncorrected.contains_key(target))
            .collect();
        if off.is_empty() {
            return Ok(());
        }
        self.report.counters_off += off.len() as u64;
        if !self.report.dry_run {
            self.check_limits(off.values().map(|intent| intent.added.unsigned_abs()).max().unwrap_or(0))?;
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
                self.on.store.correct_counter(JOB, self.number, pass, intent).await?;
            } else if self.uncorrected.len() < SUSPECTS_MAX {
                self.uncorrected.insert(target, delta);
            }
        }
        Ok(())
    }

    fn note_exact(&mut self, number: CounterKey, measurement: &Measurement) {
        self.report.exact += 1;
        if self.report.lists_all {
            self.list(number, measurement, 0, TargetVerdict::Exact);
        }
    }

    /// Numbers that had an event so close to the cut, by a producer's clock, that no measurement could say which was first: the
    /// next run looks at them first, so that what was compared may be called compared.
    async fn note_undecided(&mut self, measurements: &BTreeMap<CounterKey, Measurement>) -> Result<()> {
        let undecided: Vec<(CounterKey, i64)> = with_busy(measurements).map(|number| (number, 0)).collect();
        for (number, measurement) in measurements.iter().filter(|(_, measurement)| measurement.verdict == Verdict::Busy)
        {
            self.report.undecided += 1;
            if self.report.lists_all {
                self.list(*number, measurement, 0, TargetVerdict::Undecided);
            }
        }
        self.keep_for_next(&undecided).await
    }

    /// The next run looks at them first, and the cut of all others goes on.
    async fn keep_for_next(&mut self, numbers: &[(CounterKey, i64)]) -> Result<()> {
        if numbers.is_empty() || self.report.dry_run {
            return Ok(());
        }
        let mut numbers = numbers.to_vec();
        numbers.sort_unstable();
        let without_room = self.on.store.keep_drift_seen(&numbers).await?;
        self.all_kept &= without_room == 0;
        Ok(())
    }

    pub(super) fn note_unknown<'a>(&mut self, numbers: impl Iterator<Item = &'a CounterKey>) {
        for (target, metric) in numbers {
            self.report.unknown += 1;
            if self.report.lists_all {
                self.report.targets.push(TargetReport::unknown(self.name(*target), self.on.metrics.name(*metric)));
            }
        }
    }

    fn list(&mut self, (target, metric): CounterKey, measurement: &Measurement, added: i64, verdict: TargetVerdict) {
        // What the truth was at the cut is not known of an undecided one: it is told as of now.
        let drift = if let Verdict::Drift(drift) = measurement.verdict {
            drift
        } else {
            measurement.sample.value - measurement.truth.counted
        };
        let redis = measurement.sample.value;
        // A target has few of all the numbers that there are.
        let is_void = metric != self.on.metrics.like() && redis == 0 && measurement.truth.update_at.is_none();
        if !is_void && self.report.has_room() {
            self.report.targets.push(TargetReport {
                target: self.name(target),
                metric: self.on.metrics.name(metric),
                redis,
                mysql: redis - drift,
                counter: Some(measurement.truth.counted),
                rows: measurement.truth.rows,
                added,
                verdict,
            });
        }
    }
}

fn with_busy(measurements: &BTreeMap<CounterKey, Measurement>) -> impl Iterator<Item = CounterKey> {
    measurements.iter().filter(|(_, measurement)| measurement.verdict == Verdict::Busy).map(|(number, _)| *number)
}
