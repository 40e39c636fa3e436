//! What Redis has lost, wholly or in part (a flush, an empty replica promoted, an evicted bucket): loaded again from
//! `counter`, while likes go on.
//!
//! A bucket without its field `_` is unknown, not zero. One script marks it as being loaded and returns what it holds at
//! that instant: its cut. After a fence, each counter that nothing newer was applied to is its value as of the cut, and
//! the difference to what the bucket held is added; what was counted meanwhile stays. The others are watched, as in any
//! comparison. Only then is the bucket said to be loaded, and only if its mark is still there.
//!
//! Likes whose publish came later than the fence are missing in what was loaded. The comparison that follows finds
//! them: their `at` is within `overlap`.

mod buckets;
mod layouts;
mod loading;

use std::time::Instant;

use anyhow::Result;
use tracing::{info, warn};

pub(super) use layouts::{check_layouts, unload_stale};

use super::context::RunContext;
use super::measure::Measure;
use super::report::{LISTED_MAX, Report, Steps};
use super::run_options::{JOB, Mode};
use crate::cache::load::Unloaded;
use buckets::Loader;

/// Loads of a few buckets that a schedule begins within an hour.
const LOADS_MAX: u64 = 3;

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
