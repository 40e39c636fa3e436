//! Selects the counters that a run compares, and the order in which they are compared. A run compares the counters of
//! some targets, the changed counters, all counters, or a slice of all counters.

mod full;
mod ranges;
mod scrub;

use std::collections::BTreeSet;
use std::time::Instant;

use anyhow::Result;

pub(super) use full::compare_full;
pub(super) use scrub::compare_slice;

use super::compare::Comparer;
use super::context::{JOB, RunContext};
use super::report::{Report, Steps};
use tallyd_core::model::{CounterKey, Micros, Target};
use tallyd_mysql::changed::ChangedBefore;

const KEPT_MAX: usize = 5_000;

pub(super) async fn compare_targets(comparer: &mut Comparer<'_>, targets: &[Target]) -> Result<()> {
    let targets: BTreeSet<Target> = targets.iter().copied().collect();
    comparer.listed = targets.len() as u64;
    comparer.report.in_flight = comparer.measure.in_flight().await?;
    let keys = comparer.run.servers.counter_keys(targets);
    comparer.compare(&keys).await
}

/// By Redis' clock. Counters that the last run recorded for this run are compared first.
pub(super) async fn compare_changed(comparer: &mut Comparer<'_>) -> Result<()> {
    let run = comparer.run;
    let store = &run.servers.store;
    let until = comparer.measure.fenced_now().await?;
    let from = compared_until(run, &comparer.report, until).await?;
    let start = from.before(run.servers.limits.overlap.0).max(Micros(0));
    let kept = store.drift_seen(KEPT_MAX).await?;
    let first: Vec<CounterKey> = kept.iter().map(|(key, _)| *key).collect();
    compare_kept(comparer, &first).await?;
    compare_since(comparer, start, &first).await?;
    comparer.recheck().await?;
    let complete = comparer.is_complete();
    comparer.report.cut = Some(if complete { until.0 } else { from.0 });
    if complete && !comparer.report.head.dry_run {
        store.forget_drift_seen(&kept).await?;
        run.note_compared(until).await?;
    }
    Ok(())
}

/// Recorded in MySQL and in Redis, whose record goes back, too, if Redis goes back to an older state.
async fn compared_until(run: &RunContext<'_>, report: &Report, now: Micros) -> Result<Micros> {
    let servers = run.servers;
    let layout = servers.cache.keys.layout().full_name();
    let by_mysql = servers.store.last_cut(JOB, &layout, now).await?.unwrap_or(Micros(0));
    let by_redis = match servers.cache.compared().await? {
        Some(noted) => noted,
        // Redis lost the recorded time together with buckets. If they cannot be loaded, their counters stay unknown.
        None if report.buckets_loaded > 0 || report.head.dry_run => by_mysql,
        None => Micros(0),
    };
    Ok(by_mysql.min(by_redis))
}

/// Their suspects are rechecked later with others. In this small group alone, a few drifted counters would be a high
/// percentage, and the run would stop at the safety limit.
async fn compare_kept(comparer: &mut Comparer<'_>, kept: &[CounterKey]) -> Result<()> {
    for page in kept.chunks(comparer.throttle.page()) {
        if comparer.run.early_end.is_due() {
            break;
        }
        comparer.compare_page(page).await?;
    }
    Ok(())
}

async fn compare_since(comparer: &mut Comparer<'_>, start: Micros, compared: &[CounterKey]) -> Result<()> {
    let run = comparer.run;
    let mut before = ChangedBefore::NEWEST;
    while !run.early_end.is_due() {
        let limit = comparer.throttle.page();
        let began = Instant::now();
        let rows = run.servers.store.changed_numbers(start, before, limit).await?;
        Steps::add(&mut comparer.report.steps_ms.list, began.elapsed());
        comparer.listed += rows.len() as u64;
        let keys: BTreeSet<CounterKey> =
            rows.iter().map(|row| row.number).filter(|key| compared.binary_search(key).is_err()).collect();
        comparer.compare_page(&keys.into_iter().collect::<Vec<_>>()).await?;
        let Some(last) = rows.last().filter(|_| rows.len() == limit) else { break };
        before = *last;
    }
    Ok(())
}
