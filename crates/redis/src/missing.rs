//! Stores the list of buckets that readers found missing.

use redis::{Pipeline, Value};
use tallyd_core::keys::KindNames;
use tallyd_core::model::{Kind, Target};

use super::{Cache, CacheError, Context, Result, text};

/// How long Redis keeps the list of missing buckets, in seconds.
const MISSING_KEPT_S: u64 = 3_600;

impl Cache {
    /// Adds the buckets of `targets` to the list of missing buckets. A daemon checks the listed buckets within seconds.
    pub async fn note_missing(&self, kinds: &KindNames, targets: impl Iterator<Item = Target>) -> Result<()> {
        const ACTION: &str = "note missing buckets";
        let mut names: Vec<String> = targets
            .filter_map(|target| Some(self.keys.bucket_name(kinds.get(target.kind)?, self.keys.bucket(target))))
            .collect();
        names.sort_unstable();
        names.dedup();
        for some in names.chunks(super::PIPELINE_COMMANDS_MAX) {
            let mut pipeline = Pipeline::new();
            pipeline.cmd("SADD").arg(self.keys.missing()).arg(some);
            // The list needs an expiry, because only a running daemon removes buckets from the list.
            pipeline.cmd("EXPIRE").arg(self.keys.missing()).arg(MISSING_KEPT_S);
            self.run(ACTION, &pipeline).await?;
        }
        Ok(())
    }

    pub async fn take_missing(&self, kinds: &KindNames, limit: usize) -> Result<Vec<(Kind, u32)>> {
        const ACTION: &str = "read which buckets are missing";
        let mut pipeline = Pipeline::new();
        pipeline.cmd("SPOP").arg(self.keys.missing()).arg(limit);
        let answer = self.run(ACTION, &pipeline).await?.pop().unwrap_or(Ok(Value::Nil));
        let answer = answer.context(ACTION)?;
        let (Value::Array(members) | Value::Set(members)) = &answer else {
            return Err(CacheError::unexpected(ACTION, &answer));
        };
        let read = |member: &Value| {
            let (kind, bucket) = text(member)?.rsplit_once(':')?;
            Some((kinds.named(kind)?, self.keys.layout().named_bucket(bucket)?))
        };
        Ok(members.iter().filter_map(read).collect())
    }
}
