//! Deletes all Bloom filters, of any kind and layout: by their keys' names, because the configuration no longer has them.

use std::collections::BTreeSet;

use redis::{Pipeline, Value};

use super::{Cache, CacheError, Context, Result, Servers, text};

const ACTION: &str = "delete all filters";

/// Keys that one SCAN looks at: some hundred microseconds.
const SCANNED_KEYS: usize = 1_000;

impl Cache {
    /// Deletes the keys of all filters and returns their number; a dry run only counts them. From the first deletion on no reader trusts any filter.
    pub async fn drop_all_filters(&self, dry_run: bool) -> Result<u64> {
        let epoch = self.keys.filter_epoch();
        let mut dropped = if dry_run { 0 } else { self.unlink(std::slice::from_ref(&epoch)).await? };
        let mut counted = BTreeSet::new();
        for node in self.masters().await? {
            let mut cursor = "0".to_owned();
            loop {
                let (next, keys) = self.scan_filters(node.as_deref(), &cursor).await?;
                match dry_run {
                    true => counted.extend(keys),
                    false => dropped += self.unlink(&keys).await?,
                }
                if next == "0" {
                    break;
                }
                cursor = next;
            }
        }
        Ok(dropped + counted.len() as u64)
    }

    /// Those of a Cluster, each by its address.
    async fn masters(&self) -> Result<Vec<Option<String>>> {
        match &self.servers {
            Servers::One(_) => Ok(vec![None]),
            Servers::Cluster(cluster) => Ok(cluster.masters().await.context(ACTION)?.into_iter().map(Some).collect()),
        }
    }

    async fn scan_filters(&self, node: Option<&str>, cursor: &str) -> Result<(String, Vec<String>)> {
        let mut scan = redis::cmd("SCAN");
        scan.arg(cursor).arg("MATCH").arg(self.keys.filters()).arg("COUNT").arg(SCANNED_KEYS);
        let answer = match (&self.servers, node) {
            (Servers::Cluster(cluster), Some(node)) => cluster.ask(node, &scan).await.context(ACTION)?,
            _ => {
                let mut pipeline = Pipeline::new();
                pipeline.add_command(scan);
                self.run(ACTION, &pipeline).await?.pop().unwrap_or(Ok(Value::Nil)).context(ACTION)?
            }
        };
        let page = || {
            let Value::Array(parts) = &answer else { return None };
            let [next, Value::Array(keys)] = parts.as_slice() else { return None };
            Some((text(next)?.to_owned(), keys.iter().map(|key| text(key).map(str::to_owned)).collect::<Option<_>>()?))
        };
        page().ok_or_else(|| CacheError::unexpected(ACTION, &answer))
    }

    /// Each by a command of its own: on a Cluster they are in many slots.
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
