//! What Redis has and MySQL doesn't: likes whose events were lost to the last one, and hands in Redis.

use std::ops::Range;
use std::time::Instant;

use anyhow::Result;
use tracing::warn;

use super::Run;
use super::report::Steps;
use crate::cache::counters::Sample;
use crate::cache::space::LISTPACK_FIELDS;
use crate::model::{CounterKey, Kind, Metric};
use crate::store::counters::Truth;
use crate::telemetry::telemetry;

/// Buckets whose numbers are counted between two waits: some tens of milliseconds of Redis.
const COUNTED_BUCKETS: usize = 4_096;

/// Buckets whose fields are listed at once: about 16,000 ids.
const LISTED_BUCKETS: usize = 128;

/// Targets that MySQL is asked about at once, of those that a search of all keys finds.
const SCANNED_TARGETS: usize = 10_000;

impl Run<'_> {
    /// Searches the buckets in which another number of numbers count than the samples of all known ones have found there: one
    /// that has lost as many as it has too many is not searched, and waits for the next scrub or full run.
    pub(super) async fn compare_orphans(&mut self, name: &str, kind: Kind) -> Result<()> {
        if !self.on.cache.is_packed() {
            for metric in self.on.metrics.codes() {
                self.compare_orphan_keys(name, kind, metric).await?;
            }
            return Ok(());
        }
        let metrics = self.on.metrics.codes();
        let (mut most, mut from, mut suspects) = (0, 0, Vec::new());
        let seen = std::mem::take(&mut self.counted_seen);
        for seen in seen.chunks(COUNTED_BUCKETS) {
            self.wait().await?;
            if self.is_over() {
                return Ok(());
            }
            let began = Instant::now();
            let until = from + u32::try_from(seen.len())?;
            let sizes = self.on.cache.bucket_sizes(name, &metrics, from..until).await?;
            Steps::add(&mut self.report.steps_ms.phantoms, began.elapsed());
            for (bucket, (size, seen)) in (from..until).zip(sizes.iter().zip(seen)) {
                most = size.fields.max(most);
                if size.numbers % (1 << u16::BITS) != u64::from(*seen) {
                    suspects.push(bucket);
                }
            }
            from = until;
        }
        drop(seen);
        self.warn_of_full_buckets(name, most).await;
        self.compare_orphans_in(name, kind, &suspects).await
    }

    /// Searches all keys, where each target or number has one.
    async fn compare_orphan_keys(&mut self, name: &str, kind: Kind, metric: Metric) -> Result<()> {
        let (mut orphans, mut next) = (Vec::new(), Some("0".to_owned()));
        let mut numbers = Vec::new();
        while let Some(from) = next
            && !self.is_over()
        {
            let began = Instant::now();
            let (found, to) = self.on.cache.scan_targets((name, kind), metric, &from).await?;
            next = to;
            numbers.extend(found.into_iter().map(|target| (target, metric)));
            if numbers.len() >= SCANNED_TARGETS || next.is_none() {
                numbers.sort_unstable();
                numbers.dedup();
                let unknown = self.unknown_to_mysql(std::mem::take(&mut numbers)).await?;
                // A key stays when its number is repaired to zero.
                let samples = self.on.cache.sample(&self.on.names, &unknown).await?;
                let counts = |(number, sample): (CounterKey, Option<Sample>)| {
                    Some(number).filter(|_| sample.is_some_and(|it| it.value != 0))
                };
                orphans.extend(unknown.into_iter().zip(samples).filter_map(counts));
            }
            Steps::add(&mut self.report.steps_ms.phantoms, began.elapsed());
            if orphans.len() >= self.throttle.page() {
                self.compare_found(&mut orphans).await?;
            }
            self.wait().await?;
        }
        self.compare_found(&mut orphans).await
    }

    /// Searches `buckets`, whatever is known of them. Other layouts have no numbers there: a full run searches their keys.
    pub(super) async fn compare_orphans_of(&mut self, name: &str, kind: Kind, buckets: Range<u32>) -> Result<()> {
        if !self.on.cache.is_packed() {
            return Ok(());
        }
        self.compare_orphans_in(name, kind, &buckets.collect::<Vec<_>>()).await
    }

    async fn compare_orphans_in(&mut self, name: &str, kind: Kind, buckets: &[u32]) -> Result<()> {
        let (metrics, mut orphans) = (self.on.metrics.codes(), Vec::new());
        for some in buckets.chunks(LISTED_BUCKETS) {
            self.wait().await?;
            if self.is_over() {
                break;
            }
            let began = Instant::now();
            let numbers = self.on.cache.numbers_of((name, kind), &metrics, some).await?;
            orphans.extend(self.unknown_to_mysql(numbers).await?);
            Steps::add(&mut self.report.steps_ms.phantoms, began.elapsed());
            if orphans.len() >= self.throttle.page() {
                self.compare_found(&mut orphans).await?;
            }
        }
        self.compare_found(&mut orphans).await
    }

    /// Past the server's limit a bucket takes ten times the room: said before it is reached.
    async fn warn_of_full_buckets(&self, kind: &str, most: u64) {
        telemetry().bucket_fields(kind, most);
        // Only then: the documented account may not ask, and Redis logs each refusal.
        if most * 10 <= LISTPACK_FIELDS * 8 {
            return;
        }
        let limit = self.on.cache.listpack_fields().await.unwrap_or(LISTPACK_FIELDS);
        if most * 10 > limit * 8 {
            warn!(
                event = "buckets-full",
                kind,
                fields = most,
                limit,
                "a bucket of the kind {kind} has {most} fields, and past {limit} it takes ten times the room: raise [redis] bucket_bits"
            );
        }
    }

    async fn compare_found(&mut self, orphans: &mut Vec<CounterKey>) -> Result<()> {
        orphans.sort_unstable();
        orphans.dedup();
        self.report.phantoms += orphans.len() as u64;
        self.compare_these(&std::mem::take(orphans)).await
    }

    /// Those of `numbers`, sorted by key, that have neither a counter nor a like record.
    async fn unknown_to_mysql(&self, mut numbers: Vec<CounterKey>) -> Result<Vec<CounterKey>> {
        // Counters first: they are few point reads each, and nearly every number has one.
        for recounted in [None, Some(self.on.metrics.like())] {
            let (truths, _) = self.on.store.truths(&numbers, recounted, None).await?;
            let is_known = |truth: &Truth| truth.update_at.is_some() || truth.rows.unwrap_or(0) > 0;
            numbers.retain(|number| !truths.get(number).is_some_and(is_known));
        }
        Ok(numbers)
    }
}
