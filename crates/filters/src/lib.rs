//! One run of the job that builds and updates Bloom filters. A target with many likes has a filter, which answers
//! whether a user likes the target, with "no" or "perhaps".
//!
//! # The way
//!
//! ```text
//! targets that changed since the last run, or all --.
//! the state of their filters, from Redis -----------+-> decide (plan.rs)
//!   build:  begin (from now on likes are noted beside it) -> fence -> clicks that Redis remembers -> likers from MySQL
//!           -> write the bits beside the former filter -> replace the former filter -> fold
//!   fold:   users who are noted beside a filter -> its bits -> no longer noted
//!   drop:   the target has too few likes now, or Redis can have lost a part
//! ```
//!
//! A run depends only on the current state in MySQL and Redis, so the next run continues after a crash at any point.
//! One rule always holds: **a filter never says "no" about a user who likes the target.** A wrong "perhaps" costs a
//! query. After a wrong "no", a like is counted twice. At most 16 MiB of a filter are in memory.
//!
//! # Why nothing is lost
//!
//! One script counts a like (lua/like.lua), another begins a build, and another swaps in the new filter. So each like
//! is either completely before or completely after a begin or a swap. All keys of a target are in one slot of a Redis
//! Cluster.
//!
//! * *A like before "begin"*: the fence follows the like's event, so the like is in MySQL before the build reads the
//!   users. If the event was published after the fence, Redis remembers the click for two minutes. The clicks are read
//!   before the users, and the newer hash of clicks before the older hash. Clicks move from the newer to the older
//!   hash, so a click that moves between the two reads is read once or twice. If Redis forgets a click during the
//!   reads, its like is already in MySQL. For a filter of several parts, clicks and users are read again for each part.
//! * *A like after "begin" and before the swap* is noted beside the filter (`added`). Its bits are also set in the
//!   former filter, if they were computed for that filter's shape. During a build, the script that removes notes
//!   refuses to run. So the note stays until the new filter has the like's bits.
//! * *A like after the swap*: like.lua sets the like's bits in the new filter. If a client computed the bits for
//!   another shape, or cannot compute bits, the user is noted in `added` instead.
//! * *A like that the daemon counts* (`writer = "daemon"`): the daemon commits the like in MySQL. Later it adds the
//!   like's outbox row to Redis, and notes the user there. A like that is committed before the build reads the users is
//!   read. After that, the daemon notes the user later than "begin", so the note stays. Until the outbox row is added,
//!   a reader can get a wrong "no".
//! * A reader checks the remembered clicks, then the noted users, then the bits. lua/filter_has.lua and lua/like.lua
//!   each do this in one script. An unlike, or the reverting of a counted like, leaves the user's bits set, which can
//!   only cause a wrong "perhaps".
//!
//! # The races
//!
//! * A run crashes at any point ([`FAULT_POINTS`]). The former filter stays in use, and new likes are still noted,
//!   because the config still has `building`. The next run finds `building` and builds the filter. When it begins, the
//!   script discards the pieces of the crashed run. After the swap, the noted users are added to the filter's bits
//!   (fold).
//! * A run freezes, and resumes after a second run has begun. The filter's config has the second run's higher number,
//!   so the first run's scripts that begin a build, write pieces and swap do nothing. The swap of the second run
//!   removes the number. After that, the first run still cannot write pieces or swap. If it begins a build then, Redis
//!   notes users unnecessarily until the next run. It can fold only into a filter of the expected shape, and a fold
//!   sets only the bits of users who like the target.
//! * Redis executes a call twice, or after its timeout. Each piece contains its position, and the script refuses a
//!   piece for another position. A repeated begin discards the written pieces, so Redis refuses the next piece. At a
//!   repeated swap, `next` is empty and nothing is swapped.
//! * A click changes no counter (result 0). The API server still publishes its event, because earlier events of this
//!   like may not have reached MySQL. So like.lua notes the user of every like, even if the click changes no counter.
//! * Redis is flushed: config and `next` are lost, too, so calls in flight do nothing. The next run builds the filter
//!   again. Its fence follows every event that was published before the flush.
//! * Redis evicts a part of a filter. If the bits are lost, the bit string is shorter than the config says. If noted
//!   users are lost, the set has fewer users than the config says. Without the config, there is no filter. A filter
//!   that lacks a part never answers "no", and the next run drops and rebuilds it.
//! * A replica that lacks the last writes takes over, or Redis starts from an old copy. Then a filter can lack likes
//!   whose events are in MySQL. Redis has another data set, and a run in progress ends. The next run begins a new epoch
//!   with one write, to `filter:epoch`. Readers pass its value to the scripts, and a filter of another epoch gives no
//!   answer until it is rebuilt. The key expires if no run was active for an hour, because it is unknown whether API
//!   servers noted all likes in this hour. A wrong "no" is possible between a failover and the next run, and for one
//!   second more, because a reader caches the epoch for one second.
//! * A slot of a Redis Cluster moves: while the slot's keys are on two nodes, Redis refuses the scripts. For each like
//!   that it counts, an API server then calls lua/note_beside.lua, which notes the user (docs/scripts.md). A run during
//!   the move fails, and the next run continues its work.
//! * Likes reach MySQL without lua/like.lua or long after it ran (an import, a dead letter that is published manually).
//!   They are in no filter until you rebuild it with `tallyd admin filters rebuild`. A run notices this if more users
//!   like a target than were ever put into its filter.
//!   more users like a target than were ever put into its filter.

mod build;
pub mod command;
pub mod lua;
mod plan;
pub mod report;

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Result, ensure};
use futures_util::FutureExt;

use plan::{Plan, Wish};
use report::{Mark, Report};
use tallyd_base::config::{Config, Metrics};
use tallyd_base::jobs::fence::Fences;
use tallyd_base::jobs::run::{Ended, Job, OFTEN_KEEP, Run, RunOptions, scheduled};
use tallyd_base::jobs::{JobEntry, JobError, JobSpec, Work};
use tallyd_base::runtime::fault;
use tallyd_base::runtime::liveness::Heartbeat;
use tallyd_base::runtime::retry::Outage;
use tallyd_core::control::Task;
use tallyd_core::model::{CounterKey, Kind, Micros, Target, TargetId};
use tallyd_mysql::changed::ChangedBefore;
use tallyd_mysql::ranges::LAST;
use tallyd_mysql::run_state::LastMarks;
use tallyd_redis::Cache;
use tallyd_redis::bloom::{self, Shape};
use tallyd_redis::keys::KindNames;

pub const JOB: &str = "filters";

pub const MODE: &str = "keep";

pub const NEEDS: &[Task] = &[Task::Consumer];

/// In order. Between two consecutive steps, there is always such a point.
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

/// A full check skips targets with fewer likes than `likes_min` divided by this number.
const FAR: u64 = 4;

const BUILDS: usize = 500;

/// If no run was active for so long, it is unknown whether API servers noted all likes.
const GAP_MAX: Duration = Duration::from_secs(3_600);

/// If no run was completed for so long, no filter is trusted: Redis keeps noted users only for a week.
const UNDONE_MAX: Duration = Duration::from_secs(5 * 86_400);

const FULL_EVERY: Duration = Duration::from_secs(86_400);

pub struct Filters {
    names: KindNames,
    metrics: Metrics,
    wish: Wish,
    fence_max: Duration,
    overlap: Duration,
}

struct Keeper<'a, 'r> {
    on: &'a Filters,
    run: &'a mut Run<'r, Filters>,
    cache: Cache,
    wish: Wish,
    fences: Option<Fences<'r>>,
    /// To be built after the next fence. The number is the count of users for whom the filter has room.
    builds: Vec<(Target, u64)>,
    data_set: String,
    /// The lower one of this run's `likes_min` and that of the last completed run.
    likes_min: u64,
}

pub fn job() -> JobEntry {
    JobEntry {
        name: JOB,
        task: "filters",
        specs: Arc::new(|config| {
            let keep = |work: Work| {
                async move { scheduled(&work, &Filters::new(&work.config), RunOptions::default()).await }.boxed()
            };
            let is_on = config.filter.is_on();
            is_on.then(|| JobSpec::new(MODE, config.filter.schedule(), NEEDS, keep)).into_iter().collect()
        }),
        first: Some(|work, beat| forget_if_off(work, beat).boxed()),
    }
}

impl Job for Filters {
    const NAME: &'static str = JOB;
    const SENDS_FENCES: bool = true;
    type Report = Report;
    type Progress = Report;

    fn needs(&self, _: &Config) -> &'static [Task] {
        NEEDS
    }

    fn mode(&self) -> Cow<'_, str> {
        Cow::Borrowed(MODE)
    }

    fn keep(&self) -> Duration {
        OFTEN_KEEP
    }

    fn begin(&self) -> (Report, Report) {
        Default::default()
    }

    async fn work(&self, run: &mut Run<'_, Self>) -> Result<()> {
        let (store, cache) = (&run.servers.store, run.servers.cache.named(&self.metrics));
        let LastMarks { newest, newest_age, done, done_age } = store.last_marks(Self::NAME, MODE, run.number).await?;
        // Another version's mark can have another format. In that case the run checks all targets.
        let read = |mark: Option<String>| serde_json::from_str::<Mark>(&mark?).ok();
        let newest = read(newest).filter(|_| newest_age <= GAP_MAX && done_age.is_none_or(|age| age <= UNDONE_MAX));
        let done = read(done);
        let data_set = cache.data_set().await?;
        // If the number of buckets has changed, the filters have new names, and their state is unknown.
        let named = cache.keys.filter("", Target { kind: Kind(0), id: TargetId(0) }).join(" ");
        // MySQL's clock dates the likes that the daemon counts, and Redis' clock the likes of API servers.
        let now = cache.now().await?.min(store.clock().await?.0);
        let filled = bloom::number_of(&format!("{data_set} {named}"));
        let mark = self.mark(newest.as_ref(), done.as_ref(), run.number, now, filled);
        // The mark is written early, so that the next run can read the mark even if this run crashes.
        run.note_checkpoint(&mark).await?;
        let mut keeper = Keeper {
            on: self,
            run,
            cache,
            wish: Wish { epoch: mark.epoch, ..self.wish.clone() },
            fences: None,
            builds: Vec::new(),
            data_set,
            likes_min: done.as_ref().map_or(u64::MAX, |done| done.likes_min).min(mark.likes_min),
        };
        // This write alone invalidates all filters that were built in another epoch.
        keeper.check_redis().await?;
        match done {
            Some(done) if mark.full != now.0 => {
                keeper.keep_changed(Micros(done.until).before(self.overlap).max(Micros(0))).await?;
            }
            _ => keeper.keep_all().await?,
        }
        if run.stop.is_cancelled() {
            run.end(Ended::Stopped, "it was stopped");
        }
        Ok(())
    }
}

impl Filters {
    pub fn new(config: &Config) -> Self {
        let wish = Wish { likes_min: config.filter.likes_min, false_positive: config.filter.false_positive, epoch: 0 };
        Self {
            names: KindNames::new(&config.kinds),
            metrics: config.metrics.clone(),
            wish,
            fence_max: config.reconcile.fence_max.0,
            overlap: config.reconcile.overlap.0,
        }
    }

    /// The newest run's mark tells which filters are trusted, and the last completed run's which targets need no check.
    fn mark(&self, newest: Option<&Mark>, done: Option<&Mark>, number: u64, now: Micros, data_set: u64) -> Mark {
        let false_positive = bloom::java_double(self.wish.false_positive);
        let epoch = newest.filter(|newest| newest.data_set == data_set).map_or(number, |newest| newest.epoch);
        // A mark with a time in the future is invalid, because Redis' clock was ahead when the mark was written.
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

/// If filters are off, likes are not noted, so filters must not be trusted if they are switched on again.
async fn forget_if_off(Work { servers, config, stop, .. }: Work, beat: Heartbeat) {
    let mut outage = Outage::new("invalidating filters");
    while !config.filter.is_on() && !stop.is_cancelled() {
        let Err(error) = beat.during(servers.store.forget_marks(JOB, MODE)).await else {
            outage.over();
            return;
        };
        let delay = outage.failed(&format!("{:#}", anyhow::Error::from(error)));
        beat.pause(delay, &stop).await;
    }
}

impl Keeper<'_, '_> {
    async fn keep_changed(&mut self, since: Micros) -> Result<()> {
        let (on, store, like) = (self.on, &self.run.servers.store, self.on.metrics.like());
        let mut before = ChangedBefore::NEWEST;
        while !self.run.stop.is_cancelled() {
            let rows = store.changed_numbers(since, before, PAGE_TARGETS).await?;
            // A counter with several slots can be listed several times, and is read once on each page.
            let numbers = rows.iter().map(|row| row.number);
            let liked = numbers.filter(|(target, metric)| *metric == like && on.names.get(target.kind).is_some());
            let liked: Vec<CounterKey> = liked.collect::<BTreeSet<_>>().into_iter().collect();
            let (truths, _) = store.truths(&liked, None, None).await?;
            let likes = |number: &CounterKey| truths.get(number).map_or(0, |truth| truth.counted.max(0).unsigned_abs());
            self.keep(liked.iter().map(|number| (number.0, likes(number))).collect()).await?;
            let Some(last) = rows.last().filter(|_| rows.len() == PAGE_TARGETS) else { break };
            before = *last;
        }
        self.build_waiting().await
    }

    async fn keep_all(&mut self) -> Result<()> {
        let (store, like) = (&self.run.servers.store, self.on.metrics.like());
        for (kind, _) in self.on.names.all() {
            let mut after = TargetId(0);
            while after < LAST && !self.run.stop.is_cancelled() {
                let range = store.list_range(kind, after, PAGE_TARGETS).await?;
                let liked = range.counters.iter().filter(|counted| counted.number.1 == like);
                let mut page: Vec<(Target, u64)> =
                    liked.map(|counted| (counted.number.0, counted.value.max(0).unsigned_abs())).collect();
                // Nearly all targets never had enough likes. An earlier run has checked those whose likes decreased.
                page.retain(|(_, likes)| likes.saturating_mul(FAR) >= self.likes_min);
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
        let states = self.cache.filter_states(&on.names, &targets).await?;
        let (mut builds, mut drops, mut folds) = (Vec::new(), Vec::new(), Vec::new());
        for ((target, likes), state) in page.into_iter().zip(&states) {
            match plan::decide(&self.wish, likes, state.as_ref()) {
                Plan::Nothing => {}
                Plan::Fold(shape) => folds.push((target, shape)),
                Plan::Drop => drops.push(target),
                Plan::Build { expected, drops_former } => {
                    drops.extend(Some(target).filter(|_| drops_former));
                    builds.push((target, expected));
                }
            }
        }
        // Filters are dropped first, so that readers stop using them.
        self.cache.drop_filters(&on.names, &drops).await?;
        self.run.report.dropped += drops.len() as u64;
        fault::point("filters:dropped");
        self.run.report.looked_at += targets.len() as u64;
        for (target, shape) in folds {
            self.fold(target, shape).await?;
        }
        self.builds.extend(builds);
        self.run.show(|shown| shown.clone_from(&self.run.report));
        if self.builds.len() >= BUILDS { self.build_waiting().await } else { Ok(()) }
    }

    /// Together and not page by page, because each fence takes time.
    async fn build_waiting(&mut self) -> Result<()> {
        let builds = std::mem::take(&mut self.builds);
        for builds in builds.chunks(BUILDS) {
            match self.build_all(builds).await {
                // The job continues, because it can still maintain the other filters.
                Err(error) if matches!(error.downcast_ref(), Some(JobError::NotNow(_))) => {
                    self.run.report.left += builds.len() as u64;
                    self.run.report.left_because = Some(error.to_string());
                }
                built => built?,
            }
        }
        Ok(())
    }

    /// After a flush or a failover, Redis has a different data set and can lack counted likes. Then this run's mark is
    /// no longer valid. Otherwise the filters are trusted for another hour.
    async fn check_redis(&self) -> Result<()> {
        ensure!(
            self.cache.data_set().await? == self.data_set,
            "Redis' data set changed during the run: the next run starts again"
        );
        let is_mine = lua::trust_filters(&self.cache, self.run.number, self.wish.epoch, GAP_MAX.as_secs()).await?;
        ensure!(is_mine, "a later run has taken over the filters");
        Ok(())
    }

    async fn fold(&mut self, target: Target, shape: Shape) -> Result<()> {
        let on = self.on;
        // `None` means that the filter was replaced during this run. The next run checks the new filter.
        self.run.report.folded += lua::fold_filter(&self.cache, &on.names, target, shape).await?.unwrap_or(0);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_fault_point_is_listed_once() {
        fault::assert_points(&FAULT_POINTS, &[include_str!("lib.rs"), include_str!("build.rs")]);
    }
}
