//! Numbers as readers see them, and the buckets that they found missing.

use redis::{Pipeline, Value};

use super::keys::{KindNames, LOADED};
use super::layout::{self, Loaded};
use super::{Cache, CacheError, Result, text, unexpected};
use crate::model::{Kind, Metric, Target};

/// How long what readers find missing stays noted, in seconds.
const MISSING_KEPT_S: u64 = 3_600;

/// A target's number as a reader sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Number {
    /// It is this.
    Known(i64),
    /// Unknown, not zero: Redis is still getting the bucket back, or the field holds no numbers, or the configuration
    /// doesn't know the kind.
    Unknown,
    /// Unknown, not zero: Redis has lost the bucket.
    Missing,
}

impl Number {
    /// The number, where it is known.
    pub fn known(self) -> Option<i64> {
        if let Self::Known(number) = self { Some(number) } else { None }
    }
}

impl Cache {
    /// The numbers of `targets`, in their order.
    ///
    /// # Errors
    /// Redis is away.
    pub async fn read(&self, kinds: &KindNames, metric: Metric, targets: &[Target]) -> Result<Vec<Number>> {
        const ACTION: &str = "read counters";
        let mut numbers = vec![Number::Unknown; targets.len()];
        let known: Vec<(usize, Target, &str)> = targets
            .iter()
            .enumerate()
            .filter_map(|(place, target)| Some((place, *target, kinds.get(target.kind)?)))
            .collect();
        for some in known.chunks(super::PIPELINE_COMMANDS_MAX) {
            let mut pipeline = Pipeline::new();
            for (_, target, kind) in some {
                let key = self.keys.counters(kind, self.keys.bucket(*target));
                pipeline.cmd("HMGET").arg(key).arg(LOADED).arg(target.id.0);
            }
            for ((place, ..), answer) in some.iter().zip(self.run(ACTION, &pipeline).await?) {
                let answer = answer.map_err(|source| CacheError { action: ACTION, source })?;
                let Value::Array(parts) = &answer else { return Err(unexpected(ACTION, &answer)) };
                if let Some(number) = numbers.get_mut(*place) {
                    *number = read_number(parts, metric);
                }
            }
        }
        Ok(numbers)
    }

    /// Notes that the buckets of `targets` are missing: a daemon looks at them within seconds.
    ///
    /// # Errors
    /// Redis is away.
    pub async fn note_missing(&self, kinds: &KindNames, targets: impl Iterator<Item = Target>) -> Result<()> {
        const ACTION: &str = "note missing buckets";
        let mut names: Vec<String> = targets
            .filter_map(|target| Some(format!("{}:{:x}", kinds.get(target.kind)?, self.keys.bucket(target))))
            .collect();
        names.sort_unstable();
        names.dedup();
        for some in names.chunks(super::PIPELINE_COMMANDS_MAX) {
            let mut pipeline = Pipeline::new();
            pipeline.cmd("SADD").arg(self.keys.missing()).arg(some);
            // Without a daemon nobody would take them out.
            pipeline.cmd("EXPIRE").arg(self.keys.missing()).arg(MISSING_KEPT_S);
            self.run(ACTION, &pipeline).await?;
        }
        Ok(())
    }

    /// Takes up to `limit` buckets out of those that were noted, with the names of their kinds. What is no bucket is dropped.
    ///
    /// # Errors
    /// Redis is away.
    pub async fn take_missing(&self, kinds: &KindNames, limit: usize) -> Result<Vec<(Kind, u32)>> {
        const ACTION: &str = "read which buckets are missing";
        let mut pipeline = Pipeline::new();
        pipeline.cmd("SPOP").arg(self.keys.missing()).arg(limit);
        let answer = self.run(ACTION, &pipeline).await?.pop().unwrap_or(Ok(Value::Nil));
        let answer = answer.map_err(|source| CacheError { action: ACTION, source })?;
        let (Value::Array(members) | Value::Set(members)) = &answer else { return Err(unexpected(ACTION, &answer)) };
        let read = |member: &Value| {
            let (kind, bucket) = text(member)?.rsplit_once(':')?;
            let bucket = u32::from_str_radix(bucket, 16).ok().filter(|bucket| *bucket < self.keys.buckets())?;
            Some((kinds.named(kind)?, bucket))
        };
        Ok(members.iter().filter_map(read).collect())
    }
}

/// The number in an answer to `HMGET bucket _ id`.
fn read_number(parts: &[Value], metric: Metric) -> Number {
    let [loaded, field] = parts else { return Number::Unknown };
    let number = |field: &Value| layout::value(text(field)?, metric);
    match (loaded, text(loaded).and_then(Loaded::parse), field) {
        (Value::Nil, ..) => Number::Missing,
        (_, Some(Loaded::Yes { .. }), Value::Nil) => Number::Known(0),
        (_, Some(Loaded::Yes { .. }), field) => number(field).map_or(Number::Unknown, Number::Known),
        _ => Number::Unknown,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_loaded_is_unknown_and_never_zero() {
        let text = |text: &str| Value::BulkString(text.into());
        for (loaded, field, expected) in [
            (text("3:9"), text("5"), Number::Known(5)),
            (text("3:9"), Value::Nil, Number::Known(0)),
            (text("3:9"), text("junk"), Number::Unknown),
            (text("~3:9"), text("5"), Number::Unknown),
            (text("~3:9"), Value::Nil, Number::Unknown),
            (Value::Nil, text("5"), Number::Missing),
            (Value::Nil, Value::Nil, Number::Missing),
            (text("junk"), text("5"), Number::Unknown),
        ] {
            assert_eq!(read_number(&[loaded.clone(), field.clone()], Metric(1)), expected, "{loaded:?}, {field:?}");
        }
    }
}
