//! Layouts that were left, and come back: what they hold is as old as that, so it is taken for lost.
//!
//! Each run notes the layouts that API servers count in, by configuration. One that the last run didn't have nobody has kept up
//! since, though its buckets may still say that they are loaded: from a move that was given up, or from before a switch. Their marks
//! are taken away, before anything is compared, and they are loaded anew, as what Redis has lost is.

use anyhow::Result;
use tracing::warn;

use super::{JOB, Run};
use crate::cache::Cache;
use crate::jobs::JobError;

impl Run<'_> {
    /// A run that lacked a layout of the daemon's would note that nobody keeps it up, and the next one would take it for lost.
    pub(super) async fn check_layouts(&self) -> Result<()> {
        let ours: Vec<String> =
            std::iter::once(&self.on.cache).chain(&self.on.also).map(|cache| cache.keys.layout().full_name()).collect();
        match self.on.store.daemon_layouts().await?.into_iter().find(|layout| !ours.contains(layout)) {
            None => Ok(()),
            Some(layout) => Err(JobError::Refused(format!(
                "the daemon that started last counts in {layout}, and this configuration has {} only: give both the same [redis]",
                ours.join(" and ")
            ))
            .into()),
        }
    }

    pub(super) async fn unload_stale(&mut self) -> Result<()> {
        if self.report.dry_run {
            return Ok(());
        }
        let ours = self.on.cache.keys.layout().full_name();
        let also = self.on.also.as_ref().map(|also| also.keys.layout().full_name());
        if let Some(kept) = self.on.store.last_layouts(JOB, self.number).await? {
            let caches = std::iter::once(&self.on.cache).chain(&self.on.also);
            for cache in caches.filter(|cache| !kept.contains(&cache.keys.layout().full_name())) {
                let buckets = self.unload(cache).await?;
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
        if self.options.reload {
            let buckets = self.unload(&self.on.cache).await?;
            warn!(
                event = "reload",
                buckets, "told to load all numbers again: {buckets} buckets are unknown until then"
            );
        }
        Ok(self.on.store.note_layouts(self.number, &ours, also.as_deref()).await?)
    }

    /// Makes the layout's buckets unknown, and says how many of them were loaded.
    async fn unload(&self, cache: &Cache) -> Result<u64> {
        let mut buckets = 0;
        for (name, _) in self.kinds() {
            buckets += cache.unload(&name).await?;
        }
        Ok(buckets)
    }
}
