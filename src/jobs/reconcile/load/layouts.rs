//! Layouts that were left, and come back: their counters are as old as that, so they are taken for lost.
//!
//! Each run notes the layouts that API servers count in, by configuration. Nobody has kept up a layout that the last run
//! didn't have, though its buckets may still say that they are loaded: from a move that was given up, or from before a
//! switch. Before anything is compared their marks are taken away, and they are loaded like buckets that Redis lost.

use anyhow::Result;
use tracing::warn;

use crate::cache::Cache;
use crate::jobs::reconcile::context::{RunContext, Servers};
use crate::jobs::reconcile::run_options::JOB;
use crate::jobs::runner::Refused;

/// Fails where the daemon counts in a layout that this configuration lacks: the run would note that nobody keeps it up,
/// and the next run would take it for lost.
pub(in crate::jobs::reconcile) async fn check_layouts(servers: &Servers) -> Result<()> {
    let ours: Vec<String> = layouts(servers).map(|cache| cache.keys.layout().full_name()).collect();
    match servers.store.daemon_layouts().await?.into_iter().find(|layout| !ours.contains(layout)) {
        None => Ok(()),
        Some(layout) => Err(Refused(format!(
            "the daemon that started last counts in {layout}, and this configuration has {} only: give both the same [redis]",
            ours.join(" and ")
        ))
        .into()),
    }
}

/// Makes the buckets of layouts unknown that nobody has kept up, and all buckets where a reload was asked for.
pub(in crate::jobs::reconcile) async fn unload_stale(run: &RunContext<'_>) -> Result<()> {
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
