//! What users clicked lately, as lua/like.lua remembers it.

use redis::{ErrorKind, Pipeline, RedisResult, ServerErrorKind, Value};
use tallyd_core::bloom::Shape;
use tallyd_core::chain::Chain;
use tallyd_core::event::LikeEvent;
use tallyd_core::keys::KindNames;
use tallyd_core::model::{Target, UserId};
use tracing::debug;

use super::{Cache, Call, Context, FILTER_HAS, REMEMBER, Result, text};

/// The shape of a filter that a script's answer ends with.
pub fn shape(parts: &[Value]) -> Option<Shape> {
    let [Value::Int(size), Value::Int(iterations)] = parts else { return None };
    Shape::checked(*size, *iterations)
}

/// What Redis says of a user and a target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Seen {
    /// Whether the user likes the target.
    Known(bool),
    /// Nothing. With the shape of the target's filter, where other bits would tell more.
    Unknown(Option<Shape>),
}

impl Cache {
    /// Remembers a click for `keep_s` that was counted without lua/like.lua remembering it, unless a newer one is remembered. A hint:
    /// without it a later click may be misjudged.
    pub async fn remember_click(&self, kind: &str, click: LikeEvent, keep_s: u64) {
        let LikeEvent { target, user, at, liked } = click;
        let [recent, _] = self.keys.recent(kind, self.keys.bucket(target));
        let call = Call::new(&REMEMBER, recent).arg(format!("{}:{user}", target.id));
        let call = call.arg(format!("{at}{}", if liked { '+' } else { '-' })).number(keep_s);
        if let Err(error) = self.eval("remember a click", &[call]).await {
            debug!(event = "click-forgotten", "{}", Chain(&error));
        }
    }

    /// Whether the user likes each of `targets`, in their order, in one round trip, by the last clicks.
    pub async fn recent_likes(&self, kinds: &KindNames, user: UserId, targets: &[Target]) -> Result<Vec<Seen>> {
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
        let answers = self.run(ACTION, &pipeline).await?.into_iter().collect::<RedisResult<Vec<Value>>>();
        let answers = answers.context(ACTION)?;
        // The newer of the two stands first.
        let seen = |clicks: &[Value]| clicks.iter().find_map(liked).map_or(Seen::Unknown(None), Seen::Known);
        Ok(answers.chunks(2).map(seen).collect())
    }

    /// The same by the last clicks and then by the targets' filters of that epoch, each with the shape that is known of it.
    pub async fn filtered_likes(
        &self,
        kinds: &KindNames,
        user: UserId,
        epoch: &str,
        targets: &[(Target, Option<Shape>)],
    ) -> Result<Vec<Seen>> {
        const ACTION: &str = "read who may like what";
        let mut pipeline = Pipeline::with_capacity(targets.len() * 3);
        let mut calls = Vec::with_capacity(targets.len());
        for (target, shape) in targets {
            let kind = kinds.get(target.kind).unwrap_or_default();
            for key in self.keys.recent(kind, self.keys.bucket(*target)) {
                pipeline.cmd("HGET").arg(key).arg(format!("{}:{}", target.id, user));
            }
            let [filter, config, added] = self.keys.filter(kind, *target);
            let call = Call::new(&FILTER_HAS, filter).key(config).key(added).number(user).arg(epoch);
            let call = match shape {
                Some(shape) => shape.bits(user).fold(call.number(shape.size), Call::number),
                None => call.arg(""),
            };
            pipeline.add_command(call.command(false));
            calls.push(call);
        }
        if targets.is_empty() {
            return Ok(Vec::new());
        }
        let answers = self.run(ACTION, &pipeline).await?;
        let (mut seen, mut untold) = (Vec::with_capacity(targets.len()), None);
        for (answers, call) in answers.chunks(3).zip(&calls) {
            let [newer, older, filter] = answers else { continue };
            let clicks = [newer, older].into_iter().cloned().collect::<RedisResult<Vec<Value>>>();
            let clicks = clicks.context(ACTION)?;
            untold = untold.or(Some(call).filter(|_| is_unknown_script(filter)));
            let by_filter = match filter {
                Ok(Value::Int(0)) => Seen::Known(false),
                Ok(Value::Array(parts)) => Seen::Unknown(shape(parts)),
                // MySQL says it, whatever the filter's trouble is.
                _ => Seen::Unknown(None),
            };
            seen.push(clicks.iter().find_map(liked).map_or(by_filter, Seen::Known));
        }
        if let Some(call) = untold {
            // For the next page.
            let mut pipeline = Pipeline::new();
            pipeline.add_command(call.command(true));
            self.run(ACTION, &pipeline).await?;
        }
        Ok(seen)
    }
}

/// Whether a remembered click is a like.
fn liked(click: &Value) -> Option<bool> {
    match text(click)?.as_bytes().last()? {
        b'+' => Some(true),
        b'-' => Some(false),
        _ => None,
    }
}

/// A new server, or SCRIPT FLUSH.
fn is_unknown_script(answer: &RedisResult<Value>) -> bool {
    answer.as_ref().is_err_and(|error| error.kind() == ErrorKind::Server(ServerErrorKind::NoScript))
}
