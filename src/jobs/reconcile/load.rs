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

use std::collections::{BTreeMap, HashMap, HashSet};
use std::time::{Duration, Instant};

use anyhow::Result;
use tracing::{info, warn};

use super::drift::Verdict;
use super::measure::Measurement;
use super::page::WATCHED_MAX;
use super::report::{LISTED_MAX, Steps};
use super::{JOB, Mode, Run};
use crate::cache::counters::{CALL_IDS_MAX, Repair, Repaired};
use crate::cache::layout::Loaded;
use crate::cache::load::{Lost, Unloaded};
use crate::config::{Ruled, Writes};
use crate::model::{CounterKey, Kind, Micros, TargetId};
use crate::runtime::fault;
use crate::store::ranges::{LAST, Range};

/// Rows that are read and added at once: 8,192 buckets get some 12 of them each.
const PAGE_ROWS: usize = 100_000;

/// Numbers that are looked at at once, where a page does not tell what their buckets held.
const PAGE_LOOKED: usize = 20_000;

/// Busy numbers that are kept in memory at once.
const BUSY_MAX: usize = 20_000;

/// Loads of a few buckets that a schedule begins within an hour.
const LOADS_MAX: u64 = 3;

/// Fields that lost buckets hold, which are kept in memory at once.
const FIELDS_MAX: usize = 500_000;

/// The buckets that are being loaded, of one kind.
struct Loading {
    /// Which they are, and what they held.
    lost: Lost,
    /// By place in `lost.cuts`: the last repair.
    passes: Vec<u64>,
    /// Who loads them.
    run: u64,
    /// What was written since the buckets' cuts.
    busy: Vec<CounterKey>,
}

impl Loading {
    /// The bucket's cut and state; none where it is not being loaded.
    fn of(&self, bucket: u32) -> Option<(Micros, Loaded)> {
        let place = bucket.checked_sub(self.lost.from)? as usize;
        let cut = (*self.lost.cuts.get(place)?)?;
        Some((Micros(cut.get()), Loaded::Loading { generation: self.run, pass: *self.passes.get(place)? }))
    }

    fn note(&mut self, bucket: u32, pass: u64) {
        if let Some(last) = bucket.checked_sub(self.lost.from).and_then(|place| self.passes.get_mut(place as usize)) {
            *last = pass;
        }
    }

    /// Leaves the bucket as it is.
    fn leave(&mut self, bucket: u32) {
        if let Some(cut) = bucket.checked_sub(self.lost.from).and_then(|place| self.lost.cuts.get_mut(place as usize)) {
            *cut = None;
        }
    }
}

impl Run<'_> {
    /// Loads what is lost; false where nothing was. A dry run loads nothing.
    pub(super) async fn load_lost(&mut self) -> Result<bool> {
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
        let is_scheduled = self.options.wait_max.is_some();
        if !is_scheduled || lost * 10 >= all || self.on.store.loads_of_last_hour(JOB).await? < LOADS_MAX {
            return Ok(false);
        }
        warn!(
            event = "redis-evicts",
            buckets = lost,
            "Redis lost {lost} buckets after {LOADS_MAX} loads within an hour, they are loaded later: set its maxmemory-policy to noeviction"
        );
        if self.options.mode == Mode::Rebuild {
            self.makes_way = Some("Redis loses buckets too often: they are loaded within the hour");
        }
        Ok(true)
    }

    fn say_loading(&self, lost: u64) {
        if self.options.mode == Mode::Layout {
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
        let lost = cache.begin_load((name, kind), &metrics, self.number, from, FIELDS_MAX, &outbox).await?;
        let next = lost.next();
        if lost.buckets().next().is_none() {
            return Ok(next);
        }
        let passes = vec![0; lost.cuts.len()];
        let mut loading = Loading { lost, passes, run: self.number, busy: Vec::new() };
        self.fence_patiently().await?;
        let mut range = self.on.store.list_range(kind, TargetId(0), PAGE_ROWS).await?;
        loop {
            let after = range.until;
            let (repairs, looked) = self.lacking(&mut loading, range);
            // The next page is read while this one is added.
            let on = self.on;
            let following = async { Ok(on.store.list_range(kind, after, PAGE_ROWS).await?) };
            let ((), following) = tokio::try_join!(self.add(&mut loading, &repairs), following)?;
            for some in looked.chunks(PAGE_LOOKED) {
                self.load_looked(&mut loading, some).await?;
            }
            if loading.busy.len() > BUSY_MAX {
                self.load_busy(&mut loading).await?;
            }
            if self.is_over() {
                return Ok(next);
            }
            if after >= LAST {
                break;
            }
            range = following;
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

    /// Waits as long as it takes: until the events on the way are in MySQL nobody can say what was lost, and readers ask MySQL meanwhile.
    async fn fence_patiently(&mut self) -> Result<()> {
        let patience = std::mem::replace(&mut self.fences.fence_max, Duration::MAX);
        let passed = self.fence(Duration::ZERO).await;
        self.fences.fence_max = patience;
        passed
    }

    /// Says of buckets that they are loaded, but for those with numbers that are busy.
    async fn end_loads(&mut self, name: &str, loading: &mut Loading) -> Result<()> {
        let keys = &self.on.cache.keys;
        let busy: HashSet<u32> = loading.busy.iter().map(|(target, _)| keys.bucket(*target)).collect();
        let ended = loading.lost.buckets().map(|(bucket, _)| bucket).filter(|bucket| !busy.contains(bucket));
        self.report.buckets_loaded += self.on.cache.end_load(name, self.number, ended).await?;
        for place in 0..loading.lost.cuts.len() {
            let bucket = loading.lost.from + u32::try_from(place)?;
            if !busy.contains(&bucket) {
                loading.leave(bucket);
            }
        }
        Ok(())
    }

    /// What the buckets lacked at their cuts of a page, and the numbers of which only a measurement can say it: those that the daemon adds to Redis are
    /// judged by each bucket's marks, and keys of targets can't be listed by bucket.
    fn lacking(&self, loading: &mut Loading, range: Range) -> (Vec<Repair>, Vec<CounterKey>) {
        let (mut repairs, mut looked) = (Vec::new(), Vec::new());
        let (keys, skew) = (&self.on.cache.keys, self.on.limits.skew());
        for counted in range.counters {
            let number = counted.number;
            let Some((cut, state)) = loading.of(keys.bucket(number.0)) else { continue };
            if !self.on.cache.is_packed() || self.is_by_daemon(number) {
                looked.push(number);
                continue;
            }
            let held = loading.lost.held.remove(&number).unwrap_or(0);
            if counted.update_at > cut.before(skew) {
                loading.busy.push(number);
            } else if counted.value != held {
                repairs.push(self.adding(number, held, counted.value - held, state));
            }
        }
        // What MySQL doesn't know at all: likes on the way, or orphans. Nothing is added; comparisons see to them.
        (repairs, looked)
    }

    /// Adds what numbers lack by a sample of their own. Those that are written meanwhile are busy.
    async fn load_looked(&mut self, loading: &mut Loading, numbers: &[CounterKey]) -> Result<()> {
        let measurements = self.measure(numbers, Duration::ZERO, None).await?.measurements;
        loading.busy.extend(
            measurements
                .iter()
                .filter(|(_, measurement)| measurement.verdict == Verdict::Busy)
                .map(|(number, _)| *number),
        );
        self.add(loading, &self.missing(&measurements)).await
    }

    /// Judges what is busy by a new sample: of a long load nearly all of it has come to rest since its cut.
    async fn load_busy(&mut self, loading: &mut Loading) -> Result<()> {
        let mut busy = std::mem::take(&mut loading.busy);
        busy.sort_unstable();
        for some in busy.chunks(PAGE_LOOKED) {
            if self.is_over() {
                break;
            }
            self.load_looked(loading, some).await?;
        }
        // Never at rest: they would be in the way of the others.
        if loading.busy.len() > BUSY_MAX / 2 { self.load_watched(loading).await } else { Ok(()) }
    }

    /// Numbers that are written all the time. Of those that nobody can judge the buckets stay unknown, until the next run.
    async fn load_watched(&mut self, loading: &mut Loading) -> Result<()> {
        let mut busy = std::mem::take(&mut loading.busy);
        busy.sort_unstable();
        for some in busy.chunks(WATCHED_MAX) {
            if self.is_over() {
                some.iter().for_each(|(target, _)| loading.leave(self.on.cache.keys.bucket(*target)));
                continue;
            }
            // Where a producer's clock leaves it open which was first, what it says is taken: a comparison will mend it.
            let measurements = self.measure_watched(some, Duration::ZERO, Duration::ZERO).await?;
            for ((target, _), _) in measurements.iter().filter(|(_, measurement)| measurement.verdict == Verdict::Busy)
            {
                loading.leave(self.on.cache.keys.bucket(*target));
            }
            self.add(loading, &self.missing(&measurements)).await?;
        }
        Ok(())
    }

    /// What numbers lack that a measurement could judge.
    fn missing(&self, measurements: &BTreeMap<CounterKey, Measurement>) -> Vec<Repair> {
        let missing = |(number, measurement): (&CounterKey, &Measurement)| match measurement.verdict {
            Verdict::Drift(drift) if drift != 0 => {
                Some(self.adding(*number, measurement.sample.value, -drift, measurement.sample.loaded))
            }
            _ => None,
        };
        measurements.iter().filter_map(missing).collect()
    }

    /// Adds to buckets that are being loaded. One that was flushed again meanwhile is left to the next run.
    async fn add(&mut self, loading: &mut Loading, repairs: &[Repair]) -> Result<()> {
        let keys = &self.on.cache.keys;
        let mut left = repairs.to_vec();
        while !left.is_empty() {
            // As many of each bucket as one call takes; the others with its next state.
            let mut calls: HashMap<u32, usize> = HashMap::new();
            let (now, later): (Vec<Repair>, Vec<Repair>) = left.into_iter().partition(|repair| {
                let of_bucket = calls.entry(keys.bucket(repair.number.0)).or_default();
                *of_bucket += 1;
                *of_bucket <= CALL_IDS_MAX
            });
            self.add_once(loading, &now).await?;
            let next = |repair: Repair| {
                let (_, loaded) = loading.of(keys.bucket(repair.number.0))?;
                Some(Repair { loaded, ..repair })
            };
            left = later.into_iter().filter_map(next).collect();
        }
        Ok(())
    }

    async fn add_once(&mut self, loading: &mut Loading, repairs: &[Repair]) -> Result<()> {
        let pass = self.next_number();
        fault::point("reconcile:loading");
        let keys = &self.on.cache.keys;
        for ((target, _), repaired) in self.on.cache.repair(&self.on.names, pass, repairs).await? {
            let bucket = keys.bucket(target);
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

    /// The kinds in the order of their codes.
    pub(super) fn kinds(&self) -> Vec<(String, Kind)> {
        let mut kinds: Vec<(String, Kind)> =
            self.on.kinds.0.iter().map(|(name, code)| (name.clone(), Kind(*code))).collect();
        kinds.sort_unstable_by_key(|(_, kind)| *kind);
        kinds
    }

    /// What is added to a number, which was `sampled`. It may pass below zero where the daemon counts it, because events
    /// come in another order than they happened, and where MySQL has it there. Otherwise it would only by what was taken away since: measure again.
    /// No deadline: a run that takes a load over changes the state of its buckets.
    pub(super) fn adding(&self, number: CounterKey, sampled: i64, delta: i64, loaded: Loaded) -> Repair {
        let Ruled { writer, below_zero, .. } = self.on.rules.of(number.0.kind, number.1);
        // Of likes there are never less than none: where `counter` says so, it is wrong.
        let is_below = number.1 != self.on.metrics.like() && sampled.saturating_add(delta) < 0;
        let below_zero = below_zero || writer == Writes::Daemon || is_below;
        Repair { number, delta, below_zero, not_set_since: None, loaded, until: Micros::MAX }
    }
}
