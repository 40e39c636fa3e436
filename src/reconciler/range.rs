//! A full run's first look, by ranges of ids: one scan instead of many point reads. Nearly every target is right, and
//! cleared by it; the others become pending.
//!
//! While MySQL recounts one page, the next one is listed, sampled and fenced. What the list says of a counter is from
//! before the page's sample; a counter that has changed since differs from its rows, or is newer than the cut, and is
//! looked at again.

use std::time::{Duration, Instant};

use anyhow::Result;

use super::drift::{Verdict, judge, judge_waiting};
use super::look::is_known;
use super::page::Doubt;
use super::report::Steps;
use super::waiting::Waiting;
use super::{Mode, Reconciler, Run};
use crate::cache::counters::Sample;
use crate::cache::layout::Loaded;
use crate::marks::Marks;
use crate::model::{Kind, Metric, Target, TargetId};
use crate::runtime::fault;
use crate::store::counters::Truth;
use crate::store::ranges::{LAST, Range, Recount};

/// A page that waits to be read: its sample is taken, and its fence committed.
pub(super) struct Sampled {
    pub range: Range,
    /// How long listing, sampling and fencing took.
    pub took: Duration,
    /// Of what the daemon adds to Redis: up to which rows that was done before the sample.
    applied: Option<Marks>,
    samples: Vec<Option<Sample>>,
}

impl<'a> Run<'a> {
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
        let limit = self.pace.page().min(usize::try_from(self.slice_left).unwrap_or(usize::MAX));
        let page_began = Instant::now();
        let began = page_began;
        let range = self.on.store.list_range(kind, self.metric, after, limit).await?;
        Steps::add(&mut self.report.steps_ms.list, began.elapsed());
        self.slice_left = self.slice_left.saturating_sub(range.rows);
        self.listed += range.rows;
        let began = Instant::now();
        let applied = self.applied(self.is_by_daemon(kind)).await?;
        let samples = self.on.cache.sample(&self.on.names, self.metric, &range.targets).await?;
        Steps::add(&mut self.report.steps_ms.sample, began.elapsed());
        fault::point("reconcile:sampled");
        if applied.is_none() {
            self.fence(Duration::ZERO).await?;
        }
        Ok(Some(Sampled { range, took: page_began.elapsed(), applied, samples }))
    }

    /// What the page in hand is read with, while the next one is sampled.
    pub(super) fn reading(&self) -> Reading<'a> {
        Reading { on: self.on, metric: self.metric, is_like: self.is_like() }
    }

    /// Judges a page by what was read of it.
    pub(super) fn judge_range(&mut self, sampled: Sampled, recount: Recount) {
        let Sampled { range, samples, applied, .. } = sampled;
        let waiting = applied.map(|applied| Waiting::new(recount.since, applied));
        let (skew, is_like) = (self.on.limits.skew(), self.is_like());
        self.report.checked += range.targets.len() as u64;
        let mut rows = recount.rows.into_iter().peekable();
        let mut changed = recount.changed.into_iter().peekable();
        for ((target, counted), sample) in range.targets.iter().zip(&range.counted).zip(samples) {
            while let Some((id, _)) = rows.next_if(|(id, _)| *id < target.id) {
                self.note_uncounted(Target { kind: range.kind, id });
            }
            let liked = rows.next_if(|(id, _)| *id == target.id).map_or(0, |(_, liked)| liked);
            while changed.next_if(|(id, _)| *id < target.id).is_some() {}
            let update_at = changed.next_if(|(id, _)| *id == target.id).map(|(_, update_at)| update_at);
            if sample.as_ref().is_some_and(|sample| sample.loaded == Loaded::No) && self.order.gives_way() {
                self.makes_way = Some("Redis lost counters: they are loaded first, then it resumes");
            }
            let Some(sample) = sample.filter(|sample| is_known(sample, self.number)) else {
                self.note_unknown([target].into_iter());
                continue;
            };
            if sample.value != 0 && matches!(self.order.mode, Mode::Full | Mode::Layout) {
                *self.counted_seen.entry(self.on.cache.keys.bucket(*target)).or_default() += 1;
            }
            let truth = Truth { counted: liked, rows: None, update_at };
            let verdict = match &waiting {
                Some(waiting) => judge_waiting(&sample, Some(truth), waiting.of(*target, &sample.marks)),
                None => judge(&sample, Some(&truth), skew),
            };
            match verdict {
                Verdict::Busy => self.doubt(*target, Doubt::default()),
                _ if is_like && liked != *counted => self.doubt(*target, Doubt::default()),
                Verdict::Drift(0) => self.report.exact += 1,
                Verdict::Drift(drift) => self.doubt(*target, Doubt { drift: Some(drift), told: false }),
            }
        }
        for (id, _) in rows {
            self.note_uncounted(Target { kind: range.kind, id });
        }
    }

    /// Like records without a counter: the next look gives it one.
    fn note_uncounted(&mut self, target: Target) {
        self.report.checked += 1;
        self.doubt(target, Doubt::default());
    }
}

/// What a page is read with.
pub(super) struct Reading<'a> {
    on: &'a Reconciler,
    metric: Metric,
    is_like: bool,
}

/// Reads a sampled page. None where it has too many targets without a counter. Milliseconds that it took, too.
pub(super) async fn read_range(reading: Reading<'_>, sampled: &Sampled) -> Result<(Option<Recount>, Duration)> {
    let Reading { on, metric, is_like } = reading;
    let began = Instant::now();
    let first_cut = sampled.samples.iter().flatten().map(|sample| sample.cut).min();
    let since = first_cut.map(|cut| cut.before(on.limits.skew()));
    let recount = if is_like {
        on.store.recount_range(metric, &sampled.range, since).await?
    } else {
        Some(on.store.count_range(metric, &sampled.range, since, sampled.applied.as_ref()).await?)
    };
    Ok((recount, began.elapsed()))
}
