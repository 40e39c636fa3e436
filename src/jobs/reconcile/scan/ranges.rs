//! Compares all counters of a kind, one range of ids after another. While MySQL recounts one range, the next one is
//! listed and sampled, and its fence sent. If MySQL has few other threads, it recounts two ranges in parallel.

use std::collections::{BTreeSet, VecDeque};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use tokio_util::task::AbortOnDropHandle;

use crate::jobs::reconcile::compare::{Comparer, KnownByBucket, SUSPECTS_MAX};
use crate::jobs::reconcile::measure::SampledRange;
use crate::jobs::reconcile::report::Steps;
use tallyd_base::runtime::fault;
use tallyd_core::model::{CounterKey, Kind, Target, TargetId};
use tallyd_mysql::Store;
use tallyd_mysql::ranges::{LAST, Range, Recount};

/// Within one snapshot, MySQL counts one row per like. The limit keeps these snapshots short.
const LIKES_MAX: i64 = 5_000_000;

/// A recheck is followed by a checkpoint, at which a later run resumes.
const RECHECK_EVERY: Duration = Duration::from_secs(60);

pub(super) struct Ranges<'r, 'a> {
    comparer: &'r mut Comparer<'a>,
    slice_left: Option<u64>,
}

struct Listed {
    sampled: SampledRange,
    took: Duration,
}

struct Recounted {
    listed: Listed,
    recount: Option<Recount>,
    took: Duration,
}

impl Listed {
    fn begin_recount(self, store: &Store) -> AbortOnDropHandle<Result<Recounted>> {
        let store = store.clone();
        AbortOnDropHandle::new(tokio::spawn(async move {
            let began = Instant::now();
            let recount = self.sampled.recount(&store).await?;
            Ok(Recounted { listed: self, recount, took: began.elapsed() })
        }))
    }
}

impl<'r, 'a> Ranges<'r, 'a> {
    pub(super) fn all(comparer: &'r mut Comparer<'a>) -> Self {
        Self { comparer, slice_left: None }
    }

    pub(super) fn slice(comparer: &'r mut Comparer<'a>, rows: u64) -> Self {
        Self { comparer, slice_left: Some(rows) }
    }

    pub(super) fn is_at_end(&self) -> bool {
        self.slice_left == Some(0)
    }

    /// Returns the last target. `checkpoint` encodes the run's position, and whether everything was right so far.
    pub(super) async fn compare_kind(
        &mut self,
        kind: Kind,
        after: TargetId,
        known: &mut KnownByBucket,
        checkpoint: impl Fn(TargetId, bool) -> serde_json::Result<String>,
    ) -> Result<TargetId> {
        let run = self.comparer.run;
        let mut rechecked = Instant::now();
        let (mut reached, mut listed_until) = (after, after);
        let mut is_listed = false;
        let mut next: Option<Listed> = None;
        let mut recounts = VecDeque::new();
        loop {
            if next.is_none() && !is_listed {
                next = self.list_and_sample(kind, listed_until).await?;
                match &next {
                    Some(listed) => listed_until = listed.sampled.range.until,
                    None => is_listed = true,
                }
            }
            let has_room = recounts.len() < self.comparer.throttle.parallel_ranges();
            if let Some(listed) = next.take_if(|_| has_room) {
                recounts.push_back(listed.begin_recount(&run.servers.store));
                continue;
            }
            let Some(first) = recounts.pop_front() else { break };
            let recounted = first.await.context("a recount panicked")??;
            recounts.extend(next.take().map(|listed| listed.begin_recount(&run.servers.store)));
            let until = recounted.listed.sampled.range.until;
            if !self.compare_recounted(recounted, known).await? {
                break;
            }
            reached = until;
            if self.comparer.has_many_suspects() || rechecked.elapsed() > RECHECK_EVERY {
                self.comparer.recheck().await?;
                rechecked = Instant::now();
            }
            self.comparer.note_checkpoint(&checkpoint(reached, self.comparer.report.is_clean())?).await?;
        }
        self.comparer.recheck().await?;
        self.comparer.note_checkpoint(&checkpoint(reached, self.comparer.report.is_clean())?).await?;
        Ok(reached)
    }

    async fn compare_recounted(&mut self, recounted: Recounted, known: &mut KnownByBucket) -> Result<bool> {
        let Recounted { listed: Listed { sampled, took: sampling }, recount, took } = recounted;
        let rows = usize::try_from(sampled.range.rows()).unwrap_or(usize::MAX);
        let place = sampled.range.counters.last().map(|last| last.number.0);
        Steps::add(&mut self.comparer.report.steps_ms.read, took);
        match recount {
            Some(recount) => self.comparer.compare_range(sampled, recount, known).await?,
            None => {
                self.compare_uncounted(&sampled.range).await?;
                if self.comparer.run.early_end.is_due() {
                    return Ok(false);
                }
            }
        }
        fault::point("reconcile:compared");
        self.comparer.throttle.note(rows, took.max(sampling));
        self.comparer.show(place);
        Ok(true)
    }

    /// Returns `None` if the kind has no more targets, if the slice is complete, or if the run must end.
    async fn list_and_sample(&mut self, kind: Kind, after: TargetId) -> Result<Option<Listed>> {
        let run = self.comparer.run;
        if after >= LAST || self.is_at_end() {
            return Ok(None);
        }
        self.comparer.wait().await?;
        if run.early_end.is_due() {
            return Ok(None);
        }
        let slice_left = self.slice_left.and_then(|left| usize::try_from(left).ok()).unwrap_or(usize::MAX);
        let limit = self.comparer.throttle.page().min(slice_left);
        let began = Instant::now();
        let mut range = run.servers.store.list_range(kind, after, limit).await?;
        range.limit_likes(run.servers.metrics.like(), LIKES_MAX);
        Steps::add(&mut self.comparer.report.steps_ms.list, began.elapsed());
        let rows = range.rows();
        self.slice_left = self.slice_left.map(|left| left.saturating_sub(rows));
        self.comparer.listed += rows;
        let sampled = self.comparer.measure.sample_range(range).await?;
        Ok(Some(Listed { sampled, took: began.elapsed() }))
    }

    async fn compare_uncounted(&mut self, range: &Range) -> Result<()> {
        let run = self.comparer.run;
        let like = run.servers.metrics.like();
        let mut after = range.after;
        let mut ended = false;
        let mut without: BTreeSet<CounterKey> = range.counters.iter().map(|counted| counted.number).collect();
        while !ended && !run.early_end.is_due() {
            let limit = self.comparer.throttle.page().min(SUSPECTS_MAX);
            let liked = run.servers.store.liked_targets(range.kind, after, range.until, limit).await?;
            ended = liked.len() < limit;
            after = liked.last().copied().unwrap_or(after);
            let key = |id| (Target { kind: range.kind, id }, like);
            let keys: Vec<CounterKey> = liked.into_iter().map(key).collect();
            without.retain(|key| keys.binary_search(key).is_err());
            self.comparer.compare_page(&keys).await?;
        }
        // These targets have a counter, but no like records.
        self.comparer.compare(&without.into_iter().collect::<Vec<_>>()).await
    }
}
