//! A full run's first measurement, by ranges of ids: one scan of all metrics instead of many point reads. Nearly every number is right, and
//! cleared by it; the others become suspects.
//!
//! While MySQL recounts one page, the next one is listed, sampled and fenced. Counters and like records are read in one snapshot, so where they
//! differ a hand or a bug was at it.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use anyhow::Result;

use super::drift::Verdict;
use super::measure::is_known;
use super::outbox_lag::OutboxLag;
use super::report::Steps;
use super::{Reconciler, Run};
use crate::cache::counters::Sample;
use crate::cache::layout::Loaded;
use crate::model::{CounterKey, Kind, Target, TargetId};
use crate::outbox_offsets::OutboxOffsets;
use crate::runtime::fault;
use crate::store::counters::Truth;
use crate::store::ranges::{Counted, LAST, Range, Recount};

/// Likes that a page of several targets has at most: each is a row to recount, and no snapshot shall last long.
const LIKES_MAX: i64 = 5_000_000;

/// A page that waits to be read: its sample is taken, and its fence committed.
pub(super) struct Sampled {
    pub range: Range,
    /// How many rows were listed.
    pub rows: u64,
    /// How long listing, sampling and fencing took.
    pub took: Duration,
    /// Of what the daemon adds to Redis: up to which rows that was done before the sample.
    applied: Option<OutboxOffsets>,
    samples: Vec<Option<Sample>>,
}

impl Run<'_> {
    /// Lists, samples and fences the page that follows `after`. None at the end of the kind or the slice, or when the run
    /// is over.
    pub(super) async fn sample_range(&mut self, kind: Kind, after: TargetId) -> Result<Option<Sampled>> {
        if after >= LAST || self.slice_left == 0 {
            return Ok(None);
        }
        self.wait().await?;
        if self.is_over() {
            return Ok(None);
        }
        let limit = self.throttle.page().min(usize::try_from(self.slice_left).unwrap_or(usize::MAX));
        let page_began = Instant::now();
        let mut range = self.on.store.list_range(kind, after, limit).await?;
        range.limit_likes(self.on.metrics.like(), LIKES_MAX);
        Steps::add(&mut self.report.steps_ms.list, page_began.elapsed());
        let (began, rows) = (Instant::now(), range.rows());
        self.slice_left = self.slice_left.saturating_sub(rows);
        self.listed += rows;
        let numbers: Vec<CounterKey> = range.counters.iter().map(|counted| counted.number).collect();
        let applied = self.applied(numbers.iter().any(|number| self.is_by_daemon(*number))).await?;
        let samples = self.on.cache.sample(&self.on.names, &numbers).await?;
        Steps::add(&mut self.report.steps_ms.sample, began.elapsed());
        fault::point("reconcile:sampled");
        if numbers.iter().any(|number| !self.is_by_daemon(*number)) {
            self.fence(Duration::ZERO).await?;
        }
        Ok(Some(Sampled { range, rows, took: page_began.elapsed(), applied, samples }))
    }

    /// Judges a page by what was read of it.
    pub(super) async fn judge_range(&mut self, sampled: Sampled, recount: Recount) -> Result<()> {
        let Sampled { range, samples, applied, .. } = sampled;
        let (kind, like) = (range.kind, self.on.metrics.like());
        let lag = OutboxLag::new(recount.since, applied.unwrap_or_default());
        let truth = |counted: &Counted| Truth {
            counted: counted.value,
            rows: (counted.number.1 == like).then_some(0),
            update_at: Some(counted.update_at),
        };
        let mut truths: HashMap<CounterKey, Truth> =
            recount.counters.iter().map(|counted| (counted.number, truth(counted))).collect();
        for (id, liked) in recount.likes {
            truths.entry((Target { kind, id }, like)).or_default().rows = Some(liked);
        }
        // What the list lacks was new or had no counter: the next measurement decides.
        let is_listed = |number: &CounterKey| range.counters.binary_search_by_key(number, |it| it.number).is_ok();
        let unlisted: Vec<CounterKey> = truths.keys().copied().filter(|number| !is_listed(number)).collect();
        self.report.checked += (range.counters.len() + unlisted.len()) as u64;
        self.correct_counters(&truths).await?;
        for number in unlisted {
            self.suspect(number, None);
        }
        for (Counted { number, .. }, sample) in range.counters.iter().zip(samples) {
            if sample.as_ref().is_some_and(|sample| sample.loaded == Loaded::No) && self.options.gives_way() {
                self.makes_way = Some("Redis lost counters: they are loaded first, then it resumes");
            }
            let Some(sample) = sample.filter(|sample| is_known(sample, self.number)) else {
                self.note_unknown([number].into_iter());
                continue;
            };
            if sample.value != 0 {
                self.note_seen(number.0);
            }
            match self.judge(*number, &sample, truths.get(number).copied(), &lag) {
                Verdict::Busy => self.suspect(*number, None),
                Verdict::Drift(0) => self.report.exact += 1,
                Verdict::Drift(drift) => self.suspect(*number, Some(drift)),
            }
        }
        Ok(())
    }
}

/// Reads a sampled page. None where it has too many targets without a counter. How long that took, too.
pub(super) async fn read_range(on: &Reconciler, sampled: &Sampled) -> Result<(Option<Recount>, Duration)> {
    let began = Instant::now();
    let recount = on.store.recount_range(&sampled.range, sampled.applied.as_ref()).await?;
    Ok((recount, began.elapsed()))
}
