//! Reads numbers of targets, for API servers and other readers.

use redis::{Pipeline, Value};
use tallyd_core::keys::{KindNames, LOADED};
use tallyd_core::layout::{Layout, Loaded};
use tallyd_core::model::{Metric, Target};

use super::{Cache, CacheError, Call, Context, Result, SAMPLE_PLAIN, text};

const ACTION: &str = "read counters from Redis";

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Found {
    Known(Vec<i64>),
    /// The numbers are unknown, not zero. Redis is still loading the bucket, the field is not a list of numbers, or the
    /// configuration doesn't contain the kind.
    Unknown,
    /// The numbers are unknown, not zero. Redis has lost the bucket.
    Missing,
}

impl Cache {
    pub async fn read(&self, kinds: &KindNames, metrics: &[Metric], targets: &[Target]) -> Result<Vec<Found>> {
        let mut found = vec![Found::Unknown; targets.len()];
        let known: Vec<(usize, Target, &str)> = targets
            .iter()
            .enumerate()
            .filter_map(|(place, target)| Some((place, *target, kinds.get(target.kind)?)))
            .collect();
        for some in known.chunks(super::PIPELINE_COMMANDS_MAX) {
            let answers = if self.is_packed() {
                self.read_packed(some).await?
            } else {
                // Each target is read by one script. With two commands, the number would look like zero if Redis were
                // flushed between these commands.
                let calls: Vec<Call> =
                    some.iter().map(|(_, target, kind)| self.read_call(kind, *target, metrics)).collect();
                self.eval(ACTION, &calls).await?
            };
            for ((place, ..), answer) in some.iter().zip(answers) {
                let read = read_found(self.keys.layout(), metrics, &answer)
                    .ok_or_else(|| CacheError::unexpected(ACTION, &answer))?;
                if let Some(slot) = found.get_mut(*place) {
                    *slot = read;
                }
            }
        }
        Ok(found)
    }

    async fn read_packed(&self, targets: &[(usize, Target, &str)]) -> Result<Vec<Value>> {
        let mut pipeline = Pipeline::with_capacity(targets.len());
        for (_, target, kind) in targets {
            let bucket = self.keys.counters(kind, self.keys.bucket(*target));
            pipeline.cmd("HMGET").arg(bucket).arg(LOADED).arg(target.id.0);
        }
        let answers = self.run(ACTION, &pipeline).await?.into_iter().collect::<redis::RedisResult<Vec<Value>>>();
        answers.context(ACTION)
    }

    fn read_call(&self, kind: &str, target: Target, metrics: &[Metric]) -> Call {
        let bucket = self.keys.counters(kind, self.keys.bucket(target));
        let places = metrics.iter().map(|metric| self.keys.place(kind, target, *metric));
        places.fold(Call::new(&SAMPLE_PLAIN, bucket), |call, place| call.key(place.key).arg(place.part))
    }
}

pub(super) fn read_found(layout: &Layout, metrics: &[Metric], answer: &Value) -> Option<Found> {
    let (loaded, numbers): (&str, Vec<Option<i64>>) = match answer {
        Value::Array(parts) => {
            let [loaded, field] = parts.as_slice() else { return None };
            let field = if *field == Value::Nil { Some("") } else { text(field) };
            let number = |metric: &Metric| layout.value(field?, *metric);
            (if *loaded == Value::Nil { "" } else { text(loaded)? }, metrics.iter().map(number).collect())
        }
        Value::BulkString(bytes) => {
            let mut parts = bytes.split(|byte| *byte == 0).map(|part| std::str::from_utf8(part).ok()).skip(1);
            let loaded = parts.next()??;
            let mut number = |metric: &Metric| layout.value(parts.next()??, *metric);
            (loaded, metrics.iter().map(&mut number).collect())
        }
        _ => return None,
    };
    Some(match Loaded::parse(loaded) {
        Some(Loaded::No) => Found::Missing,
        Some(Loaded::Yes { .. }) => numbers.into_iter().collect::<Option<_>>().map_or(Found::Unknown, Found::Known),
        _ => Found::Unknown,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use tallyd_core::layout::Form;

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
            let found = read_found(&packed, &[Metric(1), Metric(2)], &answer);
            assert_eq!(found, Some(expected), "{loaded:?}, {field:?}");
        }
    }

    #[test]
    fn a_key_of_its_own_is_read_with_its_bucket() {
        let plain = Layout::new(Form::String, 13, "").unwrap();
        for (answer, expected) in [
            ("7|3:9|5|", Found::Known(vec![5, 0])),
            ("7|3:9|5|?", Found::Unknown),
            ("7|3:9|5", Found::Unknown),
            ("7|~3:9|5|1", Found::Unknown),
            ("7||5|1", Found::Missing),
        ] {
            let text = Value::BulkString(answer.replace('|', "\0").into());
            assert_eq!(read_found(&plain, &[Metric(1), Metric(2)], &text), Some(expected), "{answer}");
        }
        assert_eq!(read_found(&plain, &[Metric(1)], &Value::Okay), None);
    }
}
