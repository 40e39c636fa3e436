//! What Redis has lost, wholly or in part (a flush, an empty replica promoted, an evicted bucket): loaded again from
//! `counter`, while likes go on.
//!
//! A bucket without its field `_` is unknown, not zero. One script marks it as being loaded and returns what it holds at
//! that instant: its cut. After a fence, each counter that nothing newer was applied to is its value as of the cut, and
//! the difference to what the bucket held is added; what was counted meanwhile stays. The others are watched, as in any
//! comparison. Only then is the bucket said to be loaded, and only if its mark is still there.
//!
//! Counters that the daemon adds to Redis need no fence (touched.rs).
//!
//! Likes whose publish came later than the fence are missing in what was loaded. The comparison that follows finds
//! them: their `at` is within `overlap`.
//!
//! Layouts that were left, and come back, are taken for lost, because their counters are as old as that. Each run notes the
//! layouts that API servers count in, by configuration. Nobody has kept up a layout that the last run didn't have, though
//! its buckets may still say that they are loaded: from a move that was given up, or from before a switch. Before anything
//! is compared their marks are taken away, and they are loaded like buckets that Redis lost.

mod buckets;
mod touched;

use std::time::Instant;

use anyhow::Result;
use tracing::{info, warn};

use super::context::{JOB, Mode, RunContext, Servers};
use super::measure::Measure;
use super::report::{LISTED_MAX, Report, Steps};
use crate::jobs::JobError;
use buckets::Loader;
use tallyd_redis::Cache;
use tallyd_redis::load::Unloaded;

/// Loads of a few buckets that a schedule begins within an hour.
const LOADS_MAX: u64 = 3;

/// Fails where the daemon counts in a layout that this configuration lacks: the run would note that nobody keeps it up,
/// and the next run would take it for lost.
pub(super) async fn check_layouts(servers: &Servers) -> Result<()> {
    let ours: Vec<String> = layouts(servers).map(|cache| cache.keys.layout().full_name()).collect();
    match servers.store.daemon_layouts().await?.into_iter().find(|layout| !ours.contains(layout)) {
        None => Ok(()),
        Some(layout) => Err(JobError::Refused(format!(
            "the daemon that started last counts in {layout}, and this configuration has {} only: give both the same [redis]",
            ours.join(" and ")
        ))
        .into()),
    }
}

/// Makes the buckets of layouts unknown that nobody has kept up, and all buckets where a reload was asked for.
pub(super) async fn unload_stale(run: &RunContext<'_>) -> Result<()> {
    let servers = run.servers;
    if run.options.dry_run {
        return Ok(());
    }
    if let Some(kept) = servers.store.last_layouts(JOB, run.number).await? {
        for cache in layouts(servers).filter(|cache| !kept.contains(&cache.keys.layout().full_name())) {
            let buckets = unload(servers, cache).await?;
            if buckets > 0 {
                let layout = cache.keys.layout().to_string();
                warn!(
                    event = "layout-stale",
                    layout,
                    buckets,
                    "nobody has kept up the layout {layout} since it was left: {buckets} buckets are loaded anew"
                );
            }
        }
    }
    if run.options.reload {
        let buckets = unload(servers, &servers.cache).await?;
        warn!(event = "reload", buckets, "told to load all numbers again: {buckets} buckets are unknown until then");
    }
    let ours = servers.cache.keys.layout().full_name();
    let also = servers.also.as_ref().map(|also| also.keys.layout().full_name());
    Ok(servers.store.note_layouts(run.number, &ours, also.as_deref()).await?)
}

/// Loads what is lost. A dry run loads nothing.
pub(super) async fn load_lost(run: &RunContext<'_>, measure: &mut Measure<'_>, report: &mut Report) -> Result<()> {
    let cache = &run.servers.cache;
    let mut lost = 0;
    for (_, name) in run.servers.names.all() {
        let Unloaded { lost: of_kind, foreign } = cache.unloaded(name, 0..cache.keys.buckets()).await?;
        lost += of_kind;
        report.foreign.extend(foreign);
    }
    report.foreign.truncate(LISTED_MAX);
    if lost == 0 || report.dry_run || is_too_often(run, lost).await? {
        return Ok(());
    }
    say_loading(run, lost);
    let began = Instant::now();
    for (kind, name) in run.servers.names.all() {
        let mut from = 0;
        // Once through: what is lost again meanwhile is the next run's, or a Redis that evicts would keep this one.
        while from < cache.keys.buckets() && !run.early_end.is_due() {
            from = Loader::new(run, measure, report).load_from(kind, name, from).await?;
        }
    }
    let (buckets, counters) = (report.buckets_loaded, report.counters_loaded);
    let seconds = began.elapsed().as_secs_f32();
    Steps::add(&mut report.steps_ms.rebuild, began.elapsed());
    info!(
        event = "redis-loaded",
        buckets, counters, seconds, "{buckets} buckets with {counters} counters are loaded after {seconds:.1} s"
    );
    Ok(())
}

/// Each load reads all of `counter`. The loads of a Redis that evicts buckets would never end.
async fn is_too_often(run: &RunContext<'_>, lost: u64) -> Result<bool> {
    let all = u64::from(run.servers.cache.keys.buckets()) * run.servers.names.all().count() as u64;
    let is_scheduled = run.options.wait_max.is_some();
    if !is_scheduled || lost * 10 >= all || run.servers.store.loads_of_last_hour(JOB).await? < LOADS_MAX {
        return Ok(false);
    }
    warn!(
        event = "redis-evicts",
        buckets = lost,
        "Redis lost {lost} buckets after {LOADS_MAX} loads within an hour, they are loaded later: set its maxmemory-policy to noeviction"
    );
    if run.options.mode == Mode::Rebuild {
        run.early_end.make_way("Redis loses buckets too often: they are loaded within the hour");
    }
    Ok(true)
}

fn say_loading(run: &RunContext<'_>, lost: u64) {
    if run.options.mode == Mode::Layout {
        let layout = run.servers.cache.keys.layout().to_string();
        info!(event = "layout-loading", layout, buckets = lost, "loading {lost} buckets of {layout} from MySQL");
    } else {
        warn!(event = "redis-lost", buckets = lost, "Redis lacks {lost} buckets of counters: loading them from MySQL");
    }
}

/// The layouts that API servers count in.
fn layouts(servers: &Servers) -> impl Iterator<Item = &Cache> {
    std::iter::once(&servers.cache).chain(&servers.also)
}

/// Makes the layout's buckets unknown, and returns how many of them were loaded.
async fn unload(servers: &Servers, cache: &Cache) -> Result<u64> {
    let mut buckets = 0;
    for (_, name) in servers.names.all() {
        buckets += cache.unload(name).await?;
    }
    Ok(buckets)
}
