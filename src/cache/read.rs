//! Numbers as readers see them.

use redis::{Pipeline, Value};

use super::keys::{KindNames, LOADED};
use super::layout::{Form, Layout, Loaded};
use super::{Cache, CacheError, Result, text, unexpected};
use crate::model::{Metric, Target};

/// What a reader finds of a target.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Found {
    /// These numbers, in the order of the metrics that were asked for.
    Known(Vec<i64>),
    /// Unknown, not zero: Redis is still getting the bucket back, or what it holds is no numbers, or the configuration
    /// doesn't know the kind.
    Unknown,
    /// Unknown, not zero: Redis has lost the bucket.
    Missing,
}

impl Cache {
    /// The numbers of `targets`, in their order: in one round trip for each hundreds of them.
    ///
    /// # Errors
    /// Redis is away.
    pub async fn read(&self, kinds: &KindNames, metrics: &[Metric], targets: &[Target]) -> Result<Vec<Found>> {
        const ACTION: &str = "read counters";
        let mut found = vec![Found::Unknown; targets.len()];
        let known: Vec<(usize, Target, &str)> = targets
            .iter()
            .enumerate()
            .filter_map(|(place, target)| Some((place, *target, kinds.get(target.kind)?)))
            .collect();
        let commands = if self.is_packed() { 1 } else { 2 };
        for some in known.chunks(super::PIPELINE_COMMANDS_MAX / commands) {
            let mut pipeline = Pipeline::with_capacity(some.len() * commands);
            for (_, target, kind) in some {
                self.ask_for(&mut pipeline, (*target, kind), metrics);
            }
            let answers = self.run(ACTION, &pipeline).await?.into_iter().collect::<redis::RedisResult<Vec<Value>>>();
            let answers = answers.map_err(|source| CacheError { action: ACTION, source })?;
            for ((place, ..), answers) in some.iter().zip(answers.chunks(commands)) {
                let read = read_found(self.keys.layout(), metrics, answers).ok_or_else(|| {
                    let answer = answers.iter().find(|answer| !matches!(answer, Value::Nil | Value::BulkString(_)));
                    unexpected(ACTION, answer.unwrap_or(&Value::Nil))
                })?;
                if let Some(slot) = found.get_mut(*place) {
                    *slot = read;
                }
            }
        }
        Ok(found)
    }

    fn ask_for(&self, pipeline: &mut Pipeline, (target, kind): (Target, &str), metrics: &[Metric]) {
        let keys = &self.keys;
        let bucket = keys.counters(kind, keys.bucket(target));
        match keys.layout().form {
            Form::Packed => {
                pipeline.cmd("HMGET").arg(bucket).arg(LOADED).arg(target.id.0);
            }
            Form::Entity => {
                pipeline.cmd("HGET").arg(bucket).arg(LOADED);
                let fields: Vec<&str> = metrics.iter().map(|metric| keys.metric(*metric)).collect();
                // One hash for all metrics.
                let key = metrics.first().map(|metric| keys.place(kind, target, *metric).key);
                pipeline.cmd("HMGET").arg(key).arg(fields);
            }
            Form::String => {
                pipeline.cmd("HGET").arg(bucket).arg(LOADED);
                let names: Vec<String> = metrics.iter().map(|metric| keys.place(kind, target, *metric).key).collect();
                pipeline.cmd("MGET").arg(names);
            }
        }
    }
}

/// What one target's answers say; none where they are something else.
fn read_found(layout: &Layout, metrics: &[Metric], answers: &[Value]) -> Option<Found> {
    let one;
    let (loaded, numbers): (&Value, Vec<Option<i64>>) = match answers {
        [Value::Array(parts)] => {
            let [loaded, field] = parts.as_slice() else { return None };
            one = loaded.clone();
            (&one, metrics.iter().map(|metric| number(layout, field, *metric)).collect())
        }
        [loaded, Value::Array(fields)] => {
            (loaded, metrics.iter().zip(fields).map(|(metric, field)| number(layout, field, *metric)).collect())
        }
        _ => return None,
    };
    Some(match (loaded, text(loaded).and_then(Loaded::parse)) {
        (Value::Nil, _) => Found::Missing,
        (_, Some(Loaded::Yes { .. })) => {
            numbers.into_iter().collect::<Option<_>>().map_or(Found::Unknown, Found::Known)
        }
        _ => Found::Unknown,
    })
}

fn number(layout: &Layout, field: &Value, metric: Metric) -> Option<i64> {
    if *field == Value::Nil { Some(0) } else { layout.value(text(field)?, metric) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(text: &str) -> Value {
        if text.is_empty() { Value::Nil } else { Value::BulkString(text.into()) }
    }

    #[test]
    fn what_is_not_loaded_is_unknown_and_never_zero() {
        let packed = Layout::new(Form::Packed, 13, "").unwrap();
        for (loaded, field, expected) in [
            ("3:9", "5,2", Found::Known(vec![5, 2])),
            ("3:9", "5", Found::Known(vec![5, 0])),
            ("3:9", "", Found::Known(vec![0, 0])),
            ("3:9", "junk", Found::Unknown),
            ("~3:9", "5", Found::Unknown),
            ("~3:9", "", Found::Unknown),
            ("", "5", Found::Missing),
            ("", "", Found::Missing),
            ("junk", "5", Found::Unknown),
        ] {
            let answer = Value::Array(vec![text(loaded), text(field)]);
            let found = read_found(&packed, &[Metric(1), Metric(2)], &[answer]);
            assert_eq!(found, Some(expected), "{loaded:?}, {field:?}");
        }
    }

    #[test]
    fn a_key_of_its_own_is_read_with_its_bucket() {
        let plain = Layout::new(Form::String, 13, "").unwrap();
        for (loaded, numbers, expected) in [
            ("3:9", ["5", ""], Found::Known(vec![5, 0])),
            ("3:9", ["5", "x"], Found::Unknown),
            ("~3:9", ["5", "1"], Found::Unknown),
            ("", ["5", "1"], Found::Missing),
        ] {
            let answers = [text(loaded), Value::Array(numbers.map(text).into())];
            let found = read_found(&plain, &[Metric(1), Metric(2)], &answers);
            assert_eq!(found, Some(expected), "{loaded:?}, {numbers:?}");
        }
        assert_eq!(read_found(&plain, &[Metric(1)], &[Value::Okay]), None);
    }
}
