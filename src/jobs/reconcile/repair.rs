//! Adds to Redis the amounts that two measurements agree on, corrects rows of `counter`, and stops at the safety
//! limits. A repair is recorded in MySQL before and after it is made. The script makes it only if the bucket has not
//! changed since the sample, and if the deadline has not passed.

use std::collections::{BTreeMap, HashMap};
use std::time::{Duration, Instant};

use anyhow::Result;
use tracing::warn;

use super::context::{JOB, Mode, RunContext, Servers};
use super::measure::{Measure, Measurement};
use super::raised::Raised;
use super::report::{Report, Steps, Verdict};
use tallyd_base::config::{Reconcile as Limits, Ruled, Writes};
use tallyd_base::runtime::fault;
use tallyd_base::runtime::log::Flood;
use tallyd_base::telemetry::telemetry;
use tallyd_core::drift::Truth;
use tallyd_core::model::{CounterKey, Micros, Target};
use tallyd_core::outbox::KeptAmounts;
use tallyd_core::repair_limits::{LimitExceeded, RepairLimits};
use tallyd_mysql::jobs::LEASE;
use tallyd_mysql::repairs::{CORRECTIONS_MAX, HELD, Intent, RedisFollows};
use tallyd_redis::layout::Loaded;
use tallyd_redis::repairs::{Repair, Repaired};

/// A repair must be made within this time after it was recorded. The time is shorter than the lease of the run.
const REPAIR_WITHIN: Duration = LEASE.saturating_sub(Duration::from_secs(2));

pub(super) struct Repairer<'a> {
    run: &'a RunContext<'a>,
    /// There was room to record all undecided counters for the next run.
    all_kept: bool,
    explained: u64,
    raised: Raised<'a>,
    off: Flood,
}

impl<'a> Repairer<'a> {
    pub(super) fn new(run: &'a RunContext<'a>) -> Self {
        Self { run, all_kept: true, explained: 0, raised: Raised::new(run), off: Flood::default() }
    }

    pub(super) fn has_kept_all(&self) -> bool {
        self.all_kept
    }

    pub(super) fn stopped(&self) -> Option<String> {
        self.raised.reason()
    }

    pub(super) async fn repair_confirmed(
        &mut self,
        deltas: &BTreeMap<CounterKey, i64>,
        second: &BTreeMap<CounterKey, Measurement>,
        report: &mut Report,
    ) -> Result<()> {
        let servers = self.run.servers;
        let repairs = self.confirmed(deltas, second, report);
        if report.head.dry_run || repairs.is_empty() {
            for Repair { number: key, .. } in &repairs {
                if let Some(measurement) = second.get(key) {
                    measurement.list(report, servers, *key, 0, Verdict::Drifted);
                }
            }
            return Ok(());
        }
        fault::point("reconcile:agreed");
        self.check_repairs(&repairs, report).await?;
        let (repairs, stopped) = self.raised.part(repairs).await?;
        self.leave(&stopped, second, report).await?;
        let mut left = Vec::new();
        for (key, repaired) in self.repair(&repairs, second, report).await? {
            let (Some(delta), Some(measurement)) = (deltas.get(&key), second.get(&key)) else { continue };
            match repaired {
                Repaired::Done => {
                    report.repaired += 1;
                    measurement.list(report, servers, key, *delta, Verdict::Repaired);
                }
                Repaired::BelowZero | Repaired::Stale => {
                    report.left += 1;
                    left.push((key, *delta));
                    measurement.list(report, servers, key, 0, Verdict::Left);
                }
            }
        }
        self.keep_for_next(left, report).await
    }

    /// In every snapshot these rows must equal the like records (invariant 3), else someone changed them, or tallyd has
    /// a bug. Counters that were not recounted have no `rows`. The outbox adds the correction of a counter that the
    /// daemon adds to Redis, so the next measurement reads the corrected value.
    pub(super) async fn correct_counters(
        &mut self,
        truths: &HashMap<CounterKey, Truth>,
        measure: &mut Measure<'_>,
        report: &mut Report,
    ) -> Result<()> {
        let servers = self.run.servers;
        let off: BTreeMap<Target, Intent> = truths
            .iter()
            .filter_map(|(key, Truth { counted, rows, .. })| {
                let intent = Intent { number: *key, before: *counted, added: (*rows)? - counted };
                (intent.added != 0).then_some((key.0, intent))
            })
            // Each measurement of a dry run finds the same wrong rows again.
            .filter(|(target, _)| !measure.is_uncorrected(*target))
            .collect();
        if off.is_empty() {
            return Ok(());
        }
        report.counters_off += off.len() as u64;
        if !report.head.dry_run {
            let largest = off.values().map(|intent| intent.added.unsigned_abs()).max().unwrap_or(0);
            self.check_limits(report, largest)?;
        }
        let pass = self.run.base.next_number();
        fault::point("reconcile:correcting");
        self.note_off(&off);
        if report.head.dry_run {
            off.iter().for_each(|(target, intent)| measure.leave_uncorrected(*target, intent.added));
            return Ok(());
        }
        let (by_daemon, by_api): (Vec<Intent>, Vec<Intent>) =
            off.values().partition(|intent| servers.is_by_daemon(intent.number));
        for (follows, intents) in [(RedisFollows::Outbox, by_daemon), (RedisFollows::SameRun, by_api)] {
            for some in intents.chunks(CORRECTIONS_MAX) {
                servers.store.correct_counters((JOB, self.run.base.number, pass), follows, some).await?;
                telemetry().repairs.in_mysql(JOB, some.len() as u64);
            }
        }
        Ok(())
    }

    fn note_off(&mut self, off: &BTreeMap<Target, Intent>) {
        let Some(counters) = self.off.note(off.len() as u64, Instant::now()) else { return };
        let Some((target, Intent { added: delta, .. })) = off.first_key_value() else { return };
        let (kind, target_id) = (self.run.servers.kinds.name(target.kind), target.id.0);
        warn!(
            event = "counter-off",
            counters,
            kind,
            target_id,
            delta,
            "{counters} counters differ from their like records, for example {kind}:{target_id} by {delta}"
        );
    }

    /// The next run measures these first. So the recorded cut can advance for all other counters.
    pub(super) async fn keep_for_next(&mut self, mut drifts: Vec<(CounterKey, i64)>, report: &Report) -> Result<()> {
        if drifts.is_empty() || report.head.dry_run {
            return Ok(());
        }
        drifts.sort_unstable();
        let without_room = self.run.servers.store.keep_drift_seen(&drifts).await?;
        self.all_kept &= without_room == 0;
        Ok(())
    }

    fn confirmed(
        &self,
        deltas: &BTreeMap<CounterKey, i64>,
        second: &BTreeMap<CounterKey, Measurement>,
        report: &mut Report,
    ) -> Vec<Repair> {
        let servers = self.run.servers;
        let mut repairs = Vec::new();
        for (key, measurement) in second {
            let Some(delta) = deltas.get(key).copied() else { continue };
            if delta == 0 {
                report.transient += 1;
                if report.lists_all {
                    measurement.list(report, servers, *key, 0, Verdict::Transient);
                }
                continue;
            }
            report.drifted += 1;
            report.drift_sum += delta.unsigned_abs();
            report.drifted_by_size.note(delta.unsigned_abs());
            let is_set = servers.rules.of(key.0.kind, key.1).settable && !servers.is_by_daemon(*key);
            let not_set_since = is_set.then_some(measurement.sample.cut);
            let addition = addition(servers, *key, measurement.sample.value, delta, measurement.sample.loaded);
            repairs.push(Repair { not_set_since, ..addition });
        }
        repairs
    }

    /// Repairs that only add rows which the outbox keeps do not count: Redis went back to an older state.
    async fn check_repairs(&mut self, repairs: &[Repair], report: &Report) -> Result<()> {
        let largest = |repairs: &[&Repair]| repairs.iter().map(|repair| repair.delta.unsigned_abs()).max().unwrap_or(0);
        let mut counted: Vec<&Repair> = repairs.iter().collect();
        if self.check_limits(report, largest(&counted)).is_ok() {
            return Ok(());
        }
        let servers = self.run.servers;
        let numbers = repairs.iter().map(|repair| repair.number).filter(|number| servers.is_by_daemon(*number));
        let mut kept = KeptAmounts::of(numbers);
        servers.store.outbox_kept(&mut kept).await?;
        counted.retain(|repair| !kept.explain(repair.number, repair.delta));
        self.explained += (repairs.len() - counted.len()) as u64;
        Ok(self.check_limits(report, largest(&counted))?)
    }

    fn check_limits(&self, report: &Report, largest: u64) -> Result<(), LimitExceeded> {
        if self.run.base.options.force {
            return Ok(());
        }
        let Limits { repair_targets_max_percent, repair_abs_max, .. } = self.run.servers.limits;
        let (command, reload) = if self.run.job.mode == Mode::Layout {
            ("the same command with --force", None)
        } else {
            ("`tallyd reconcile --force`", Some("`tallyd reconcile --reload`"))
        };
        let limits =
            RepairLimits { targets_max_percent: repair_targets_max_percent, abs_max: repair_abs_max, command, reload };
        limits.check(report.checked, (report.drifted - self.explained).max(report.counters_off), largest)
    }

    /// The next run reads the records, and reports whether the drift grows.
    async fn leave(
        &mut self,
        stopped: &[Repair],
        measurements: &BTreeMap<CounterKey, Measurement>,
        report: &mut Report,
    ) -> Result<()> {
        if stopped.is_empty() {
            return Ok(());
        }
        let (servers, pass) = (self.run.servers, self.run.base.next_number());
        servers.store.note_repairs(JOB, self.run.base.number, pass, &intents(stopped, measurements)).await?;
        let outcomes: Vec<(CounterKey, &str)> = stopped.iter().map(|repair| (repair.number, HELD)).collect();
        servers.store.note_outcomes(pass, &outcomes).await?;
        report.left += stopped.len() as u64;
        for Repair { number: key, .. } in stopped {
            if let Some(measurement) = measurements.get(key) {
                measurement.list(report, servers, *key, 0, Verdict::Left);
            }
        }
        self.keep_for_next(stopped.iter().map(|repair| (repair.number, repair.delta)).collect(), report).await
    }

    async fn repair(
        &self,
        repairs: &[Repair],
        measurements: &BTreeMap<CounterKey, Measurement>,
        report: &mut Report,
    ) -> Result<Vec<(CounterKey, Repaired)>> {
        let servers = self.run.servers;
        let began = Instant::now();
        let pass = self.run.base.next_number();
        // Recording the repairs extends the lease. No other run measures before this lease ends.
        let until = |key| {
            measurements.get(key).map_or(Micros(0), |measurement| {
                measurement.sample.cut.after(measurement.taken.elapsed() + REPAIR_WITHIN)
            })
        };
        let repairs: Vec<Repair> =
            repairs.iter().map(|repair| Repair { until: until(&repair.number), ..*repair }).collect();
        servers.store.note_repairs(JOB, self.run.base.number, pass, &intents(&repairs, measurements)).await?;
        self.run.check_data_set().await?;
        fault::point("reconcile:noted");
        let done = servers.cache.repair(&servers.names, pass, &repairs).await?;
        fault::point("reconcile:repaired");
        done.iter().for_each(|(_, repaired)| telemetry().repairs.in_redis(*repaired, 1));
        let outcomes: Vec<(CounterKey, &str)> = done.iter().map(|(key, repaired)| (*key, repaired.name())).collect();
        servers.store.note_outcomes(pass, &outcomes).await?;
        Steps::add(&mut report.steps_ms.repair, began.elapsed());
        Ok(done)
    }
}

fn intents(repairs: &[Repair], measurements: &BTreeMap<CounterKey, Measurement>) -> Vec<Intent> {
    let before = |key| measurements.get(&key).map_or(0, |measurement| measurement.sample.value);
    let intent =
        |Repair { number, delta, .. }: &Repair| Intent { number: *number, before: before(*number), added: *delta };
    repairs.iter().map(intent).collect()
}

/// Adds `delta` to a counter that was `sampled` in Redis. There is no deadline: if another run takes over the load, it
/// changes the buckets' state, and the script refuses the addition.
///
/// A counter may go below zero if the daemon counts it, because events can arrive out of order, or if MySQL's value is
/// below zero. Any other goes below zero only by a subtraction since the sample. Then the script refuses, and the
/// counter is measured again.
pub(super) fn addition(servers: &Servers, key: CounterKey, sampled: i64, delta: i64, loaded: Loaded) -> Repair {
    let (target, metric) = key;
    let Ruled { writer, below_zero, .. } = servers.rules.of(target.kind, metric);
    // Likes are never negative: a negative count in `counter` is wrong.
    let is_below = metric != servers.metrics.like() && sampled.saturating_add(delta) < 0;
    let below_zero = below_zero || writer == Writes::Daemon || is_below;
    Repair { number: key, delta, below_zero, not_set_since: None, loaded, until: Micros::MAX }
}
