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

/// Buckets that are being loaded.
#[derive(Clone, Debug, Default)]
pub struct Lost {
    /// The first bucket that was checked.
    pub from: u32,
    /// The cuts of the buckets. The first cut belongs to the bucket `from`. A cut is the instant, by Redis' clock, at
    /// which the call marked the bucket. The cut is `None` if the bucket is already loaded.
    pub cuts: Vec<Option<NonZeroI64>>,
    /// The nonzero numbers that each bucket contained at the bucket's cut.
    pub held: HashMap<CounterKey, i64>,
    /// The targets whose field is not a list of numbers, because someone wrote to the field by hand.
    pub unreadable: HashSet<Target>,
}

impl Lost {
    /// Returns the first bucket that was not checked.
    pub fn next(&self) -> u32 {
        // The count of cuts is at most `BUCKETS_MAX`.
        self.from.saturating_add(u32::try_from(self.cuts.len()).unwrap_or(u32::MAX))
    }

    /// Returns the marked buckets, each with its cut.
    pub fn buckets(&self) -> impl Iterator<Item = (u32, Micros)> {
        (self.from..).zip(&self.cuts).filter_map(|(bucket, cut)| Some((bucket, Micros(cut.as_ref()?.get()))))
    }
}

/// The result of a search for buckets that are not loaded.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Unloaded {
    /// How many buckets are not loaded.
    pub lost: u64,
    /// The names of keys that should contain a bucket but contain something else.
    pub foreign: Vec<String>,
}

impl Cache {
    /// Finds buckets of the kind that are not loaded.
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

    /// Finds buckets of the kind that are not loaded, starting at the bucket `from`. Marks each of these buckets as
    /// being loaded by `run`. Returns the numbers that each bucket contained at that instant for `metrics`. One call
    /// checks at most four million buckets. The call stops early if the buckets contain more than `fields_max` numbers.
    /// `outbox` contains the number of the last row of each partition's outbox, read before this call. The load
    /// contains all rows up to these numbers, so the daemon never adds these rows to the buckets afterwards.
    ///
    /// # Errors
    ///
    /// Redis failed to answer, or returned an unexpected answer.
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
                    lost.held.extend(numbers.map(|(metric, number)| ((target, metric), number)));
                }
            }
            if lost.held.len() + lost.unreadable.len() > fields_max {
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

    /// Marks all buckets of the kind as not loaded. Returns how many buckets were loaded before.
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
