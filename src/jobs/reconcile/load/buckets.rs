//! Loads the lost buckets of one kind: reads all counters from MySQL, and adds the amounts that the buckets lack.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::time::Duration;

use anyhow::Result;

use crate::jobs::reconcile::context::{RunContext, Servers};
use crate::jobs::reconcile::measure::{Measure, Measurement, WATCHED_MAX, with_busy};
use crate::jobs::reconcile::repair::addition;
use crate::jobs::reconcile::report::Report;
use tallyd_base::runtime::fault;
use tallyd_core::drift::Judgement;
use tallyd_core::model::{CounterKey, Kind, Micros, Target, TargetId};
use tallyd_core::outbox::{OutboxLag, OutboxOffsets};
use tallyd_core::touched::Touched;
use tallyd_mysql::outbox::Asked;
use tallyd_mysql::ranges::{LAST, Range};
use tallyd_redis::counters::CALL_IDS_MAX;
use tallyd_redis::layout::Loaded;
use tallyd_redis::load::Lost;
use tallyd_redis::repairs::{Repair, Repaired};

const PAGE_ROWS: usize = 200_000;

/// Counters whose right value at the cut cannot be computed from a page.
const PAGE_MEASURED: usize = 20_000;

const BUSY_MAX: usize = 20_000;

const FIELDS_MAX: usize = 500_000;

pub(super) struct Loader<'l, 'a> {
    run: &'l RunContext<'l>,
    measure: &'l mut Measure<'a>,
    report: &'l mut Report,
}

struct BucketPage {
    range: Range,
    lag: OutboxLag,
}

#[derive(Default)]
struct Lacking {
    repairs: Vec<Repair>,
    to_measure: Vec<CounterKey>,
}

impl<'l, 'a> Loader<'l, 'a> {
    pub(super) fn new(run: &'l RunContext<'l>, measure: &'l mut Measure<'a>, report: &'l mut Report) -> Self {
        Self { run, measure, report }
    }

    /// Loads as many buckets as memory allows. Returns the first bucket that is not loaded.
    pub(super) async fn load_from(mut self, kind: Kind, name: &str, from: u32) -> Result<u32> {
        let servers = self.run.servers;
        // Read first: the load includes these rows and all earlier ones. Because of the buckets' offsets, the outbox
        // does not add these rows again, even if it sends them late.
        let outbox = servers.store.outbox_numbers().await?;
        let metrics = servers.metrics.codes();
        let number = self.run.base.number;
        let lost = servers.cache.begin_load((name, kind), &metrics, number, from, FIELDS_MAX, &outbox).await?;
        let next = lost.next();
        if lost.buckets().next().is_none() {
            return Ok(next);
        }
        fault::point("reconcile:unloaded");
        let touched = if has_untouched(servers, kind) { Touched::none_after(outbox.clone()) } else { Touched::Any };
        let mut loading = Loading::new(lost, outbox, number);
        if servers.has_counts_by_api(kind) {
            // Until the load ends, readers query MySQL.
            self.measure.fence_patiently().await?;
        }
        if !self.load_pages(kind, &mut loading, touched).await? {
            return Ok(next);
        }
        fault::point("reconcile:loaded");
        self.end_loads(name, &mut loading).await?;
        if !loading.busy.is_empty() {
            self.load_busy(&mut loading).await?;
            self.load_watched(&mut loading).await?;
            self.end_loads(name, &mut loading).await?;
        }
        Ok(next)
    }

    async fn load_pages(&mut self, kind: Kind, loading: &mut Loading, mut touched: Touched) -> Result<bool> {
        let servers = self.run.servers;
        let mut page = list_page(servers, kind, TargetId(0), &touched).await?;
        loop {
            let BucketPage { range, lag } = page;
            let after = range.until;
            touched.note(range.after, &lag);
            let Lacking { repairs, to_measure } = self.lacking(loading, range, &touched);
            let following = list_page(servers, kind, after, &touched);
            let ((), following) = tokio::try_join!(self.add(loading, &repairs), following)?;
            for some in to_measure.chunks(PAGE_MEASURED) {
                self.load_measured(loading, some).await?;
            }
            if loading.busy.len() > BUSY_MAX {
                self.load_busy(loading).await?;
            }
            if self.run.early_end.is_due() {
                return Ok(false);
            }
            if after >= LAST {
                return Ok(true);
            }
            page = following;
        }
    }

    /// Buckets with busy counters stay unknown.
    async fn end_loads(&mut self, name: &str, loading: &mut Loading) -> Result<()> {
        let cache = &self.run.servers.cache;
        let busy: HashSet<u32> = loading.busy.iter().map(|(target, _)| cache.keys.bucket(*target)).collect();
        let ended = loading.lost.buckets().map(|(bucket, _)| bucket).filter(|bucket| !busy.contains(bucket));
        self.report.buckets_loaded += cache.end_load(name, self.run.base.number, ended).await?;
        for place in 0..loading.lost.cuts.len() {
            let bucket = loading.lost.from + u32::try_from(place)?;
            if !busy.contains(&bucket) {
                loading.leave(bucket);
            }
        }
        Ok(())
    }

    /// Measured instead are counters to which the daemon has added since the cut, all counters of layouts that are not
    /// packed, and counters whose value at the cut is unknown (retired metrics, fields that are not numbers). Nothing
    /// is added for counters that only Redis has: they are orphans, or the events of their likes have not reached MySQL
    /// yet, and the comparison handles both.
    fn lacking(&self, loading: &mut Loading, range: Range, touched: &Touched) -> Lacking {
        let servers = self.run.servers;
        let skew = servers.limits.skew();
        let metrics = servers.metrics.codes();
        let mut lacking = Lacking::default();
        for counted in range.counters {
            let key = counted.number;
            let Some(LoadingBucket { cut, state }) = loading.bucket(servers.cache.keys.bucket(key.0)) else { continue };
            let is_by_daemon = servers.is_by_daemon(key);
            let is_held = metrics.contains(&key.1) && !loading.lost.unreadable.contains(&key.0);
            if !servers.cache.is_packed() || !is_held || (is_by_daemon && touched.has(key)) {
                lacking.to_measure.push(key);
                continue;
            }
            let in_redis = loading.lost.values.remove(&key).unwrap_or(0);
            if !is_by_daemon && counted.update_at > cut.before(skew) {
                loading.busy.push(key);
            } else if counted.value != in_redis {
                lacking.repairs.push(addition(servers, key, in_redis, counted.value - in_redis, state));
            }
        }
        lacking
    }

    async fn load_measured(&mut self, loading: &mut Loading, keys: &[CounterKey]) -> Result<()> {
        let measured = self.measure.measure(keys, Duration::ZERO, None, &loading.outbox).await?;
        let measurements = measured.measurements;
        loading.busy.extend(with_busy(&measurements));
        self.add(loading, &self.missing(&measurements)).await
    }

    /// The writes to nearly all busy counters end before this second measurement, if the load takes long.
    async fn load_busy(&mut self, loading: &mut Loading) -> Result<()> {
        let mut busy = std::mem::take(&mut loading.busy);
        busy.sort_unstable();
        for some in busy.chunks(PAGE_MEASURED) {
            if self.run.early_end.is_due() {
                break;
            }
            self.load_measured(loading, some).await?;
        }
        // The site writes such a counter all the time. Many of them are watched now, to free memory for others.
        if loading.busy.len() > BUSY_MAX / 2 { self.load_watched(loading).await } else { Ok(()) }
    }

    /// If a counter still cannot be judged, its bucket stays unknown until the next run.
    async fn load_watched(&mut self, loading: &mut Loading) -> Result<()> {
        let keys = &self.run.servers.cache.keys;
        let (by_daemon, mut busy): (Vec<CounterKey>, Vec<CounterKey>) =
            std::mem::take(&mut loading.busy).into_iter().partition(|key| self.run.servers.is_by_daemon(*key));
        by_daemon.iter().for_each(|(target, _)| loading.leave(keys.bucket(*target)));
        busy.sort_unstable();
        for some in busy.chunks(WATCHED_MAX) {
            if self.run.early_end.is_due() {
                some.iter().for_each(|(target, _)| loading.leave(keys.bucket(*target)));
                continue;
            }
            // Zero skew: the time that the producer gave the event decides. A later comparison repairs a wrong result.
            let measurements = self.measure.measure_watched(some, Duration::ZERO, Duration::ZERO).await?;
            with_busy(&measurements).for_each(|(target, _)| loading.leave(keys.bucket(target)));
            self.add(loading, &self.missing(&measurements)).await?;
        }
        Ok(())
    }

    fn missing(&self, measurements: &BTreeMap<CounterKey, Measurement>) -> Vec<Repair> {
        let missing = |(key, measurement): (&CounterKey, &Measurement)| match measurement.judgement {
            Judgement::Drift(drift) if drift != 0 => {
                let sample = &measurement.sample;
                Some(addition(self.run.servers, *key, sample.value, -drift, sample.loaded))
            }
            _ => None,
        };
        measurements.iter().filter_map(missing).collect()
    }

    async fn add(&mut self, loading: &mut Loading, repairs: &[Repair]) -> Result<()> {
        let keys = &self.run.servers.cache.keys;
        let mut left = repairs.to_vec();
        while !left.is_empty() {
            // One call accepts few repairs per bucket. The next calls send the others, with the bucket's new state.
            let mut calls: HashMap<u32, usize> = HashMap::new();
            let (now, later): (Vec<Repair>, Vec<Repair>) = left.into_iter().partition(|repair| {
                let of_bucket = calls.entry(keys.bucket(repair.number.0)).or_default();
                *of_bucket += 1;
                *of_bucket <= CALL_IDS_MAX
            });
            self.add_once(loading, &now).await?;
            let next = |repair: Repair| {
                let LoadingBucket { state, .. } = loading.bucket(keys.bucket(repair.number.0))?;
                Some(Repair { loaded: state, ..repair })
            };
            left = later.into_iter().filter_map(next).collect();
        }
        Ok(())
    }

    async fn add_once(&mut self, loading: &mut Loading, repairs: &[Repair]) -> Result<()> {
        let servers = self.run.servers;
        let pass = self.run.base.next_number();
        fault::point("reconcile:loading");
        for ((target, _), repaired) in servers.cache.repair(&servers.names, pass, repairs).await? {
            let bucket = servers.cache.keys.bucket(target);
            match repaired {
                Repaired::Done | Repaired::BelowZero => {
                    self.report.counters_loaded += 1;
                    loading.note(bucket, pass);
                }
                Repaired::Stale => loading.leave(bucket),
            }
        }
        Ok(())
    }
}

/// If so, the load can compute the missing amounts of these counters from a page.
fn has_untouched(servers: &Servers, kind: Kind) -> bool {
    let targets = Target { kind, id: TargetId(0) };
    servers.cache.is_packed() && servers.metrics.codes().iter().any(|metric| servers.is_by_daemon((targets, *metric)))
}

async fn list_page(servers: &Servers, kind: Kind, after: TargetId, touched: &Touched) -> Result<BucketPage> {
    let (store, none) = (&servers.store, OutboxOffsets::default());
    let following = |(target, _): CounterKey| Some(&none).filter(|_| target.kind == kind && target.id > after);
    let (range, lag) = match touched.offsets() {
        Some(applied) => {
            store.list_range_with_lag(kind, after, PAGE_ROWS, Asked { applied, sampled: &following }).await?
        }
        None => (store.list_range(kind, after, PAGE_ROWS).await?, OutboxLag::default()),
    };
    Ok(BucketPage { range, lag })
}

struct Loading {
    lost: Lost,
    outbox: OutboxOffsets,
    passes: Vec<u64>,
    run: u64,
    busy: Vec<CounterKey>,
}

struct LoadingBucket {
    cut: Micros,
    state: Loaded,
}

impl Loading {
    fn new(lost: Lost, outbox: OutboxOffsets, run: u64) -> Self {
        let passes = vec![0; lost.cuts.len()];
        Self { lost, outbox, passes, run, busy: Vec::new() }
    }

    fn bucket(&self, bucket: u32) -> Option<LoadingBucket> {
        let place = bucket.checked_sub(self.lost.from)? as usize;
        let cut = (*self.lost.cuts.get(place)?)?;
        let state = Loaded::Loading { generation: self.run, pass: *self.passes.get(place)? };
        Some(LoadingBucket { cut: Micros(cut.get()), state })
    }

    fn note(&mut self, bucket: u32, pass: u64) {
        if let Some(last) = bucket.checked_sub(self.lost.from).and_then(|place| self.passes.get_mut(place as usize)) {
            *last = pass;
        }
    }

    fn leave(&mut self, bucket: u32) {
        if let Some(cut) = bucket.checked_sub(self.lost.from).and_then(|place| self.lost.cuts.get_mut(place as usize)) {
            *cut = None;
        }
    }
}
