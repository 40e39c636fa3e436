//! Buckets that Redis has lost: found, marked, and said to be loaded again.

use std::collections::HashMap;

use redis::{Pipeline, Value};

use super::counters::pieces;
use super::keys::LOADED;
use super::layout::Loaded;
use super::{Cache, Call, LOAD, Result, text, unexpected};
use crate::marks::Marks;
use crate::model::{Kind, Metric, Micros, Target, TargetId};

/// Buckets that are being loaded.
#[derive(Clone, Debug, Default)]
pub struct Lost {
    /// Each one's number and cut: when it was marked, by Redis' clock.
    pub buckets: Vec<(u32, Micros)>,
    /// What they held at their cuts, where it was not zero.
    pub held: HashMap<(Target, Metric), i64>,
    /// The first bucket that was not looked at.
    pub next: u32,
}

/// What a look at buckets finds.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Unloaded {
    /// How many of them nobody has loaded.
    pub lost: u64,
    /// Keys that hold something else than a bucket.
    pub foreign: Vec<String>,
}

impl Cache {
    /// Looks for buckets of the kind that nobody has loaded.
    ///
    /// # Errors
    /// Redis is away.
    pub async fn unloaded(&self, kind: &str, buckets: impl Iterator<Item = u32>) -> Result<Unloaded> {
        const ACTION: &str = "look for buckets that are not loaded";
        let mut unloaded = Unloaded::default();
        for buckets in buckets.collect::<Vec<_>>().chunks(super::PIPELINE_COMMANDS_MAX) {
            let mut pipeline = Pipeline::new();
            for bucket in buckets {
                pipeline.cmd("HGET").arg(self.keys.counters(kind, *bucket)).arg(LOADED);
            }
            for (bucket, answer) in buckets.iter().zip(self.run(ACTION, &pipeline).await?) {
                let loaded = match answer.map_err(|source| super::CacheError { action: ACTION, source }) {
                    Ok(Value::Nil) => Some(Loaded::No),
                    Ok(answer) => text(&answer).and_then(Loaded::parse),
                    Err(error) if error.is_for_ever() => None,
                    Err(error) => return Err(error),
                };
                match loaded {
                    Some(Loaded::Yes { .. }) => {}
                    Some(_) => unloaded.lost += 1,
                    None => unloaded.foreign.push(self.keys.counters(kind, *bucket)),
                }
            }
        }
        Ok(unloaded)
    }

    /// Marks buckets of the kind, `from` this one on, that nobody has loaded as being loaded by `run`, and gives what they
    /// hold of `metrics` at that instant: all of them, unless they hold more than `fields_max` numbers. `outbox` is the last number of each
    /// partition's outbox, read before: what these rows have is part of what is loaded, and never added to the buckets afterwards.
    ///
    /// # Errors
    /// Redis is away, or a bucket holds what isn't ours.
    pub async fn begin_load(
        &self,
        (name, kind): (&str, Kind),
        metrics: &[Metric],
        run: u64,
        from: u32,
        fields_max: usize,
        outbox: &Marks,
    ) -> Result<Lost> {
        const ACTION: &str = "mark buckets";
        let mut lost = Lost { next: self.keys.buckets(), ..Lost::default() };
        for buckets in pieces(from..self.keys.buckets()) {
            let next = buckets.end;
            let call =
                |bucket| Call::new(&LOAD, self.keys.counters(name, bucket)).arg("begin").number(run).number(outbox);
            let calls: Vec<Call> = buckets.clone().map(call).collect();
            for (bucket, answer) in buckets.zip(self.eval_each(ACTION, &calls).await?) {
                let answer = match answer {
                    // It is no bucket.
                    Err(error) if error.is_for_ever() => continue,
                    answer => answer?,
                };
                let Value::Array(parts) = &answer else { return Err(unexpected(ACTION, &answer)) };
                let [cut, fields @ ..] = parts.as_slice() else { continue };
                let cut = text(cut).and_then(|cut| cut.parse().ok()).ok_or_else(|| unexpected(ACTION, &answer))?;
                lost.buckets.push((bucket, Micros(cut)));
                for pair in fields.chunks_exact(2) {
                    let [id, value] = pair else { continue };
                    let id = text(id).and_then(|id| id.parse().ok()).map(TargetId);
                    let (Some(id), Some(value)) = (id, text(value)) else { continue };
                    let numbers = self.numbers_in(value, metrics);
                    lost.held.extend(numbers.map(|(metric, number)| ((Target { kind, id }, metric), number)));
                }
            }
            if lost.held.len() > fields_max {
                lost.next = next;
                break;
            }
        }
        Ok(lost)
    }

    /// Marks those of `buckets` that `run` was loading, and that weren't flushed since, as loaded; says how many.
    ///
    /// # Errors
    /// Redis is away.
    pub async fn end_load(&self, name: &str, run: u64, buckets: &[u32]) -> Result<u64> {
        let call = |bucket: &u32| Call::new(&LOAD, self.keys.counters(name, *bucket)).arg("end").number(run);
        let calls: Vec<Call> = buckets.iter().map(call).collect();
        let answers = self.eval("mark buckets", &calls).await?;
        Ok(answers.iter().filter(|answer| **answer == Value::Int(1)).count() as u64)
    }

    /// Says that nobody has loaded the kind's buckets, and how many of them somebody had.
    ///
    /// # Errors
    /// Redis is away.
    pub async fn unload(&self, kind: &str) -> Result<u64> {
        const ACTION: &str = "mark buckets";
        let mut unloaded = 0;
        for buckets in pieces(0..self.keys.buckets()) {
            let mut pipeline = Pipeline::new();
            for bucket in buckets {
                pipeline.cmd("HDEL").arg(self.keys.counters(kind, bucket)).arg(LOADED);
            }
            for answer in self.run(ACTION, &pipeline).await? {
                match answer.map_err(|source| super::CacheError { action: ACTION, source }) {
                    Err(error) if error.is_for_ever() => {}
                    answer => unloaded += u64::from(answer? == Value::Int(1)),
                }
            }
        }
        Ok(unloaded)
    }
}
