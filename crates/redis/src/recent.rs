//! Reads the recent clicks of users, which lua/like.lua remembers (decision 0044), and asks Bloom filters.

use redis::{ErrorKind, Pipeline, RedisResult, ServerErrorKind, Value};
use tallyd_core::bloom::Shape;
use tallyd_core::keys::KindNames;
use tallyd_core::model::{Target, UserId};

use super::{Cache, Call, Context, FILTER_HAS, Result, text};

pub fn shape(parts: &[Value]) -> Option<Shape> {
    let [Value::Int(size), Value::Int(iterations)] = parts else { return None };
    Shape::checked(*size, *iterations)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Seen {
    Known(bool),
    /// Redis does not know whether the user likes the target. If the bits were for another shape (size and hash count),
    /// the value is the shape of the target's filter.
    Unknown(Option<Shape>),
}

impl Cache {
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

    pub async fn filtered_likes(
        &self,
        kinds: &KindNames,
        user: UserId,
        epoch: &str,
        targets: &[(Target, Option<Shape>)],
    ) -> Result<Vec<Seen>> {
        self.ask_filters(kinds, user, epoch, targets, true).await
    }

    /// Asks only the targets' filters of this epoch. A filter knows that a user does not like a target, but never that
    /// the user likes it.
    pub async fn filter_answers(
        &self,
        kinds: &KindNames,
        user: UserId,
        epoch: &str,
        targets: &[(Target, Option<Shape>)],
    ) -> Result<Vec<Seen>> {
        self.ask_filters(kinds, user, epoch, targets, false).await
    }

    async fn ask_filters(
        &self,
        kinds: &KindNames,
        user: UserId,
        epoch: &str,
        targets: &[(Target, Option<Shape>)],
        with_clicks: bool,
    ) -> Result<Vec<Seen>> {
        const ACTION: &str = "read recent clicks and filters";
        if targets.is_empty() {
            return Ok(Vec::new());
        }
        let commands = if with_clicks { 3 } else { 1 };
        let mut pipeline = Pipeline::with_capacity(targets.len() * commands);
        let mut calls = Vec::with_capacity(targets.len());
        for (target, shape) in targets {
            let kind = kinds.get(target.kind).unwrap_or_default();
            for key in self.keys.recent(kind, self.keys.bucket(*target)).into_iter().take(commands - 1) {
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
        let answers = self.run(ACTION, &pipeline).await?;
        let (mut seen, mut unloaded) = (Vec::with_capacity(targets.len()), None);
        for (answers, call) in answers.chunks(commands).zip(&calls) {
            let Some((filter, clicks)) = answers.split_last() else { continue };
            let clicks = clicks.iter().cloned().collect::<RedisResult<Vec<Value>>>().context(ACTION)?;
            unloaded = unloaded.or(Some(call).filter(|_| is_unknown_script(filter)));
            let by_filter = match filter {
                Ok(Value::Int(0)) => Seen::Known(false),
                Ok(Value::Array(parts)) => Seen::Unknown(shape(parts)),
                // The filter can't answer, so the caller must ask MySQL.
                _ => Seen::Unknown(None),
            };
            seen.push(clicks.iter().find_map(liked).map_or(by_filter, Seen::Known));
        }
        if let Some(call) = unloaded {
            // The server does not know the script, so the script is loaded for the next page.
            let mut pipeline = Pipeline::new();
            pipeline.add_command(call.command(true));
            self.run(ACTION, &pipeline).await?;
        }
        Ok(seen)
    }
}

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
