//! Loads lost counters again from `counter`, while the site keeps writing likes. Redis loses counters if somebody
//! flushes it, if an empty replica is promoted, or if Redis evicts a bucket.
//!
//! If a bucket lacks its field `_`, its counters are unknown, not zero. One script marks the bucket as loading and
//! returns its content at that instant (the cut). If no event after the cut changed a counter, its value in MySQL after
//! a fence is also its value at the cut. The load adds the difference to the bucket's content, so concurrent changes
//! are kept. If a later event changed a counter, the counter is watched, as in any comparison. At the end the load
//! marks the bucket as loaded, if it is still marked as loading.
//!
//! Counters that the daemon adds to Redis need no fence (`tallyd_core::touched`).
//!
//! Loaded counters lack likes that were published after the fence. The next comparison finds these likes, because their
//! `at` is within `overlap`.
//!
//! An abandoned layout of Redis keys that is configured again has outdated counters, perhaps in buckets that are marked
//! as loaded (after a switch or an aborted move). Each run stores the names of the layouts to which API servers write.
//! A layout that is missing in the last run's record has not been updated by a daemon, so the run removes its marks
//! before it compares anything, and loads its buckets as lost ones.

mod buckets;

use std::collections::BTreeSet;
use std::time::Instant;

use anyhow::Result;
use tracing::{info, warn};

use super::context::{JOB, Mode, RunContext, Servers};
use super::measure::Measure;
use super::report::{LISTED_MAX, Report, Steps};
use buckets::Loader;
use tallyd_base::jobs::JobError;
use tallyd_redis::Cache;
use tallyd_redis::load::Unloaded;

/// Per hour. It limits scheduled runs if only a few buckets are lost.
const LOADS_MAX: u64 = 3;

/// Otherwise the run would record a layout as updated that no daemon updates, or the other way round.
pub(super) async fn check_layouts(servers: &Servers) -> Result<()> {
    let ours: BTreeSet<String> = layouts(servers).map(|cache| cache.keys.layout().full_name()).collect();
    let theirs = BTreeSet::from_iter(servers.store.daemon_layouts().await?);
    if theirs.is_empty() || theirs == ours {
        return Ok(());
    }
    Err(JobError::Refused(format!(
        "the daemon that started last counts in {}, but this configuration has {}: use the same [redis] in both, and restart the daemon after a change",
        Vec::from_iter(theirs).join(" and "),
        Vec::from_iter(ours).join(" and ")
    ))
    .into())
}

pub(super) async fn unload_stale(run: &RunContext<'_>) -> Result<()> {
    let servers = run.servers;
    if run.base.options.dry_run {
        return Ok(());
    }
    if let Some(kept) = servers.store.last_layouts(JOB, run.base.number).await? {
        for cache in layouts(servers).filter(|cache| !kept.contains(&cache.keys.layout().full_name())) {
            let buckets = unload(servers, cache).await?;
            if buckets > 0 {
                let layout = cache.keys.layout().to_string();
                warn!(
                    event = "layout-stale",
                    layout,
                    buckets,
                    "the layout {layout} is outdated, because it was not in use: loading its {buckets} buckets again"
                );
            }
        }
    }
    if run.job.reload {
        let buckets = unload(servers, &servers.cache).await?;
        warn!(
            event = "reload",
            buckets, "loading all counters again, as requested: {buckets} buckets are unknown until then"
        );
    }
    let ours = servers.cache.keys.layout().full_name();
    let also = servers.also.as_ref().map(|also| also.keys.layout().full_name());
    Ok(servers.store.note_layouts(run.base.number, &ours, also.as_deref()).await?)
}

pub(super) async fn load_lost(run: &RunContext<'_>, measure: &mut Measure<'_>, report: &mut Report) -> Result<()> {
    let cache = &run.servers.cache;
    let mut lost = 0;
    for (_, name) in run.servers.names.all() {
        let Unloaded { lost: of_kind, foreign } = cache.unloaded(name, 0..cache.keys.buckets()).await?;
        lost += of_kind;
        report.foreign.extend(foreign);
    }
    report.foreign.truncate(LISTED_MAX);
    if lost == 0 || report.head.dry_run || is_too_often(run, lost).await? {
        return Ok(());
    }
    log_loading(run, lost);
    let began = Instant::now();
    for (kind, name) in run.servers.names.all() {
        let mut from = 0;
        // Goes through the lost buckets only once, because a Redis that evicts buckets would keep it busy forever.
        while from < cache.keys.buckets() && !run.early_end.is_due() {
            from = Loader::new(run, measure, report).load_from(kind, name, from).await?;
        }
    }
    let (buckets, counters) = (report.buckets_loaded, report.counters_loaded);
    let seconds = began.elapsed().as_secs_f32();
    Steps::add(&mut report.steps_ms.rebuild, began.elapsed());
    info!(
        event = "redis-loaded",
        buckets, counters, seconds, "loaded {buckets} buckets with {counters} counters in {seconds:.1} s"
    );
    Ok(())
}

/// Each load reads the whole table `counter`, and a Redis that evicts buckets would make every run do so.
async fn is_too_often(run: &RunContext<'_>, lost: u64) -> Result<bool> {
    let all = u64::from(run.servers.cache.keys.buckets()) * run.servers.names.all().count() as u64;
    let is_scheduled = run.job.wait_max.is_some();
    if !is_scheduled || lost * 10 >= all || run.servers.store.loads_of_last_hour(JOB).await? < LOADS_MAX {
        return Ok(false);
    }
    warn!(
        event = "redis-evicts",
        buckets = lost,
        "Redis lost {lost} buckets after {LOADS_MAX} loads within an hour, so they are loaded later: set its maxmemory-policy to noeviction"
    );
    if run.job.mode == Mode::Rebuild {
        run.early_end.make_way("Redis loses buckets too often: a later run loads them within the hour");
    }
    Ok(true)
}

fn log_loading(run: &RunContext<'_>, lost: u64) {
    if run.job.mode == Mode::Layout {
        let layout = run.servers.cache.keys.layout().to_string();
        info!(event = "layout-loading", layout, buckets = lost, "loading {lost} buckets of {layout} from MySQL");
    } else {
        warn!(event = "redis-lost", buckets = lost, "Redis lacks {lost} buckets of counters: loading them from MySQL");
    }
}

fn layouts(servers: &Servers) -> impl Iterator<Item = &Cache> {
    std::iter::once(&servers.cache).chain(&servers.also)
}

async fn unload(servers: &Servers, cache: &Cache) -> Result<u64> {
    let mut buckets = 0;
    for (_, name) in servers.names.all() {
        buckets += cache.unload(name).await?;
    }
    Ok(buckets)
}
