//! Reads and writes the recent clicks of users, which lua/like.lua remembers.

use redis::{ErrorKind, Pipeline, RedisResult, ServerErrorKind, Value};
use tallyd_core::bloom::Shape;
use tallyd_core::chain::Chain;
use tallyd_core::event::LikeEvent;
use tallyd_core::keys::KindNames;
use tallyd_core::model::{Target, UserId};
use tracing::debug;

use super::{Cache, Call, Context, FILTER_HAS, REMEMBER, Result, text};

/// Reads the shape of a filter from the end of a script's answer.
pub fn shape(parts: &[Value]) -> Option<Shape> {
    let [Value::Int(size), Value::Int(iterations)] = parts else { return None };
    Shape::checked(*size, *iterations)
}

/// The answer of Redis to the question whether a user likes a target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Seen {
    /// Whether the user likes the target.
    Known(bool),
    /// Redis does not know whether the user likes the target. If the bits were for another shape (size and hash count),
    /// the value is the shape of the target's filter.
    Unknown(Option<Shape>),
}

impl Cache {
    /// Remembers a click for `keep_s`, unless a newer click is remembered. This function is for clicks that
    /// lua/like.lua has counted but has not remembered. If the call fails, lua/like.lua can make a wrong decision
    /// whether the user's next click counts.
    pub async fn remember_click(&self, kind: &str, click: LikeEvent, keep_s: u64) {
        let LikeEvent { target, user, at, liked } = click;
        let [recent, _] = self.keys.recent(kind, self.keys.bucket(target));
        let call = Call::new(&REMEMBER, recent).arg(format!("{}:{user}", target.id));
        let call = call.arg(format!("{at}{}", if liked { '+' } else { '-' })).number(keep_s);
        if let Err(error) = self.eval("remember a click", &[call]).await {
            debug!(event = "click-forgotten", "{}", Chain(&error));
        }
    }

    /// Returns whether the user likes each of `targets`, in the order of `targets`. The call reads only the users' last
    /// clicks, in one round trip.
    pub async fn recent_likes(&self, kinds: &KindNames, user: UserId, targets: &[Target]) -> Result<Vec<Seen>> {
        const ACTION: &str = "read recent clicks";
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
        // The click from the newer hash comes first.
        let seen = |clicks: &[Value]| clicks.iter().find_map(liked).map_or(Seen::Unknown(None), Seen::Known);
        Ok(answers.chunks(2).map(seen).collect())
    }

    /// Does the same as [`Cache::recent_likes`], and then asks the targets' filters of this epoch. `targets` contains
    /// each target with the last known shape of its filter.
    pub async fn filtered_likes(
        &self,
        kinds: &KindNames,
        user: UserId,
        epoch: &str,
        targets: &[(Target, Option<Shape>)],
    ) -> Result<Vec<Seen>> {
        const ACTION: &str = "read recent clicks and filters";
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
                // The filter can't answer, so the caller must ask MySQL.
                _ => Seen::Unknown(None),
            };
            seen.push(clicks.iter().find_map(liked).map_or(by_filter, Seen::Known));
        }
        if let Some(call) = untold {
            // The server does not know the script, so the script is loaded for the next page.
            let mut pipeline = Pipeline::new();
            pipeline.add_command(call.command(true));
            self.run(ACTION, &pipeline).await?;
        }
        Ok(seen)
    }
}

/// Returns whether a remembered click is a like.
fn liked(click: &Value) -> Option<bool> {
    match text(click)?.as_bytes().last()? {
        b'+' => Some(true),
        b'-' => Some(false),
        _ => None,
    }
}

/// Returns true if the server does not know the script, because the server is new or SCRIPT FLUSH ran.
fn is_unknown_script(answer: &RedisResult<Value>) -> bool {
    answer.as_ref().is_err_and(|error| error.kind() == ErrorKind::Server(ServerErrorKind::NoScript))
}
