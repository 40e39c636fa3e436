//! Which targets a run looks at, page by page, and how far it has come.

use std::collections::BTreeSet;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use tracing::info;

use super::page::PENDING_MAX;
use super::{JOB, Mode, Run};
use crate::model::{Kind, Micros, Target, TargetId};
use crate::store::changed::ChangedBefore;
use crate::store::counters::{Range, Targets, Truth};

/// Buckets whose fields are listed at once: about 16,000 ids.
const LISTED_BUCKETS: usize = 128;

/// The highest id that there may be.
const LAST: TargetId = TargetId(i64::MAX as u64);

/// What became of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Paced {
    Compared,
    /// It is a range with too many targets that `counter` lacks.
    Refused,
    /// The run was over before.
    Over,
}

/// How often it is said how far a full run has come.
const SAY_EVERY: Duration = Duration::from_secs(30);

/// How long targets are pending at most before a full run looks at them again: what it may have to do twice.
const SETTLE_EVERY: Duration = Duration::from_secs(60);

/// How far a full run has come: all targets up to this one, and the phantoms of the kinds before its own, are compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Checkpoint {
    /// When the run began that went from the first target on, by Redis' clock.
    began: i64,
    kind: u8,
    target_id: u64,
}

impl Run<'_> {
    pub(super) async fn compare_all(&mut self) -> Result<()> {
        if let Mode::Targets(targets) = &self.order.mode {
            let targets: BTreeSet<Target> = targets.iter().copied().collect();
            return self.compare_these(&targets.into_iter().collect::<Vec<_>>()).await;
        }
        self.rebuild().await?;
        let until = self.order.run_time_max.map(|max| self.began + max);
        self.pace.wait(self.on, &self.fences.publisher, self.stop, until).await?;
        match self.order.mode {
            Mode::Full => self.compare_full().await,
            _ => self.compare_changed().await,
        }
    }

    /// Compares `targets`, sorted by key, to the end.
    async fn compare_these(&mut self, targets: &[Target]) -> Result<()> {
        let mut rest = targets;
        while !rest.is_empty() && !self.is_over() {
            let (page, after) = rest.split_at(rest.len().min(self.pace.page()));
            self.compare_paced(Targets::These(page)).await?;
            rest = after;
        }
        self.settle().await
    }

    /// Compares what changed from the last run's cut until now, by Redis' clock.
    async fn compare_changed(&mut self) -> Result<()> {
        let until = self.fenced_now().await?;
        let from = self.on.store.last_cut(JOB).await?.unwrap_or(Micros(0));
        let start = from.before(self.on.limits.overlap.0).max(Micros(0));
        let mut before = ChangedBefore::NEWEST;
        while !self.is_over() {
            let limit = self.pace.page();
            let rows = self.on.store.changed_targets(self.on.metric, start, before, limit).await?;
            let targets: BTreeSet<Target> = rows.iter().map(|row| row.target).collect();
            self.compare_paced(Targets::These(&targets.into_iter().collect::<Vec<_>>())).await?;
            let Some(last) = rows.last().filter(|_| rows.len() == limit) else { break };
            before = *last;
        }
        self.settle().await?;
        // What was left must be looked at again, by the next run of this kind.
        self.report.cut =
            Some(if self.report.left == 0 && !self.cut_short.load(Ordering::Relaxed) { until.0 } else { from.0 });
        Ok(())
    }

    /// Compares every target that MySQL or Redis knows.
    async fn compare_full(&mut self) -> Result<()> {
        let resumed = self.resumed().await?;
        let began = match resumed {
            Some(checkpoint) => Micros(checkpoint.began),
            None => self.fenced_now().await?,
        };
        for (name, kind) in self.kinds() {
            let after = match resumed {
                Some(checkpoint) if checkpoint.kind > kind.0 => continue,
                Some(checkpoint) if checkpoint.kind == kind.0 => TargetId(checkpoint.target_id),
                _ => TargetId(0),
            };
            if self.is_over() {
                break;
            }
            self.fields_seen.clear();
            self.compare_known(kind, after, began).await?;
            if self.is_over() {
                break;
            }
            self.compare_phantoms(&name, kind).await?;
        }
        // What was left, or not looked at, is looked at again by the next changed run if this one says nothing.
        if self.report.left == 0 && !self.cut_short.load(Ordering::Relaxed) {
            self.report.cut = Some(began.0);
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
        if !self.order.resume {
            return Ok(None);
        }
        let Some((run, text)) = self.on.store.last_checkpoint(JOB, Mode::Full.name(), self.number).await? else {
            return Ok(None);
        };
        let checkpoint: Checkpoint = serde_json::from_str(&text).context("read how far the last run came")?;
        let (kind, target_id) = (self.on.kinds.name(Kind(checkpoint.kind)), checkpoint.target_id);
        info!(
            event = "reconcile-resumed",
            run, kind, target_id, "going on after {kind}:{target_id}, where run {run} ended"
        );
        self.report.resumed_run = Some(run);
        Ok(Some(checkpoint))
    }

    async fn compare_known(&mut self, kind: Kind, mut after: TargetId, began: Micros) -> Result<()> {
        let (mut said, mut settled) = (Instant::now(), Instant::now());
        while after < LAST && !self.is_over() {
            let limit = self.pace.page();
            let ids = self.on.store.counted_targets(kind, self.on.metric, after, limit).await?;
            // The last range goes on to the end: there may be like records without a counter.
            let until = ids.last().copied().filter(|_| ids.len() == limit).unwrap_or(LAST);
            let targets = ids.into_iter().map(|id| Target { kind, id }).collect();
            let range = Range { kind, after, until, targets };
            match self.compare_paced(Targets::Range(&range)).await? {
                Paced::Compared => {}
                Paced::Refused => {
                    self.compare_uncounted(&range).await?;
                    if self.is_over() {
                        break;
                    }
                }
                Paced::Over => break,
            }
            after = until;
            if settled.elapsed() > SETTLE_EVERY {
                self.settle().await?;
                settled = Instant::now();
            }
            self.note_checkpoint(kind, after, began).await?;
            if said.elapsed() > SAY_EVERY {
                self.say_progress(kind, after);
                said = Instant::now();
            }
        }
        self.settle().await?;
        self.note_checkpoint(kind, after, began).await
    }

    /// Only where nothing before it is pending. A dry run leaves none: what it has seen was not repaired.
    async fn note_checkpoint(&self, kind: Kind, after: TargetId, began: Micros) -> Result<()> {
        if !self.pending.is_empty() || self.report.dry_run {
            return Ok(());
        }
        let checkpoint = Checkpoint { began: began.0, kind: kind.0, target_id: after.0 };
        let text = serde_json::to_string(&checkpoint).context("write how far the run has come")?;
        Ok(self.on.store.note_checkpoint(self.number, &text).await?)
    }

    fn say_progress(&self, kind: Kind, after: TargetId) {
        let (checked, drifted, pending) = (self.report.checked, self.report.drifted, self.pending.len());
        let per_second = checked as f64 / self.began.elapsed().as_secs_f64();
        let place = self.name(Target { kind, id: after });
        info!(
            event = "reconcile-progress",
            checked,
            drifted,
            pending,
            per_second,
            place,
            "{checked} targets checked, {per_second:.0} a second, {drifted} drifted, {pending} to be looked at again, \
             now after {place}"
        );
    }

    /// What Redis has and MySQL doesn't: likes whose events were lost to the last one. Only buckets that have another number
    /// of fields than the samples of known targets have found in them are searched: one that has lost as many as it has
    /// too many is not, and waits for the next full run.
    async fn compare_phantoms(&mut self, name: &str, kind: Kind) -> Result<()> {
        let sizes = self.on.cache.bucket_sizes(name).await?;
        let seen = std::mem::take(&mut self.fields_seen);
        let more = |(bucket, size): &(u32, u64)| *size != u64::from(seen.get(bucket).copied().unwrap_or(0));
        let suspects: Vec<u32> = sizes.into_iter().filter(more).map(|(bucket, _)| bucket).collect();
        let mut phantoms = Vec::new();
        for some in suspects.chunks(LISTED_BUCKETS) {
            let targets = self.on.cache.targets_in(name, kind, some).await?;
            phantoms.extend(self.unknown_to_mysql(targets).await?);
            if self.is_over() {
                break;
            }
            if phantoms.len() >= self.pace.page() {
                self.compare_found(&mut phantoms).await?;
            }
        }
        self.compare_found(&mut phantoms).await
    }

    async fn compare_found(&mut self, phantoms: &mut Vec<Target>) -> Result<()> {
        phantoms.sort_unstable();
        self.report.phantoms += phantoms.len() as u64;
        self.compare_these(&std::mem::take(phantoms)).await
    }

    /// Those of `targets`, sorted by key, that have neither a counter nor a like record.
    async fn unknown_to_mysql(&self, mut targets: Vec<Target>) -> Result<Vec<Target>> {
        // Counters first: they are few point reads each, and nearly every target has one.
        for recount in [false, true] {
            let truths = self.on.store.truths(self.on.metric, Targets::These(&targets), recount).await?;
            let is_known = |truth: &Truth| truth.update_at.is_some() || truth.rows.unwrap_or(0) > 0;
            targets.retain(|target| !truths.as_ref().and_then(|truths| truths.get(target)).is_some_and(is_known));
        }
        Ok(targets)
    }

    /// Compares a range in which `counter` lacks many targets, which it gets by this.
    async fn compare_uncounted(&mut self, range: &Range) -> Result<()> {
        let (kind, mut after, until, mut ended) = (range.kind, range.after, range.until, false);
        while !ended && !self.is_over() {
            let limit = self.pace.page().min(PENDING_MAX);
            let liked = self.on.store.liked_targets(kind, after, until, limit).await?;
            ended = liked.len() < limit;
            after = liked.last().copied().unwrap_or(after);
            let targets: Vec<Target> = liked.into_iter().map(|id| Target { kind, id }).collect();
            self.compare_paced(Targets::These(&targets)).await?;
        }
        // Those that have a counter, but no like records.
        self.compare_these(&range.targets).await
    }

    /// Compares one page when the servers have time for it.
    async fn compare_paced(&mut self, page: Targets<'_>) -> Result<Paced> {
        let until = self.order.run_time_max.map(|max| self.began + max);
        self.pace.wait(self.on, &self.fences.publisher, self.stop, until).await?;
        if self.is_over() {
            return Ok(Paced::Over);
        }
        let began = Instant::now();
        if !self.compare(page).await? {
            return Ok(Paced::Refused);
        }
        self.pace.note(&self.on.limits, page.all().len(), began.elapsed());
        if self.pending.len() >= PENDING_MAX {
            self.settle().await?;
        }
        Ok(Paced::Compared)
    }
}
