//! What users clicked lately, as lua/like.lua remembers it.

use redis::{Pipeline, Value};
use tracing::debug;

use super::keys::KindNames;
use super::{Cache, CacheError, Result, text};
use crate::event::LikeEvent;
use crate::model::{Target, UserId};

impl Cache {
    /// Remembers a click that was counted without lua/like.lua remembering it. A hint: without it a later click may be misjudged.
    pub(crate) async fn remember_click(&self, kind: &str, click: LikeEvent) {
        let LikeEvent { target, user, at, liked } = click;
        let [recent, _] = self.keys.recent(kind, self.keys.bucket(target));
        let mut pipeline = Pipeline::new();
        let value = format!("{}{}", at.0, if liked { '+' } else { '-' });
        pipeline.cmd("HSET").arg(recent).arg(format!("{}:{}", target.id, user)).arg(value);
        if let Err(error) = self.run("remember a click", &pipeline).await {
            debug!(event = "click-forgotten", "{:#}", anyhow::Error::from(error));
        }
    }

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
