//! Compares counters, one page at a time. It measures a page, measures the suspect counters of the page again, and
//! repairs each confirmed drift (the difference between Redis and MySQL).
//!
//! The first measurement is cheap, because its fence is sent immediately. Nearly all counters are right then. The
//! others are *suspects*, and those of many pages are measured again together. A suspect that is still busy is watched.
//! If API servers count one of the suspects, the second measurement waits a whole `publish_grace`. If two measurements
//! find a drift in the same direction, the run repairs the smaller drift.

use std::collections::{BTreeMap, HashMap};
use std::time::{Duration, Instant};

use anyhow::Result;

use super::context::{RunContext, Servers};
use super::measure::{Measure, Measurement, Measurements, SampledRange, WATCHED_MAX, with_busy};
use super::repair::Repairer;
use super::report::{Progress, Report, TargetReport, Verdict};
use super::throttle::Throttle;
use tallyd_base::jobs::fence::Fences;
use tallyd_base::jobs::run::Ended;
use tallyd_base::runtime::fault;
use tallyd_base::telemetry::telemetry;
use tallyd_core::drift::{Judgement, Truth};
use tallyd_core::model::{CounterKey, Kind, Metric, Target, TargetId};
use tallyd_core::outbox::OutboxOffsets;
use tallyd_core::repair_limits::{Decision, decide};
use tallyd_mysql::ranges::{Counted, Recount};
use tallyd_redis::Cache;
use tallyd_redis::layout::Loaded;

/// At this number the run rechecks them before the next page. One recheck also handles at most this number.
pub(super) const SUSPECTS_MAX: usize = 10_000;

type Suspects = BTreeMap<CounterKey, Judgement>;

pub(super) struct Comparer<'a> {
    pub run: &'a RunContext<'a>,
    pub throttle: Throttle<'a>,
    pub measure: Measure<'a>,
    repairer: Repairer<'a>,
    suspects: Suspects,
    pub listed: u64,
    pub report: Report,
    published: Vec<u64>,
}

/// For each bucket: the count (modulo 2^16) of listed counters that are not zero in Redis. Empty if not needed.
#[derive(Default)]
pub(super) struct KnownByBucket(pub Vec<u16>);

impl KnownByBucket {
    pub(super) fn new(cache: &Cache) -> Self {
        Self(vec![0; cache.keys.buckets() as usize])
    }

    fn note(&mut self, cache: &Cache, target: Target) {
        if let Some(count) = self.0.get_mut(cache.keys.bucket(target) as usize) {
            *count = count.wrapping_add(1);
        }
    }
}

impl<'a> Comparer<'a> {
    pub(super) fn new(run: &'a RunContext<'a>, fences: Option<Fences<'a>>, report: Report) -> Self {
        Self {
            run,
            throttle: Throttle::new(run),
            measure: Measure::new(run, fences),
            repairer: Repairer::new(run),
            suspects: Suspects::new(),
            listed: 0,
            report,
            published: vec![0; Verdict::ALL.len()],
        }
    }

    /// `keys` is sorted. Runs until no suspects are left.
    pub(super) async fn compare(&mut self, keys: &[CounterKey]) -> Result<()> {
        let mut rest = keys;
        while !rest.is_empty() && !self.run.early_end.is_due() {
            let (page, after) = rest.split_at(rest.len().min(self.throttle.page()));
            self.compare_page(page).await?;
            rest = after;
        }
        self.recheck().await
    }

    pub(super) async fn compare_page(&mut self, page: &[CounterKey]) -> Result<()> {
        if !self.report.lists_all {
            self.wait().await?;
        }
        if self.run.early_end.is_due() {
            return Ok(());
        }
        let began = Instant::now();
        self.measure_page(page).await?;
        fault::point("reconcile:compared");
        self.throttle.note(page.len(), began.elapsed());
        self.show(page.last().map(|(target, _)| *target));
        if self.has_many_suspects() {
            self.recheck().await?;
        }
        Ok(())
    }

    pub(super) async fn compare_range(
        &mut self,
        sampled: SampledRange,
        recount: Recount,
        known: &mut KnownByBucket,
    ) -> Result<()> {
        let servers = self.run.servers;
        let SampledRange { range, samples, .. } = sampled;
        let truths = truths_of(servers, range.kind, &recount);
        // Was new or had no row of `counter`, so it is measured again in the recheck.
        let is_listed = |key: &CounterKey| range.counters.binary_search_by_key(key, |it| it.number).is_ok();
        let unlisted: Vec<CounterKey> = truths.keys().copied().filter(|key| !is_listed(key)).collect();
        self.report.checked += (range.counters.len() + unlisted.len()) as u64;
        self.repairer.correct_counters(&truths, &mut self.measure, &mut self.report).await?;
        self.suspects.extend(unlisted.into_iter().map(|key| (key, Judgement::Busy)));
        for (Counted { number: key, .. }, sample) in range.counters.iter().zip(samples) {
            if sample.as_ref().is_some_and(|sample| sample.loaded == Loaded::No) && self.run.job.gives_way() {
                self.run
                    .early_end
                    .make_way("Redis lost counters: another run loads the counters first, and then this run resumes");
            }
            let Some(sample) = sample.filter(|sample| self.measure.is_known(sample)) else {
                self.note_unknown(*key);
                continue;
            };
            if sample.value != 0 {
                known.note(&servers.cache, key.0);
            }
            match self.measure.judge(*key, &sample, truths.get(key).copied(), &recount.lag) {
                Judgement::Drift(0) => self.report.exact += 1,
                judgement => self.suspect(*key, judgement),
            }
        }
        Ok(())
    }

    pub(super) async fn recheck(&mut self) -> Result<()> {
        while !self.suspects.is_empty() && !self.run.early_end.is_stopped() {
            let mut some = std::mem::take(&mut self.suspects);
            if let Some((first, _)) = some.iter().nth(SUSPECTS_MAX) {
                let first = *first;
                self.suspects = some.split_off(&first);
            }
            self.recheck_some(some).await?;
        }
        Ok(())
    }

    pub(super) fn has_many_suspects(&self) -> bool {
        self.suspects.len() >= SUSPECTS_MAX
    }

    /// Each counter was either compared, or recorded for the next run.
    pub(super) fn is_complete(&self) -> bool {
        self.repairer.has_kept_all() && self.repairer.stopped().is_none() && !self.run.early_end.was_due()
    }

    pub(super) async fn wait(&mut self) -> Result<()> {
        self.throttle.wait(self.measure.publisher()).await
    }

    pub(super) fn show(&mut self, place: Option<Target>) {
        self.publish_metrics();
        let Report { checked, drifted, .. } = self.report;
        let pending = self.suspects.len() as u64;
        let place = place.map(|place| self.run.servers.name(place));
        let done = self.listed;
        self.run.base.show(|progress| {
            *progress = Progress { checked, done, drifted, pending, place, ..std::mem::take(progress) };
        });
    }

    /// Records nothing while suspects are left, in a dry run, or while repairs are held back.
    pub(super) async fn note_checkpoint(&self, text: &str) -> Result<()> {
        if !self.suspects.is_empty() || self.report.head.dry_run || self.repairer.stopped().is_some() {
            return Ok(());
        }
        Ok(self.run.servers.store.note_checkpoint(self.run.base.number, text).await?)
    }

    pub(super) fn publish_metrics(&mut self) {
        for (verdict, published) in Verdict::ALL.iter().zip(&mut self.published) {
            let count = self.report.count(*verdict);
            telemetry().repairs.compared(self.report.mode, *verdict, count.saturating_sub(*published));
            *published = count;
        }
    }

    pub(super) fn into_report(self) -> Report {
        let mut report = self.report;
        report.steps_ms.merge(self.measure.steps);
        self.throttle.report(&mut report.head);
        if let (None, Some(reason)) = (&report.head.ended_early, self.repairer.stopped()) {
            report.head.end(Ended::LimitExceeded, reason);
        }
        report.clean = report.is_clean();
        report
    }

    async fn measure_page(&mut self, keys: &[CounterKey]) -> Result<()> {
        // The number of checked counters is updated first, because the measurement needs it for the safety limits.
        self.report.checked += keys.len() as u64;
        let measurements = self.measured(keys, Duration::ZERO, self.run.recounted()).await?;
        for (key, measurement) in &measurements {
            match measurement.judgement {
                Judgement::Drift(0) => self.note_exact(*key, measurement),
                judgement => self.suspect(*key, judgement),
            }
        }
        Ok(())
    }

    async fn recheck_some(&mut self, suspects: Suspects) -> Result<()> {
        fault::point("reconcile:looked");
        let limits = &self.run.servers.limits;
        let grace = limits.publish_grace.0;
        let keys: Vec<CounterKey> = suspects.keys().copied().collect();
        // API servers count a like before they publish its event. The wait lets the first measurement's likes arrive.
        if self.run.servers.is_any_by_api(&keys) {
            self.run.base.stop.run_until_cancelled(tokio::time::sleep(grace)).await;
        }
        // For named targets the like records are counted now, so that the report shows one measurement.
        let recounted = self.run.recounted().filter(|_| self.report.lists_all);
        let mut measurements = self.measured(&keys, grace, recounted).await?;
        self.decide(&suspects, &measurements).await?;
        let servers = self.run.servers;
        let busy: Vec<CounterKey> = with_busy(&measurements).filter(|key| !servers.is_by_daemon(*key)).collect();
        // A watch does not help if outbox rows were deleted between the sample and the read.
        measurements.retain(|key, _| servers.is_by_daemon(*key));
        self.note_undecided(&measurements).await?;
        for some in busy.chunks(WATCHED_MAX) {
            let measurements = self.measure.measure_watched(some, grace, limits.skew()).await?;
            let before = self.suspects.len();
            self.note_undecided(&measurements).await?;
            self.decide(&suspects, &measurements).await?;
            // Counters that are still suspects are added to the report after a later measurement.
            self.report.busy += (measurements.len() + before - self.suspects.len()) as u64;
        }
        Ok(())
    }

    async fn measured(
        &mut self,
        keys: &[CounterKey],
        grace: Duration,
        recounted: Option<Metric>,
    ) -> Result<BTreeMap<CounterKey, Measurement>> {
        let none = OutboxOffsets::default();
        let Measurements { measurements, truths } = self.measure.measure(keys, grace, recounted, &none).await?;
        for key in keys.iter().filter(|key| !measurements.contains_key(key)) {
            self.note_unknown(*key);
        }
        self.repairer.correct_counters(&truths, &mut self.measure, &mut self.report).await?;
        Ok(measurements)
    }

    /// A counter whose drift is found for the first time stays a suspect.
    async fn decide(&mut self, suspects: &Suspects, measurements: &BTreeMap<CounterKey, Measurement>) -> Result<()> {
        let mut deltas = BTreeMap::new();
        for (key, measurement) in measurements {
            match decide(suspects.get(key).copied(), measurement.judgement) {
                Decision::Busy => {}
                Decision::Exact => self.note_exact(*key, measurement),
                Decision::Suspect => self.suspect(*key, measurement.judgement),
                Decision::Confirmed(delta) => drop(deltas.insert(*key, delta)),
            }
        }
        self.repairer.repair_confirmed(&deltas, measurements, &mut self.report).await
    }

    fn suspect(&mut self, key: CounterKey, judgement: Judgement) {
        self.suspects.insert(key, judgement);
    }

    fn note_exact(&mut self, key: CounterKey, measurement: &Measurement) {
        self.report.exact += 1;
        if self.report.lists_all {
            measurement.list(&mut self.report, self.run.servers, key, 0, Verdict::Exact);
        }
    }

    /// An event's time was too close to each sample, so it is unknown whether the sample includes the event. The next
    /// run measures these counters first, so this run can report that everything was compared.
    async fn note_undecided(&mut self, measurements: &BTreeMap<CounterKey, Measurement>) -> Result<()> {
        let undecided: Vec<(CounterKey, i64)> = with_busy(measurements).map(|key| (key, 0)).collect();
        for (key, measurement) in measurements.iter().filter(|(_, it)| it.judgement == Judgement::Busy) {
            self.report.undecided += 1;
            if self.report.lists_all {
                measurement.list(&mut self.report, self.run.servers, *key, 0, Verdict::Undecided);
            }
        }
        self.repairer.keep_for_next(undecided, &self.report).await
    }

    fn note_unknown(&mut self, (target, metric): CounterKey) {
        self.report.unknown += 1;
        if self.report.lists_all {
            let servers = self.run.servers;
            self.report.targets.push(TargetReport::unknown(servers.name(target), servers.metrics.name(metric)));
        }
    }
}

/// A listed target without like records has zero likes.
fn truths_of(servers: &Servers, kind: Kind, recount: &Recount) -> HashMap<CounterKey, Truth> {
    let like = servers.metrics.like();
    let truth = |counted: &Counted| Truth {
        counted: counted.value,
        rows: (counted.number.1 == like).then_some(0),
        update_at: Some(counted.update_at),
    };
    let mut truths: HashMap<CounterKey, Truth> =
        recount.counters.iter().map(|counted| (counted.number, truth(counted))).collect();
    for (id, liked) in &recount.likes {
        let (id, liked): (TargetId, i64) = (*id, *liked);
        truths.entry((Target { kind, id }, like)).or_default().rows = Some(liked);
    }
    truths
}
