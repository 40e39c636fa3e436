//! Finds buckets that Redis has lost, marks these buckets as being loaded, and later marks them as loaded
//! (decision 0026).

use std::collections::{HashMap, HashSet};
use std::num::NonZeroI64;

use redis::{Pipeline, Value};
use tallyd_core::keys::LOADED;
use tallyd_core::layout::Loaded;
use tallyd_core::model::{CounterKey, Kind, Metric, Micros, Target, TargetId};
use tallyd_core::outbox::OutboxOffsets;

use super::counters::pieces;
use super::{Cache, CacheError, Call, Context, LOAD, Result, text};

/// The maximum number of buckets in one load. The daemon keeps 16 bytes in memory for each bucket.
const BUCKETS_MAX: u32 = 1 << 22;

#[derive(Clone, Debug, Default)]
pub struct Lost {
    pub from: u32,
    /// By Redis' clock, from the bucket `from` on. `None` if the bucket is already loaded.
    pub cuts: Vec<Option<NonZeroI64>>,
    pub values: HashMap<CounterKey, i64>,
    /// The targets whose field is not a list of numbers, because someone wrote to the field by hand.
    pub unreadable: HashSet<Target>,
}

impl Lost {
    pub fn next(&self) -> u32 {
        // The count of cuts is at most `BUCKETS_MAX`.
        self.from.saturating_add(u32::try_from(self.cuts.len()).unwrap_or(u32::MAX))
    }

    pub fn buckets(&self) -> impl Iterator<Item = (u32, Micros)> {
        (self.from..).zip(&self.cuts).filter_map(|(bucket, cut)| Some((bucket, Micros(cut.as_ref()?.get()))))
    }
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Unloaded {
    pub lost: u64,
    pub foreign: Vec<String>,
}

impl Cache {
    pub async fn unloaded(&self, kind: &str, buckets: impl Iterator<Item = u32>) -> Result<Unloaded> {
        const ACTION: &str = "look for buckets that are not loaded";
        let (mut unloaded, mut buckets) = (Unloaded::default(), buckets.peekable());
        while buckets.peek().is_some() {
            let some: Vec<u32> = buckets.by_ref().take(super::PIPELINE_COMMANDS_MAX).collect();
            let mut pipeline = Pipeline::new();
            for bucket in &some {
                pipeline.cmd("HGET").arg(self.keys.counters(kind, *bucket)).arg(LOADED);
            }
            for (bucket, answer) in some.iter().zip(self.run(ACTION, &pipeline).await?) {
                let loaded = match answer.context(ACTION) {
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

    /// Marks the buckets as being loaded by `run`, and returns their numbers at that instant. Checks at most four
    /// million buckets, and stops early after `fields_max` numbers. `outbox` has the last row of each outbox, read
    /// before: the load contains all rows up to these, so the daemon never adds them afterwards.
    pub async fn begin_load(
        &self,
        (name, kind): (&str, Kind),
        metrics: &[Metric],
        run: u64,
        from: u32,
        fields_max: usize,
        outbox: &OutboxOffsets,
    ) -> Result<Lost> {
        const ACTION: &str = "mark buckets";
        let mut lost = Lost { from, ..Lost::default() };
        let until = self.keys.buckets().min(from.saturating_add(BUCKETS_MAX));
        for buckets in pieces(from..until) {
            let call =
                |bucket| Call::new(&LOAD, self.keys.counters(name, bucket)).arg("begin").number(run).number(outbox);
            let calls: Vec<Call> = buckets.map(call).collect();
            for answer in self.eval_each(ACTION, &calls).await? {
                let answer = match answer {
                    // The key is not a bucket.
                    Err(error) if error.is_for_ever() => {
                        lost.cuts.push(None);
                        continue;
                    }
                    answer => answer?,
                };
                let Value::Array(parts) = &answer else { return Err(CacheError::unexpected(ACTION, &answer)) };
                let [cut, fields @ ..] = parts.as_slice() else {
                    lost.cuts.push(None);
                    continue;
                };
                let cut = text(cut)
                    .and_then(|cut| cut.parse().ok())
                    .ok_or_else(|| CacheError::unexpected(ACTION, &answer))?;
                lost.cuts.push(Some(cut));
                for pair in fields.chunks_exact(2) {
                    let [id, value] = pair else { continue };
                    let id = text(id).and_then(|id| id.parse().ok()).map(TargetId);
                    let (Some(id), Some(value)) = (id, text(value)) else { continue };
                    let target = Target { kind, id };
                    if metrics.iter().any(|metric| self.keys.layout().value(value, *metric).is_none()) {
                        lost.unreadable.insert(target);
                    }
                    let numbers = self.numbers_in(value, metrics);
                    lost.values.extend(numbers.map(|(metric, number)| ((target, metric), number)));
                }
            }
            if lost.values.len() + lost.unreadable.len() > fields_max {
                break;
            }
        }
        Ok(lost)
    }

    /// Marks `buckets` as loaded. The call skips buckets that `run` was not loading, and buckets that Redis has lost
    /// since the load began. Returns the count of marked buckets.
    pub async fn end_load(&self, name: &str, run: u64, buckets: impl Iterator<Item = u32>) -> Result<u64> {
        let call = |bucket| Call::new(&LOAD, self.keys.counters(name, bucket)).arg("end").number(run);
        let (mut ended, mut calls) = (0, buckets.map(call).peekable());
        while calls.peek().is_some() {
            let some: Vec<Call> = calls.by_ref().take(super::PIPELINE_COMMANDS_MAX).collect();
            let answers = self.eval("mark buckets", &some).await?;
            ended += answers.iter().filter(|answer| **answer == Value::Int(1)).count() as u64;
        }
        Ok(ended)
    }

    pub async fn unload(&self, kind: &str) -> Result<u64> {
        const ACTION: &str = "mark buckets";
        let mut unloaded = 0;
        for buckets in pieces(0..self.keys.buckets()) {
            let mut pipeline = Pipeline::new();
            for bucket in buckets {
                pipeline.cmd("HDEL").arg(self.keys.counters(kind, bucket)).arg(LOADED);
            }
            for answer in self.run(ACTION, &pipeline).await? {
                match answer.context(ACTION) {
                    Err(error) if error.is_for_ever() => {}
                    answer => unloaded += u64::from(answer? == Value::Int(1)),
                }
            }
        }
        Ok(unloaded)
    }
}
