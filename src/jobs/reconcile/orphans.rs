//! Finds orphans, which are counters that Redis has and MySQL does not have. There are orphans if all events of a
//! target were lost, or if something else wrote to Redis.

use std::ops::Range;
use std::time::Instant;

use anyhow::Result;
use tracing::warn;

use super::compare::{Comparer, KnownByBucket};
use super::context::Servers;
use super::report::Steps;
use tallyd_base::telemetry::telemetry;
use tallyd_core::drift::{Sample, Truth};
use tallyd_core::model::{CounterKey, Kind, Metric};
use tallyd_redis::space::LISTPACK_FIELDS;

/// After these, the run waits again for capacity. Counting their fields takes Redis a few tens of milliseconds.
const COUNTED_BUCKETS: usize = 4_096;

const LISTED_BUCKETS: usize = 128;

const SCANNED_TARGETS: usize = 10_000;

pub(super) struct Orphans<'r, 'a> {
    comparer: &'r mut Comparer<'a>,
    kind: Kind,
    name: &'r str,
    found: Vec<CounterKey>,
}

impl<'r, 'a> Orphans<'r, 'a> {
    pub(super) fn new(comparer: &'r mut Comparer<'a>, kind: Kind, name: &'r str) -> Self {
        Self { comparer, kind, name, found: Vec::new() }
    }

    /// Searches the buckets in which the number of Redis' counters differs from that of the samples (`known`). If as
    /// many counters are missing as there are orphans, only the next scrub or full run finds them.
    pub(super) async fn compare_all(mut self, known: KnownByBucket) -> Result<()> {
        let servers = self.comparer.run.servers;
        let metrics = servers.metrics.codes();
        if !servers.cache.is_packed() {
            for metric in metrics {
                self.compare_keys(metric).await?;
            }
            return Ok(());
        }
        let mut most_fields = 0;
        let mut from = 0;
        let mut suspects = Vec::new();
        for known in known.0.chunks(COUNTED_BUCKETS) {
            self.comparer.wait().await?;
            if self.comparer.run.early_end.is_due() {
                return Ok(());
            }
            let began = Instant::now();
            let until = from + u32::try_from(known.len())?;
            let sizes = servers.cache.bucket_sizes(self.name, &metrics, from..until).await?;
            self.took(began);
            for (bucket, (size, known)) in (from..until).zip(sizes.iter().zip(known)) {
                most_fields = size.fields.max(most_fields);
                if size.numbers % (1 << u16::BITS) != u64::from(*known) {
                    suspects.push(bucket);
                }
            }
            from = until;
        }
        drop(known);
        warn_of_full_buckets(servers, self.name, most_fields).await;
        self.search(&suspects).await
    }

    /// A layout that is not packed has no counters in buckets. A full run searches its keys.
    pub(super) async fn compare_buckets(mut self, buckets: Range<u32>) -> Result<()> {
        if !self.comparer.run.servers.cache.is_packed() {
            return Ok(());
        }
        self.search(&buckets.collect::<Vec<_>>()).await
    }

    async fn search(&mut self, buckets: &[u32]) -> Result<()> {
        let servers = self.comparer.run.servers;
        let metrics = servers.metrics.codes();
        for some in buckets.chunks(LISTED_BUCKETS) {
            self.comparer.wait().await?;
            if self.comparer.run.early_end.is_due() {
                break;
            }
            let began = Instant::now();
            let keys = servers.cache.numbers_of((self.name, self.kind), &metrics, some).await?;
            self.found.extend(unknown_to_mysql(servers, keys).await?);
            self.took(began);
            if self.found.len() >= self.comparer.throttle.page() {
                self.compare_found().await?;
            }
        }
        self.compare_found().await
    }

    async fn compare_keys(&mut self, metric: Metric) -> Result<()> {
        let servers = self.comparer.run.servers;
        let mut next = Some("0".to_owned());
        let mut keys = Vec::new();
        while let Some(from) = next
            && !self.comparer.run.early_end.is_due()
        {
            let began = Instant::now();
            let (found, to) = servers.cache.scan_targets((self.name, self.kind), metric, &from).await?;
            next = to;
            keys.extend(found.into_iter().map(|target| (target, metric)));
            if keys.len() >= SCANNED_TARGETS || next.is_none() {
                keys.sort_unstable();
                keys.dedup();
                let unknown = unknown_to_mysql(servers, std::mem::take(&mut keys)).await?;
                // A repair to zero does not delete the counter's key.
                let samples = servers.cache.sample(&servers.names, &unknown).await?;
                let counts = |(key, sample): (CounterKey, Option<Sample>)| {
                    Some(key).filter(|_| sample.is_some_and(|it| it.value != 0))
                };
                self.found.extend(unknown.into_iter().zip(samples).filter_map(counts));
            }
            self.took(began);
            if self.found.len() >= self.comparer.throttle.page() {
                self.compare_found().await?;
            }
            self.comparer.wait().await?;
        }
        self.compare_found().await
    }

    async fn compare_found(&mut self) -> Result<()> {
        let mut found = std::mem::take(&mut self.found);
        found.sort_unstable();
        found.dedup();
        self.comparer.report.phantoms += found.len() as u64;
        self.comparer.compare(&found).await
    }

    fn took(&mut self, began: Instant) {
        Steps::add(&mut self.comparer.report.steps_ms.phantoms, began.elapsed());
    }
}

/// A bucket beyond the limit takes ten times the memory.
async fn warn_of_full_buckets(servers: &Servers, kind: &str, most: u64) {
    telemetry().bucket_fields(kind, most);
    // Read only if a bucket is nearly full: the documented Redis account may not read it, and Redis logs refusals.
    if most * 10 <= LISTPACK_FIELDS * 8 {
        return;
    }
    let limit = servers.cache.listpack_fields().await.unwrap_or(LISTPACK_FIELDS);
    if most * 10 > limit * 8 {
        warn!(
            event = "buckets-full",
            kind,
            fields = most,
            limit,
            "a bucket of the kind {kind} has {most} fields, and beyond {limit} it takes ten times the memory: raise [redis] bucket_bits"
        );
    }
}

/// `keys` is sorted.
async fn unknown_to_mysql(servers: &Servers, mut keys: Vec<CounterKey>) -> Result<Vec<CounterKey>> {
    // Counters first: they need only a few point reads, and nearly every key has one.
    for recounted in [None, Some(servers.metrics.like())] {
        let (truths, _) = servers.store.truths(&keys, recounted, None).await?;
        let is_known = |truth: &Truth| truth.update_at.is_some() || truth.rows.unwrap_or(0) > 0;
        keys.retain(|key| !truths.get(key).is_some_and(is_known));
    }
    Ok(keys)
}
