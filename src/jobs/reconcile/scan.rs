//! Which targets a run looks at, page by page, and how far it has come.

use std::collections::BTreeSet;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use tracing::info;

use super::page::SUSPECTS_MAX;
use super::range::read_range;
use super::report::Steps;
use super::{JOB, Mode, Run};
use crate::model::{CounterKey, Kind, Micros, Target, TargetId};
use crate::runtime::fault;
use crate::store::changed::ChangedBefore;
use crate::store::ranges::Range;

/// How long counters are suspects at most before a full run measures them again: what it may have to do twice.
const RECHECK_EVERY: Duration = Duration::from_secs(60);

/// Targets that one run looks at first, because they were kept for it.
const SEEN_MAX: usize = 5_000;

/// How far a full run has come: the kind's targets are compared up to this one, and all kinds before it, with their orphans.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Checkpoint {
    /// The layout that is compared.
    layout: String,
    /// Whether nothing was off, from the first target on.
    clean: bool,
    /// When the run began that went from the first target on, by Redis' clock.
    began: i64,
    kind: u8,
    target_id: u64,
}

impl Run<'_> {
    pub(super) async fn compare_all(&mut self) -> Result<()> {
        self.check_layouts().await?;
        if let Mode::Targets(targets) = &self.options.mode {
            let targets: BTreeSet<Target> = targets.iter().copied().collect();
            self.listed = targets.len() as u64;
            self.report.in_flight = Some(self.fences.waiting().await?);
            return self.compare_these(&self.numbers(targets)).await;
        }
        self.unload_stale().await?;
        self.load_lost().await?;
        // Before the first fence, which has less patience.
        self.wait().await?;
        match self.options.mode {
            Mode::Full | Mode::Layout => self.compare_full().await,
            Mode::Scrub => self.compare_slice().await,
            _ => self.compare_changed().await,
        }
    }

    /// Compares `numbers`, sorted by key, to the end.
    pub(super) async fn compare_these(&mut self, numbers: &[CounterKey]) -> Result<()> {
        let mut rest = numbers;
        while !rest.is_empty() && !self.is_over() {
            let (page, after) = rest.split_at(rest.len().min(self.throttle.page()));
            self.compare_paced(page).await?;
            rest = after;
        }
        self.recheck().await
    }

    /// Compares what changed from the last run's cut until now, by Redis' clock; what was kept for this run comes first.
    async fn compare_changed(&mut self) -> Result<()> {
        let until = self.fenced_now().await?;
        let from = self.compared_until(until).await?;
        let start = from.before(self.on.limits.overlap.0).max(Micros(0));
        let total = self.on.store.count_changed(start).await?;
        self.progress.send_modify(|progress| progress.total = Some(total));
        let seen = self.compare_changed_since(start).await?;
        let complete = self.is_complete();
        self.report.cut = Some(if complete { until.0 } else { from.0 });
        if complete && !self.report.dry_run {
            self.on.store.forget_drift_seen(&seen).await?;
            self.note_compared(until).await?;
        }
        Ok(())
    }

    /// Up to where everything has been compared. Redis keeps a note of it beside MySQL's, which goes back in time with its counters.
    async fn compared_until(&self, now: Micros) -> Result<Micros> {
        let layout = self.on.cache.keys.layout().full_name();
        let by_mysql = self.on.store.last_cut(JOB, &layout, now).await?.unwrap_or(Micros(0));
        let by_redis = match self.on.cache.compared().await? {
            Some(noted) => noted,
            // The note was lost with buckets that are loaded now, or unknown.
            None if self.report.buckets_loaded > 0 || self.report.dry_run => by_mysql,
            None => Micros(0),
        };
        Ok(by_mysql.min(by_redis))
    }

    /// Notes in Redis what it has been compared up to, if it has all the time been the same.
    async fn note_compared(&self, cut: Micros) -> Result<()> {
        self.check_data_set().await?;
        self.on.cache.note_compared(cut).await.context("note the cut in Redis")
    }

    /// Compares what changed, after what was kept for this run; gives the latter.
    async fn compare_changed_since(&mut self, start: Micros) -> Result<Vec<(CounterKey, Micros)>> {
        let seen = self.on.store.drift_seen(SEEN_MAX).await?;
        let first: Vec<CounterKey> = seen.iter().map(|(number, _)| *number).collect();
        // Not rechecked by themselves: what is off of them is few of all that is compared, or too much.
        for page in first.chunks(self.throttle.page()) {
            if self.is_over() {
                break;
            }
            self.compare_paced(page).await?;
        }
        let mut before = ChangedBefore::NEWEST;
        while !self.is_over() {
            let (limit, began) = (self.throttle.page(), Instant::now());
            let rows = self.on.store.changed_numbers(start, before, limit).await?;
            Steps::add(&mut self.report.steps_ms.list, began.elapsed());
            self.listed += rows.len() as u64;
            let numbers: BTreeSet<CounterKey> =
                rows.iter().map(|row| row.number).filter(|it| first.binary_search(it).is_err()).collect();
            self.compare_paced(&numbers.into_iter().collect::<Vec<_>>()).await?;
            let Some(last) = rows.last().filter(|_| rows.len() == limit) else { break };
            before = *last;
        }
        self.recheck().await?;
        Ok(seen)
    }

    /// Compares every target that MySQL or Redis knows.
    async fn compare_full(&mut self) -> Result<()> {
        let resumed = self.resumed().await?;
        // What a resumed run loads was compared before it was lost.
        self.report.clean =
            resumed.as_ref().is_none_or(|checkpoint| checkpoint.clean && self.report.buckets_loaded == 0);
        let layout = self.on.cache.keys.layout().full_name();
        let began = match &resumed {
            Some(checkpoint) => Micros(checkpoint.began),
            None => self.fenced_now().await?,
        };
        // For the bar alone. Of what is left of a run nobody knows it.
        let total = self.on.store.estimate_counters().await.ok().filter(|_| resumed.is_none());
        self.progress.send_modify(|progress| progress.total = total);
        for (name, kind) in self.kinds() {
            let after = match &resumed {
                Some(checkpoint) if checkpoint.kind == kind.0 => TargetId(checkpoint.target_id),
                Some(checkpoint) if checkpoint.kind > kind.0 => continue,
                _ => TargetId(0),
            };
            if self.is_over() {
                break;
            }
            self.counted_seen =
                if self.on.cache.is_packed() { vec![0; self.on.cache.keys.buckets() as usize] } else { Vec::new() };
            self.compare_known(kind, after, |after, clean| {
                let (layout, kind) = (layout.clone(), kind.0);
                serde_json::to_string(&Checkpoint { layout, clean, began: began.0, kind, target_id: after.0 })
            })
            .await?;
            if self.is_over() {
                break;
            }
            self.compare_orphans(&name, kind).await?;
        }
        // What was not looked at is looked at again by the next changed run if this one says nothing.
        if self.options.mode == Mode::Full && self.is_complete() {
            self.report.cut = Some(began.0);
            // What another run has compared can have gone back since.
            if resumed.is_none() && !self.report.dry_run {
                self.note_compared(began).await?;
            }
        }
        Ok(())
    }

    /// An instant, by Redis' clock: every event that is not newer is in MySQL. Those of the last `publish_grace` may not
    /// even be published.
    async fn fenced_now(&mut self) -> Result<Micros> {
        let now = self.now().await?;
        self.fence(Duration::ZERO).await?;
        Ok(now.before(self.on.limits.publish_grace.0))
    }

    /// Where to go on; none from the first target on.
    async fn resumed(&mut self) -> Result<Option<Checkpoint>> {
        if !self.options.resume {
            return Ok(None);
        }
        let mode = self.options.mode.name();
        let Some((run, text)) = self.on.store.last_checkpoint(JOB, mode, self.number, true).await? else {
            return Ok(None);
        };
        let checkpoint: Checkpoint = serde_json::from_str(&text).context("read how far the last run came")?;
        if checkpoint.layout != self.on.cache.keys.layout().full_name() {
            return Ok(None);
        }
        let (kind, target_id) = (self.on.kinds.name(Kind(checkpoint.kind)), checkpoint.target_id);
        info!(
            event = "reconcile-resumed",
            run, kind, target_id, "going on after {kind}:{target_id}, where run {run} ended"
        );
        self.report.resumed_run = Some(run);
        Ok(Some(checkpoint))
    }

    /// Compares the kind's targets after `after`, until the end of the kind or of the slice. `checkpoint` writes how far it
    /// has come.
    pub(super) async fn compare_known(
        &mut self,
        kind: Kind,
        after: TargetId,
        checkpoint: impl Fn(TargetId, bool) -> serde_json::Result<String>,
    ) -> Result<()> {
        let mut rechecked = Instant::now();
        let mut reached = after;
        let mut next = self.sample_range(kind, after).await?;
        while let Some(sampled) = next {
            let (on, rows, sampling) = (self.on, sampled.rows, sampled.took);
            let (after, place) = (sampled.range.until, sampled.range.counters.last().map(|last| last.number.0));
            let ((recount, took), following) =
                tokio::try_join!(read_range(on, &sampled), self.sample_range(kind, after))?;
            Steps::add(&mut self.report.steps_ms.read, took);
            match recount {
                Some(recount) => self.judge_range(sampled, recount).await?,
                None => {
                    self.compare_uncounted(&sampled.range).await?;
                    if self.is_over() {
                        break;
                    }
                }
            }
            fault::point("reconcile:compared");
            self.throttle.note(&self.on.limits, usize::try_from(rows).unwrap_or(usize::MAX), took.max(sampling));
            reached = after;
            self.show(place);
            if self.suspects.len() >= SUSPECTS_MAX || rechecked.elapsed() > RECHECK_EVERY {
                self.recheck().await?;
                rechecked = Instant::now();
            }
            self.note_checkpoint(&checkpoint(reached, self.report.is_clean())?).await?;
            next = following;
        }
        self.recheck().await?;
        self.reached = Target { kind, id: reached };
        self.note_checkpoint(&checkpoint(reached, self.report.is_clean())?).await
    }

    /// Whether all was looked at, or is noted for the next run.
    fn is_complete(&self) -> bool {
        self.all_kept && !self.cut_short.load(Ordering::Relaxed)
    }

    /// Only where nothing before it is suspect. A dry run leaves none: what it has seen was not repaired.
    pub(super) async fn note_checkpoint(&self, text: &str) -> Result<()> {
        if !self.suspects.is_empty() || self.report.dry_run {
            return Ok(());
        }
        Ok(self.on.store.note_checkpoint(self.number, text).await?)
    }

    /// Compares a range in which `counter` lacks many targets, which it gets by this.
    async fn compare_uncounted(&mut self, range: &Range) -> Result<()> {
        let (kind, mut after, until, mut ended) = (range.kind, range.after, range.until, false);
        let like = self.on.metrics.like();
        let mut without: BTreeSet<CounterKey> = range.counters.iter().map(|counted| counted.number).collect();
        while !ended && !self.is_over() {
            let limit = self.throttle.page().min(SUSPECTS_MAX);
            let liked = self.on.store.liked_targets(kind, after, until, limit).await?;
            ended = liked.len() < limit;
            after = liked.last().copied().unwrap_or(after);
            let numbers: Vec<CounterKey> = liked.into_iter().map(|id| (Target { kind, id }, like)).collect();
            without.retain(|number| numbers.binary_search(number).is_err());
            self.compare_paced(&numbers).await?;
        }
        // Those that have a counter, but no like records.
        self.compare_these(&without.into_iter().collect::<Vec<_>>()).await
    }

    /// Compares one page when the servers have time for it.
    async fn compare_paced(&mut self, page: &[CounterKey]) -> Result<()> {
        // Somebody waits for an answer about a few targets.
        if !self.report.lists_all {
            self.wait().await?;
        }
        if self.is_over() {
            return Ok(());
        }
        let began = Instant::now();
        self.compare(page).await?;
        fault::point("reconcile:compared");
        self.throttle.note(&self.on.limits, page.len(), began.elapsed());
        self.show(page.last().map(|(target, _)| *target));
        if self.suspects.len() >= SUSPECTS_MAX {
            self.recheck().await?;
        }
        Ok(())
    }

    /// Waits until the servers have time for a page, but not for ever where the run has others behind it.
    pub(super) async fn wait(&mut self) -> Result<()> {
        if self.gave_up {
            return Ok(());
        }
        let over = self.options.run_time_max.map(|max| self.began + max);
        let patience = self.options.wait_max.map(|max| Instant::now() + max);
        let until = over.into_iter().chain(patience).min();
        let progress = &self.progress;
        let show = |reason: Option<&str>| {
            progress.send_modify(|progress| progress.waiting = reason.map(str::to_owned));
        };
        self.throttle.wait(self.on, &self.fences.publisher, self.stop, until, show).await?;
        self.gave_up = patience.is_some_and(|patience| Instant::now() > patience);
        Ok(())
    }
}
