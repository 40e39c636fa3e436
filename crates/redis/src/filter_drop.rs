//! Deletes all Bloom filters of all kinds and layouts. The module finds the filters by the names of their keys, because
//! a filter's kind or layout may no longer be in the configuration.

use std::collections::BTreeSet;

use redis::{Pipeline, Value};

use super::{Cache, Context, Result};

const ACTION: &str = "delete all filters";

impl Cache {
    /// Deletes the keys of all filters and returns the count of keys. A dry run deletes nothing. The call first deletes
    /// the epoch, so that readers stop trusting all filters.
    pub async fn drop_all_filters(&self, dry_run: bool) -> Result<u64> {
        let epoch = self.keys.filter_epoch();
        let mut dropped = if dry_run { 0 } else { self.unlink(std::slice::from_ref(&epoch)).await? };
        let mut counted = BTreeSet::new();
        let (pattern, mut next) = (self.keys.filters(), self.begin_scan().await?);
        while let Some(from) = next {
            let keys;
            (keys, next) = self.scan_names(ACTION, &pattern, from).await?;
            match dry_run {
                true => counted.extend(keys),
                false => dropped += self.unlink(&keys).await?,
            }
        }
        Ok(dropped + counted.len() as u64)
    }

    /// Deletes each key with a separate command, because on a Cluster the keys are in many slots.
    async fn unlink(&self, keys: &[String]) -> Result<u64> {
        let mut dropped = 0;
        for some in keys.chunks(super::PIPELINE_COMMANDS_MAX) {
            let mut pipeline = Pipeline::with_capacity(some.len());
            for key in some {
                pipeline.cmd("UNLINK").arg(key);
            }
            for answer in self.run(ACTION, &pipeline).await? {
                dropped += u64::from(answer.context(ACTION)? == Value::Int(1));
            }
        }
        Ok(dropped)
    }
}
