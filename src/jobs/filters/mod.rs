//! One run of the job that keeps Bloom filters: who may like a target, for targets with many likes.
//!
//! # The way
//!
//! ```text
//! targets that changed since the last run, or all --.
//! what their filters are like, from Redis ----------+-> decide (plan.rs)
//!   build:  begin (from now on likes are noted beside it) -> fence -> clicks that Redis remembers -> likers from MySQL
//!           -> write the bits beside the former filter -> put it in its place -> fold
//!   fold:   users who are noted beside a filter -> its bits -> no longer noted
//!   drop:   too few likes by now, or Redis may have lost some of it
//! ```
//!
//! A run has no input but the truth, and the next run is the retry of this one, wherever it died. What must hold: **a filter
//! never says "no" of a user who likes the target.** A wrong "perhaps" costs a query; a wrong "no" has a like counted twice. Memory holds
//! 16 MiB of a filter, however large it is.
//!
//! # Why nothing is lost
//!
//! Scripts count a like (lua/like.lua), begin and swap: each like is before or after each of them. All keys of a
//! target are in one slot.
//!
//! * *A like before "begin"* is in MySQL when the likers are read, because the fence is behind its event; or it was
//!   published later, and Redis remembers the click for `[client] recent_keep`. The clicks are read first, and the newer hash before
//!   the older one: the hashes take turns in that direction, so a click that moves meanwhile is met once or twice, and one
//!   that is forgotten meanwhile is old, and in MySQL by then. A filter of several parts reads both for each part.
//! * *A like after "begin" and before the swap* is noted beside the filter (`added`), and in the former one's bits where it fits.
//!   Nobody takes it out of there before its bits are in the new one: fold refuses while anything is being built.
//! * *A like after the swap* is in the new filter's bits, or noted: whoever has computed the bits for another shape, or can't
//!   compute them, is noted.
//! * *A like that the daemon counts* (`writer = "daemon"`) is noted when its outbox row is added to Redis, after its commit. Committed before
//!   the likers are read, it is read with them. Committed later, it is noted after "begin". A "no" can come too early by the outbox's lag.
//! * Whoever asks looks for remembered clicks, then for the noted, then at the bits; lua/filter_has.lua and lua/like.lua do that within
//!   one script. An unlike leaves bits behind, and so does one that is taken back: that is a "perhaps".
//!
//! # The races
//!
//! *A, a run that builds; B, another run.*
//!
//! * A dies anywhere ([`FAULT_POINTS`]): the former filter goes on, and everybody who likes the target is noted, too, because
//!   `building` stands in the config. B finds it and builds; its begin throws away what A has written. After the swap the
//!   noted are folded by any later run.
//! * A is frozen and wakes up after B began: B's number is higher, and stands in the config: A's begin, pieces and swap do
//!   nothing. After B's swap none stands there: A's pieces and swap do nothing; A's begin has likes noted that need not be, until the
//!   next run. A's fold names the shape that it has computed for, and sets bits of users who do like the target.
//! * Anything comes twice, or late after a timeout: a piece names where it belongs, and is refused elsewhere; a begin throws away what was
//!   written, so that the next piece is refused; a swap finds nothing in `next`.
//! * A click changes nothing (result 0), and its event is published all the same: perhaps MySQL hears of the like only by it. So like.lua notes
//!   whoever likes a target, whether that counts or not.
//! * Redis is flushed: config and `next` are gone with the rest, what is on its way does nothing, and the next run builds. Its fence is
//!   behind every event of before the flush.
//! * Redis evicts a part. The bits: the string is shorter than the config says. The noted: they are fewer than the config says. The
//!   config: then there is no filter. Nobody is told "no" by such a filter, and the next run drops it and builds anew.
//! * A replica takes over that lacks the last moments, or Redis starts from an old copy: likes may be missing in a filter whose
//!   events are in MySQL. Redis is another data set then, and a run in flight ends. The next run begins another epoch with one write, to
//!   `filter:epoch`. Readers pass what that key says to the scripts, and a filter of another epoch says nothing until it is built again.
//!   The key expires when no run was alive for an hour: nobody knows what API servers did meanwhile. Until the run after a failover, and for
//!   the second that a reader keeps the epoch, a "no" is as good as everything else that Redis says.
//! * A slot of a Cluster moves: scripts are refused while its keys are on two nodes, and what the client counts then is noted by a command
//!   of its own (`crates/client/src/likes.rs`). A run that meets it fails, and the next one does it.
//! * Rows that come into MySQL without lua/like.lua, or long after it (an import, a dead letter that is published by hand), are in no filter
//!   until it is built again: `tallyd filters rebuild`. Where more like a target than were ever put into its filter that is seen.

mod build;
pub(crate) mod plan;
pub mod report;

use std::collections::BTreeSet;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use tokio_util::sync::CancellationToken;

use crate::config::Config;
use crate::jobs::JobError;
use crate::runtime::fault;
use crate::runtime::liveness::Heartbeat;
use crate::runtime::retry::Outage;
use plan::{Plan, Wish};
use report::{Mark, Report};
use tallyd_core::job_name::JobName;
use tallyd_core::model::{CounterKey, Kind, Metric, Micros, Target, TargetId};
use tallyd_mysql::Store;
use tallyd_mysql::changed::ChangedBefore;
use tallyd_mysql::ranges::LAST;
use tallyd_mysql::run_state::LastMarks;
use tallyd_rabbitmq::{Broker, Publisher};
use tallyd_redis::Cache;
use tallyd_redis::bloom::{self, Shape};
use tallyd_redis::keys::KindNames;

pub const MODE: &str = "keep";

/// Where a test may end the process: between any two steps, in their order.
pub const FAULT_POINTS: [&str; 7] = [
    "filters:dropped",
    "filters:begun",
    "filters:fenced",
    "filters:read",
    "filters:written",
    "filters:swapped",
    "filters:folded",
];

const PAGE_TARGETS: usize = 5_000;

/// Targets with fewer likes than this part of `likes_min` are not looked at.
const FAR: u64 = 4;

const BUILDS: usize = 500;

/// Without a run for so long no filter is trusted: nobody knows what API servers did meanwhile.
const GAP_MAX: Duration = Duration::from_secs(3_600);

/// The same without one that was done. What is noted by itself stays for a week.
const UNDONE_MAX: Duration = Duration::from_secs(5 * 86_400);

/// How often all targets are looked at, whether they changed or not.
const FULL_EVERY: Duration = Duration::from_secs(86_400);

#[derive(Clone)]
pub struct Filters {
    store: Store,
    cache: Cache,
    broker: Broker,
    names: KindNames,
    metric: Metric,
    wish: Wish,
    fence_max: Duration,
    overlap: Duration,
}

struct Run<'a> {
    on: &'a Filters,
    number: u64,
    stop: &'a CancellationToken,
    publisher: Option<Publisher>,
    fences_sent: u64,
    /// What is to be built behind the next fence, each for so many users.
    builds: Vec<(Target, u64)>,
    data_set: String,
    report: Report,
}

impl Filters {
    pub fn new(config: &Config, store: Store, cache: Cache, broker: Broker) -> Self {
        let wish = Wish { likes_min: config.filter.likes_min, false_positive: config.filter.false_positive, epoch: 0 };
        Self {
            store,
            cache,
            broker,
            names: KindNames::new(&config.kinds),
            metric: config.metrics.like(),
            wish,
            fence_max: config.reconcile.fence_max.0,
            overlap: config.reconcile.overlap.0,
        }
    }

    /// Does the run `number` of the job, whose lock the caller holds. Ends between two steps when `stop` is cancelled.
    pub async fn run(&self, number: u64, stop: &CancellationToken) -> Result<Report> {
        let LastMarks { newest, newest_age, done, done_age } =
            self.store.last_marks(JobName::Filters.name(), MODE, number).await?;
        // One of an older version may look otherwise: then all is looked at.
        let read = |mark: Option<String>| serde_json::from_str::<Mark>(&mark?).ok();
        let newest = read(newest).filter(|_| newest_age <= GAP_MAX && done_age.is_none_or(|age| age <= UNDONE_MAX));
        let done = read(done);
        let redis = self.cache.data_set().await?;
        // In other buckets filters have other names, and what became of those meanwhile nobody knows.
        let named = self.cache.keys.filter("", Target { kind: Kind(0), id: TargetId(0) }).join(" ");
        let now = self.cache.now().await?;
        let mark =
            self.mark(newest.as_ref(), done.as_ref(), number, now, bloom::number_of(&format!("{redis} {named}")));
        // Also for the run after one that dies.
        self.store.note_checkpoint(number, &serde_json::to_string(&mark).context("write the mark")?).await?;
        let mut run = Run {
            on: &Self { wish: Wish { epoch: mark.epoch, ..self.wish.clone() }, ..self.clone() },
            number,
            stop,
            publisher: None,
            fences_sent: 0,
            builds: Vec::new(),
            data_set: redis,
            report: Report::default(),
        };
        // The one write that rejects what was built in another epoch.
        run.check_redis().await?;
        match done {
            Some(done) if mark.full != now.0 => {
                run.keep_changed(Micros(done.until).before(self.overlap).max(Micros(0))).await?;
            }
            _ => run.keep_all().await?,
        }
        run.report.stopped = stop.is_cancelled();
        Ok(run.report)
    }

    /// What this run goes on from: which filters it trusts by the newest run, and what it needn't look at by the last one that was done.
    fn mark(&self, newest: Option<&Mark>, done: Option<&Mark>, number: u64, now: Micros, data_set: u64) -> Mark {
        let false_positive = bloom::java_double(self.wish.false_positive);
        let epoch = newest.filter(|newest| newest.data_set == data_set).map_or(number, |newest| newest.epoch);
        // A time from the future is void: Redis' clock was ahead then.
        let same = done.filter(|done| {
            done.epoch == epoch
                && done.until.max(done.full) <= now.0
                && (done.likes_min, &done.false_positive) == (self.wish.likes_min, &false_positive)
                && Micros(done.full).after(FULL_EVERY) > now
        });
        Mark {
            data_set,
            epoch,
            likes_min: self.wish.likes_min,
            false_positive,
            until: now.0,
            full: same.map_or(now.0, |done| done.full),
        }
    }
}

/// While filters are off nobody notes who likes a target: those that are left are not trusted when they are switched on again, however soon
/// that is.
pub async fn stay_off(store: Store, beat: Heartbeat, stop: CancellationToken) {
    let mut outage = Outage::new("forgetting filters");
    while !stop.is_cancelled() {
        let Err(error) = beat.during(store.forget_marks(JobName::Filters.name(), MODE)).await else {
            outage.over();
            break;
        };
        let delay = outage.failed(&format!("{:#}", anyhow::Error::from(error)));
        beat.pause(delay, &stop).await;
    }
    beat.pause(Duration::MAX, &stop).await;
}

impl Run<'_> {
    /// Looks at the targets that changed since `since`. Of those that have far too few likes for a filter only a full look sees
    /// that they still have one.
    async fn keep_changed(&mut self, since: Micros) -> Result<()> {
        let on = self.on;
        let mut before = ChangedBefore::NEWEST;
        while !self.stop.is_cancelled() {
            let rows = on.store.changed_numbers(since, before, PAGE_TARGETS).await?;
            // A number with several slots may stand there twice, or on another page again, where it is right by then.
            let numbers = rows.iter().map(|row| row.number);
            let liked = numbers.filter(|(target, metric)| *metric == on.metric && on.names.get(target.kind).is_some());
            let liked: Vec<CounterKey> = liked.collect::<BTreeSet<_>>().into_iter().collect();
            let (truths, _) = on.store.truths(&liked, None, None).await?;
            let likes = |number: &CounterKey| truths.get(number).map_or(0, |truth| truth.counted.max(0).unsigned_abs());
            let pairs: Vec<(Target, u64)> = liked.iter().map(|number| (number.0, likes(number))).collect();
            let near = pairs.into_iter().filter(|(_, likes)| likes.saturating_mul(FAR) >= on.wish.likes_min).collect();
            self.keep(near).await?;
            let Some(last) = rows.last().filter(|_| rows.len() == PAGE_TARGETS) else { break };
            before = *last;
        }
        self.build_waiting().await
    }

    async fn keep_all(&mut self) -> Result<()> {
        let on = self.on;
        for (kind, _) in on.names.all() {
            let mut after = TargetId(0);
            while after < LAST && !self.stop.is_cancelled() {
                let range = on.store.list_range(kind, after, PAGE_TARGETS).await?;
                let liked = range.counters.iter().filter(|counted| counted.number.1 == on.metric);
                let mut page: Vec<(Target, u64)> =
                    liked.map(|counted| (counted.number.0, counted.value.max(0).unsigned_abs())).collect();
                // Nearly all targets of a site have fewer. One that had more, and a filter, was seen on its way down.
                page.retain(|(_, likes)| likes.saturating_mul(FAR) >= on.wish.likes_min);
                self.keep(page).await?;
                after = range.until;
            }
        }
        self.build_waiting().await
    }

    async fn keep(&mut self, page: Vec<(Target, u64)>) -> Result<()> {
        let on = self.on;
        self.check_redis().await?;
        let targets: Vec<Target> = page.iter().map(|(target, _)| *target).collect();
        let states = on.cache.filter_states(&on.names, &targets).await?;
        let (mut builds, mut drops, mut folds) = (Vec::new(), Vec::new(), Vec::new());
        for ((target, likes), state) in page.into_iter().zip(&states) {
            match plan::decide(&on.wish, likes, state.as_ref()) {
                Plan::Nothing => {}
                Plan::Fold(shape) => folds.push((target, shape)),
                Plan::Drop => drops.push(target),
                Plan::Build { expected, drops_former } => {
                    drops.extend(Some(target).filter(|_| drops_former));
                    builds.push((target, expected));
                }
            }
        }
        // First, so that nobody goes on asking them.
        on.cache.drop_filters(&on.names, &drops).await?;
        self.report.dropped += drops.len() as u64;
        fault::point("filters:dropped");
        self.report.looked_at += targets.len() as u64;
        for (target, shape) in folds {
            self.fold(target, shape).await?;
        }
        self.builds.extend(builds);
        if self.builds.len() >= BUILDS { self.build_waiting().await } else { Ok(()) }
    }

    /// Builds what has been found: not page by page, because each fence takes a while.
    async fn build_waiting(&mut self) -> Result<()> {
        let builds = std::mem::take(&mut self.builds);
        for builds in builds.chunks(BUILDS) {
            match self.build_all(builds).await {
                // Others may still be kept up.
                Err(error) if matches!(error.downcast_ref(), Some(JobError::NotNow(_))) => {
                    self.report.left += builds.len() as u64;
                    self.report.left_because = Some(error.to_string());
                }
                built => built?,
            }
        }
        Ok(())
    }

    /// A Redis that becomes another one on the way may lack what was counted: nothing more is done by this run's mark. What is built in it is
    /// believed for another hour.
    async fn check_redis(&self) -> Result<()> {
        ensure!(
            self.on.cache.data_set().await? == self.data_set,
            "Redis has become another one: the next run begins again"
        );
        let is_mine = self.on.cache.trust_filters(self.number, self.on.wish.epoch, GAP_MAX.as_secs()).await?;
        ensure!(is_mine, "a later run has said which filters are trusted");
        Ok(())
    }

    async fn fold(&mut self, target: Target, shape: Shape) -> Result<()> {
        let on = self.on;
        // None: it is another one by now, and the next run looks at that.
        self.report.folded += on.cache.fold_filter(&on.names, target, shape).await?.unwrap_or(0);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_fault_point_is_listed_once() {
        crate::jobs::assert_fault_points(&FAULT_POINTS, &[include_str!("mod.rs"), include_str!("build.rs")]);
    }
}
