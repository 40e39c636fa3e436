//! What users clicked lately, as lua/like.lua remembers it.

use redis::{Pipeline, Value};

use super::keys::KindNames;
use super::{Cache, CacheError, Result, text};
use crate::model::{Target, UserId};

impl Cache {
    /// Whether the user likes each of `targets`, in their order, in one round trip; none where Redis doesn't know.
    ///
    /// # Errors
    /// Redis is away.
    pub async fn recent_likes(&self, kinds: &KindNames, user: UserId, targets: &[Target]) -> Result<Vec<Option<bool>>> {
        const ACTION: &str = "read who clicked lately";
        let mut pipeline = Pipeline::with_capacity(targets.len() * 2);
        for target in targets {
            let kind = kinds.get(target.kind).unwrap_or_default();
            for key in self.keys.recent(kind, self.keys.bucket(*target)) {
                pipeline.cmd("HGET").arg(key).arg(format!("{}:{}", target.id, user));
            }
        }
        if targets.is_empty() {
            return Ok(Vec::new());
        }
        let answers = self.run(ACTION, &pipeline).await?.into_iter().collect::<redis::RedisResult<Vec<Value>>>();
        let answers = answers.map_err(|source| CacheError { action: ACTION, source })?;
        let liked = |click: &Value| match text(click)?.as_bytes().last()? {
            b'+' => Some(true),
            b'-' => Some(false),
            _ => None,
        };
        // The newer of the two stands first.
        Ok(answers.chunks(2).map(|clicks| clicks.iter().find_map(liked)).collect())
    }
}
