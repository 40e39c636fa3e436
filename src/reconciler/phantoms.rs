//! What Redis has and MySQL doesn't: likes whose events were lost to the last one, and hands in Redis.

use std::ops::Range;
use std::time::Instant;

use anyhow::Result;
use tracing::warn;

use super::Run;
use super::report::Steps;
use crate::cache::counters::Sample;
use crate::cache::space::LISTPACK_FIELDS;
use crate::model::{Kind, Target};
use crate::store::counters::Truth;
use crate::vitals::vitals;

/// Buckets whose fields are listed at once: about 16,000 ids.
const LISTED_BUCKETS: usize = 128;

/// Targets that MySQL is asked about at once, of those that a search of all keys finds.
const SCANNED_TARGETS: usize = 10_000;

impl Run<'_> {
    /// Searches the buckets in which another number of targets count than the samples of all known targets have found there: one
    /// that has lost as many as it has too many is not searched, and waits for the next scrub or full run.
    pub(super) async fn compare_phantoms(&mut self, name: &str, kind: Kind) -> Result<()> {
        if !self.on.cache.is_packed() {
            return self.compare_phantom_keys(name, kind).await;
        }
        let (began, all) = (Instant::now(), 0..self.on.cache.keys.buckets());
        let is_only = self.on.metrics.0.len() == 1;
        let mut counts = Vec::new();
        if is_only || self.is_like() {
            let sizes = self.on.cache.bucket_sizes(name, all.clone()).await?;
            self.warn_of_full_buckets(name, sizes.iter().map(|size| size.fields).max().unwrap_or(0)).await;
            counts = sizes.iter().map(|size| (size.bucket, size.targets)).collect();
        }
        if !is_only {
            // A target has a field for all of its numbers.
            counts = self.on.cache.count_numbers(name, self.metric, all).await?;
        }
        Steps::add(&mut self.report.steps_ms.phantoms, began.elapsed());
        let seen = std::mem::take(&mut self.counted_seen);
        let more = |(bucket, count): &(u32, u64)| *count != u64::from(seen.get(bucket).copied().unwrap_or(0));
        let suspects = counts.into_iter().filter(more).map(|(bucket, _)| bucket).collect::<Vec<_>>();
        self.compare_phantoms_in(name, kind, &suspects).await
    }

    /// Searches all keys, where each target or number has one.
    async fn compare_phantom_keys(&mut self, name: &str, kind: Kind) -> Result<()> {
        let (mut phantoms, mut next) = (Vec::new(), Some("0".to_owned()));
        let mut targets = Vec::new();
        while let Some(from) = next
            && !self.is_over()
        {
            let began = Instant::now();
            let (found, to) = self.on.cache.scan_targets((name, kind), self.metric, &from).await?;
            next = to;
            targets.extend(found);
            if targets.len() >= SCANNED_TARGETS || next.is_none() {
                targets.sort_unstable();
                targets.dedup();
                let unknown = self.unknown_to_mysql(std::mem::take(&mut targets)).await?;
                // A key stays when its number is repaired to zero.
                let samples = self.on.cache.sample(&self.on.names, self.metric, &unknown).await?;
                let counts = |(target, sample): (Target, Option<Sample>)| {
                    Some(target).filter(|_| sample.is_some_and(|it| it.value != 0))
                };
                phantoms.extend(unknown.into_iter().zip(samples).filter_map(counts));
            }
            Steps::add(&mut self.report.steps_ms.phantoms, began.elapsed());
            if phantoms.len() >= self.pace.page() {
                self.compare_found(&mut phantoms).await?;
            }
        }
        self.compare_found(&mut phantoms).await
    }

    /// Searches `buckets`, whatever is known of them. Other layouts have no numbers there: a full run searches their keys.
    pub(super) async fn compare_phantoms_of(&mut self, name: &str, kind: Kind, buckets: Range<u32>) -> Result<()> {
        if !self.on.cache.is_packed() {
            return Ok(());
        }
        self.compare_phantoms_in(name, kind, &buckets.collect::<Vec<_>>()).await
    }

    async fn compare_phantoms_in(&mut self, name: &str, kind: Kind, buckets: &[u32]) -> Result<()> {
        let mut phantoms = Vec::new();
        for some in buckets.chunks(LISTED_BUCKETS) {
            if self.is_over() {
                break;
            }
            let began = Instant::now();
            let targets = self.on.cache.targets_in((name, kind), self.metric, some).await?;
            phantoms.extend(self.unknown_to_mysql(targets).await?);
            Steps::add(&mut self.report.steps_ms.phantoms, began.elapsed());
            if phantoms.len() >= self.pace.page() {
                self.compare_found(&mut phantoms).await?;
            }
        }
        self.compare_found(&mut phantoms).await
    }

    /// Past the server's limit a bucket takes ten times the room: said before it is reached.
    async fn warn_of_full_buckets(&self, kind: &str, most: u64) {
        vitals().bucket_fields(kind, most);
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

    async fn compare_found(&mut self, phantoms: &mut Vec<Target>) -> Result<()> {
        phantoms.sort_unstable();
        phantoms.dedup();
        self.report.phantoms += phantoms.len() as u64;
        self.compare_these(&std::mem::take(phantoms)).await
    }

    /// Those of `targets`, sorted by key, that have neither a counter nor a like record.
    async fn unknown_to_mysql(&self, mut targets: Vec<Target>) -> Result<Vec<Target>> {
        // Counters first: they are few point reads each, and nearly every target has one.
        for recount in [false, true].into_iter().filter(|recount| !recount || self.is_like()) {
            let truths = self.on.store.truths(self.metric, &targets, recount).await?;
            let is_known = |truth: &Truth| truth.update_at.is_some() || truth.rows.unwrap_or(0) > 0;
            targets.retain(|target| !truths.get(target).is_some_and(is_known));
        }
        Ok(targets)
    }
}
