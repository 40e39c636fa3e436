//! What Redis has lost, wholly or in part (a flush, an empty replica promoted, an evicted bucket): loaded again from
//! `counter`, while likes go on.
//!
//! A bucket without its field `_` is unknown, not zero. One script marks it as being loaded and gives what it holds at
//! that instant: its cut. After a fence, each counter that nothing newer was applied to is its value as of the cut, and
//! the difference to what the bucket held is added; what was counted meanwhile stays. The others are watched, as in any
//! comparison. Only then is the bucket said to be loaded, and only if its mark is still there.
//!
//! Likes whose publish came later than the fence are missing in what was loaded. The comparison that follows finds
//! them: their `at` is within `overlap`.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use anyhow::Result;
use tracing::{info, warn};

use super::drift::Verdict;
use super::look::Looks;
use super::page::WATCHED_MAX;
use super::report::{LISTED_MAX, Steps};
use super::{JOB, Mode, Run};
use crate::cache::counters::{CALL_IDS_MAX, Repair, Repaired};
use crate::cache::layout::Loaded;
use crate::cache::load::{Lost, Unloaded};
use crate::config::{Ruled, Writes};
use crate::model::{Kind, Metric, Micros, Target, TargetId};
use crate::runtime::fault;

/// Counters that are read and added at once: 8,192 buckets get some 12 of them each.
const PAGE_COUNTERS: usize = 100_000;

/// The same where each has a key of its own, and is sampled first.
const PAGE_KEYS: usize = 20_000;

/// Loads of a few buckets that a schedule begins within an hour.
const LOADS_MAX: u64 = 3;

/// Fields that lost buckets hold, which are kept in memory at once.
const FIELDS_MAX: usize = 500_000;

/// The buckets that are being loaded, of one kind.
struct Loading {
    /// By bucket: its cut and its state.
    buckets: HashMap<u32, (Micros, Loaded)>,
    /// What they held at their cuts, where it was not zero.
    held: HashMap<(Target, Metric), i64>,
}

impl Run<'_> {
    /// Loads what is lost; false where nothing was. A dry run loads nothing.
    pub(super) async fn rebuild(&mut self) -> Result<bool> {
        let mut lost = 0;
        for (name, _) in self.kinds() {
            let Unloaded { lost: of_kind, foreign } =
                self.on.cache.unloaded(&name, 0..self.on.cache.keys.buckets()).await?;
            lost += of_kind;
            self.report.foreign.extend(foreign);
        }
        self.report.foreign.truncate(LISTED_MAX);
        if lost == 0 || self.report.dry_run {
            return Ok(false);
        }
        if self.is_too_often(lost).await? {
            return Ok(false);
        }
        self.say_loading(lost);
        let began = Instant::now();
        for (name, kind) in self.kinds() {
            let mut from = 0;
            // Once through: what is lost again meanwhile is the next run's, or a Redis that evicts would keep this one.
            while from < self.on.cache.keys.buckets() && !self.is_over() {
                from = self.load_some(&name, kind, from).await?;
            }
        }
        let (buckets, counters, seconds) =
            (self.report.buckets_loaded, self.report.counters_loaded, began.elapsed().as_secs_f32());
        Steps::add(&mut self.report.steps_ms.rebuild, began.elapsed());
        info!(
            event = "redis-loaded",
            buckets, counters, seconds, "{buckets} buckets with {counters} counters are loaded after {seconds:.1} s"
        );
        Ok(true)
    }

    /// Each load reads all of `counter`. Those of a Redis that evicts buckets would never end.
    async fn is_too_often(&mut self, lost: u64) -> Result<bool> {
        let all = u64::from(self.on.cache.keys.buckets()) * self.kinds().len() as u64;
        let is_scheduled = self.order.wait_max.is_some();
        if !is_scheduled || lost * 10 >= all || self.on.store.loads_of_last_hour(JOB).await? < LOADS_MAX {
            return Ok(false);
        }
        warn!(
            event = "redis-evicts",
            buckets = lost,
            "Redis lost {lost} buckets after {LOADS_MAX} loads within an hour, they are loaded later: set its maxmemory-policy to noeviction"
        );
        if self.order.mode == Mode::Rebuild {
            self.makes_way = Some("Redis loses buckets too often: they are loaded within the hour");
        }
        Ok(true)
    }

    fn say_loading(&self, lost: u64) {
        if self.order.mode == Mode::Layout {
            let layout = self.on.cache.keys.layout().to_string();
            info!(event = "layout-loading", layout, buckets = lost, "loading {lost} buckets of {layout} from MySQL");
        } else {
            warn!(
                event = "redis-lost",
                buckets = lost,
                "Redis lacks {lost} buckets of counters: loading them from MySQL"
            );
        }
    }

    /// Loads buckets of one kind, as many as memory allows; says which bucket is the next.
    async fn load_some(&mut self, name: &str, kind: Kind, from: u32) -> Result<u32> {
        let (cache, metrics) = (&self.on.cache, self.on.metrics.codes());
        // Read before: what is committed by then is loaded, and never added to these buckets, however late it is sent.
        let outbox = self.on.store.outbox_numbers().await?;
        let Lost { buckets, held, next } =
            cache.begin_load((name, kind), &metrics, self.number, from, FIELDS_MAX, &outbox).await?;
        if buckets.is_empty() {
            return Ok(next);
        }
        let loading = Loaded::Loading { generation: self.number, pass: 0 };
        let buckets = buckets.into_iter().map(|(bucket, cut)| (bucket, (cut, loading))).collect();
        let mut loading = Loading { buckets, held };
        if self.on.cache.is_packed() {
            // For all metrics that are counted at once: the cuts are the buckets'.
            self.fence(Duration::ZERO).await?;
        }
        for metric in self.on.metrics.codes() {
            self.metric = metric;
            self.load_metric(kind, &mut loading).await?;
            if self.is_over() {
                return Ok(next);
            }
        }
        fault::point("reconcile:loaded");
        let states = loading.buckets.keys().copied().collect::<Vec<_>>();
        self.report.buckets_loaded += self.on.cache.end_load(name, self.number, &states).await?;
        Ok(next)
    }

    /// Adds what the buckets lacked of one metric.
    async fn load_metric(&mut self, kind: Kind, loading: &mut Loading) -> Result<()> {
        // What the daemon adds is judged by each bucket's marks: so it is sampled page by page, too.
        let busy = if self.on.cache.is_packed() && !self.is_by_daemon(kind) {
            self.load_packed(kind, loading).await?
        } else {
            self.load_keys(kind, loading).await?
        };
        // What MySQL doesn't know at all: likes on the way, or phantoms. Nothing is added; comparisons see to them.
        for some in busy.chunks(WATCHED_MAX) {
            if self.is_over() {
                break;
            }
            self.load_busy(loading, some).await?;
        }
        Ok(())
    }

    /// Adds what the buckets lacked at their cuts. Gives those that are busy.
    async fn load_packed(&mut self, kind: Kind, loading: &mut Loading) -> Result<Vec<Target>> {
        let mut busy = Vec::new();
        let (on, metric, skew) = (self.on, self.metric, self.on.limits.skew());
        let page = |after| on.store.counted_after(kind, metric, after, PAGE_COUNTERS);
        let mut truths = page(TargetId(0)).await?;
        while !self.is_over() {
            let Some((last, ..)) = truths.last() else { break };
            let after = *last;
            let mut repairs = Vec::new();
            for (id, counted, update_at) in truths {
                let target = Target { kind, id };
                let Some((cut, state)) = loading.buckets.get(&self.on.cache.keys.bucket(target)) else { continue };
                let held = loading.held.remove(&(target, metric)).unwrap_or(0);
                if update_at > cut.before(skew) {
                    busy.push(target);
                } else if counted != held {
                    repairs.push(self.adding(target, held, counted - held, *state));
                }
            }
            // The next page is read while this one is added.
            let ((), next) = tokio::try_join!(self.add(loading, &repairs), async { Ok(page(after).await?) })?;
            truths = next;
        }
        Ok(busy)
    }

    /// The same where each target or number has a key of its own: Redis can't list a bucket's, so those that MySQL knows are sampled, page
    /// by page. Gives those that are busy.
    async fn load_keys(&mut self, kind: Kind, loading: &mut Loading) -> Result<Vec<Target>> {
        let mut busy = Vec::new();
        let (on, metric, mut after) = (self.on, self.metric, TargetId(0));
        while !self.is_over() {
            let page = on.store.counted_after(kind, metric, after, PAGE_KEYS).await?;
            let Some((last, ..)) = page.last() else { break };
            after = *last;
            let targets: Vec<Target> = page
                .into_iter()
                .map(|(id, ..)| Target { kind, id })
                .filter(|target| loading.buckets.contains_key(&on.cache.keys.bucket(*target)))
                .collect();
            let Looks { looks, .. } = self.look(&targets, Duration::ZERO).await?;
            let mut repairs = Vec::new();
            for (target, look) in looks {
                match look.verdict {
                    Verdict::Drift(0) => {}
                    Verdict::Drift(drift) => {
                        repairs.push(self.adding(target, look.sample.value, -drift, look.sample.loaded));
                    }
                    Verdict::Busy => busy.push(target),
                }
            }
            self.add(loading, &repairs).await?;
        }
        Ok(busy)
    }

    /// Counters that are written while they are loaded.
    async fn load_busy(&mut self, loading: &mut Loading, targets: &[Target]) -> Result<()> {
        // Where a producer's clock leaves it open which was first, what it says is taken: a comparison will mend it.
        let looks = self.look_watched(targets, Duration::ZERO, Duration::ZERO).await?;
        let repairs: Vec<Repair> = looks
            .iter()
            .filter_map(|(target, look)| match look.verdict {
                Verdict::Drift(drift) if drift != 0 => {
                    Some(self.adding(*target, look.sample.value, -drift, look.sample.loaded))
                }
                _ => None,
            })
            .collect();
        // Of these nobody can say what they were: their buckets stay unknown, until the next run.
        for (target, _) in looks.iter().filter(|(_, look)| look.verdict == Verdict::Busy) {
            loading.buckets.remove(&self.on.cache.keys.bucket(*target));
        }
        self.add(loading, &repairs).await
    }

    /// Adds to buckets that are being loaded. One that was flushed again meanwhile is left to the next run.
    async fn add(&mut self, loading: &mut Loading, repairs: &[Repair]) -> Result<()> {
        let mut left = repairs.to_vec();
        while !left.is_empty() {
            // As many of each bucket as one call takes; the others with its next state.
            let mut calls: HashMap<u32, usize> = HashMap::new();
            let (now, later): (Vec<Repair>, Vec<Repair>) = left.into_iter().partition(|repair| {
                let of_bucket = calls.entry(self.on.cache.keys.bucket(repair.target)).or_default();
                *of_bucket += 1;
                *of_bucket <= CALL_IDS_MAX
            });
            self.add_once(loading, &now).await?;
            let next = |repair: Repair| {
                let (_, loaded) = loading.buckets.get(&self.on.cache.keys.bucket(repair.target))?;
                Some(Repair { loaded: *loaded, ..repair })
            };
            left = later.into_iter().filter_map(next).collect();
        }
        Ok(())
    }

    async fn add_once(&mut self, loading: &mut Loading, repairs: &[Repair]) -> Result<()> {
        let pass = self.next_number();
        fault::point("reconcile:loading");
        let keys = &self.on.cache.keys;
        for (target, repaired) in self.on.cache.repair(&self.on.names, self.metric, pass, repairs).await? {
            let bucket = keys.bucket(target);
            match repaired {
                Repaired::Done | Repaired::BelowZero => {
                    self.report.counters_loaded += 1;
                    if let Some((_, state)) = loading.buckets.get_mut(&bucket) {
                        *state = state.repaired(pass);
                    }
                }
                Repaired::Stale => {
                    loading.buckets.remove(&bucket);
                }
            }
        }
        Ok(())
    }

    /// The kinds in the order of their codes.
    pub(super) fn kinds(&self) -> Vec<(String, Kind)> {
        let mut kinds: Vec<(String, Kind)> =
            self.on.kinds.0.iter().map(|(name, code)| (name.clone(), Kind(*code))).collect();
        kinds.sort_unstable_by_key(|(_, kind)| *kind);
        kinds
    }

    /// What is added to a number of the metric in hand, which was `sampled`. It may pass below zero where the daemon counts it, because events
    /// come in another order than they happened, and where MySQL has it there. Otherwise it would only by what was taken away since: measure again.
    /// No deadline: a run that takes a load over changes the state of its buckets.
    pub(super) fn adding(&self, target: Target, sampled: i64, delta: i64, loaded: Loaded) -> Repair {
        let Ruled { writer, below_zero, .. } = self.on.rules.of(target.kind, self.metric);
        // Of likes there are never less than none: where `counter` says so, it is wrong.
        let is_below = !self.is_like() && sampled.saturating_add(delta) < 0;
        let below_zero = below_zero || writer == Writes::Daemon || is_below;
        Repair { target, delta, below_zero, not_set_since: None, loaded, until: Micros::MAX }
    }

    /// Each kind's metrics, in the order of their codes.
    pub(super) fn numbers(&self) -> Vec<(String, Kind, Metric)> {
        let metrics = self.on.metrics.codes();
        let of_kind = |(name, kind): (String, Kind)| {
            metrics.iter().map(|metric| (name.clone(), kind, *metric)).collect::<Vec<_>>()
        };
        self.kinds().into_iter().flat_map(of_kind).collect()
    }
}
