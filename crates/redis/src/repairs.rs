//! Repairs counters in Redis. A repair adds the measured drift (the difference from MySQL).

use futures_util::stream::{self, StreamExt, TryStreamExt};
use redis::Value;
use tallyd_core::keys::KindNames;
use tallyd_core::layout::Loaded;
use tallyd_core::model::{CounterKey, Micros};

use super::counters::CALL_IDS_MAX;
use super::{Cache, CacheError, Call, PIPELINE_COMMANDS_MAX, REPAIR, REPAIR_PLAIN, Result};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Repair {
    pub number: CounterKey,
    pub delta: i64,
    /// Whether the repair is allowed to take the number below zero.
    pub below_zero: bool,
    /// If a number of the bucket was set after this instant, the repair is skipped, because the measured difference is
    /// no longer valid.
    pub not_set_since: Option<Micros>,
    pub loaded: Loaded,
    /// The latest instant at which the repair can run, by Redis' clock.
    pub until: Micros,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Repaired {
    Done,
    /// The repair was skipped, because the number would have gone below zero.
    BelowZero,
    /// The repair was skipped, because the bucket was changed since the sample, or because the repair was too late. The
    /// next run measures the drift again.
    Stale,
}

impl Repair {
    fn text(&self) -> String {
        let only = self.not_set_since.map_or_else(String::new, |cut| format!("@{}", cut.0));
        // The script reads a plain number fastest.
        format!("{}{only}{}", self.delta, if self.below_zero && self.delta < 0 { "!" } else { "" })
    }
}

impl Repaired {
    pub const ALL: [Self; 3] = [Self::Done, Self::BelowZero, Self::Stale];

    pub fn name(self) -> &'static str {
        match self {
            Self::Done => "done",
            Self::BelowZero => "below-zero",
            Self::Stale => "stale",
        }
    }
}

impl Cache {
    /// One call for each bucket, with at most [`CALL_IDS_MAX`] repairs; further ones are [`Repaired::Stale`]. Each call
    /// must have a different `pass`. Never retried: a call that timed out may still run late, and adds nothing twice.
    pub async fn repair(
        &self,
        kinds: &KindNames,
        pass: u64,
        repairs: &[Repair],
    ) -> Result<Vec<(CounterKey, Repaired)>> {
        let bucket = |repair: &Repair| (repair.number.0.kind, self.keys.bucket(repair.number.0));
        let mut sorted = repairs.to_vec();
        sorted.sort_by_cached_key(bucket);
        let buckets: Vec<&[Repair]> = sorted.chunk_by(|one, other| bucket(one) == bucket(other)).collect();
        let pieces = buckets.chunks(PIPELINE_COMMANDS_MAX).map(|some| self.repair_buckets(kinds, pass, some));
        let pieces: Vec<_> = pieces.collect();
        // While Redis runs one pipeline, this task builds the next one.
        let done: Vec<Vec<_>> = stream::iter(pieces).buffered(2).try_collect().await?;
        done.into_iter().flatten().collect()
    }

    async fn repair_buckets(
        &self,
        kinds: &KindNames,
        pass: u64,
        buckets: &[&[Repair]],
    ) -> Result<Vec<Result<(CounterKey, Repaired)>>> {
        const ACTION: &str = "repair counters";
        let mut groups = Vec::new();
        for members in buckets {
            let Some(first) = members.first() else { continue };
            let (target, _) = first.number;
            let Some(name) = kinds.get(target.kind) else { continue };
            // If the numbers of a bucket were read in two samples, the bucket may have changed between these samples.
            // If the bucket was in another state in a later sample, the repairs from that sample are not applied.
            let (now, later): (Vec<Repair>, Vec<Repair>) =
                members.iter().partition(|repair| repair.loaded == first.loaded);
            // Each bucket gets only one call. The call changes the bucket's state, so a second call could not compare
            // this state with the sample.
            let (now, more) = now.split_at(now.len().min(CALL_IDS_MAX));
            let script = if self.is_packed() { &REPAIR } else { &REPAIR_PLAIN };
            let call = Call::new(script, self.keys.counters(name, self.keys.bucket(target)))
                .arg(first.loaded.to_string())
                .arg(first.loaded.repaired(pass).to_string())
                .number(now.iter().map(|repair| repair.until.0).min().unwrap_or(0));
            let call = now.iter().fold(call, |call, repair| {
                let (target, metric) = repair.number;
                let call = if self.is_packed() {
                    call.number(target.id)
                } else {
                    call.key(self.keys.place(name, target, metric).key)
                };
                call.arg(self.keys.part(metric)).arg(repair.text())
            });
            groups.push((call, (now.to_vec(), [more, later.as_slice()].concat())));
        }
        let (calls, groups): (Vec<Call>, Vec<_>) = groups.into_iter().unzip();
        let mut done = Vec::new();
        for ((now, later), answer) in groups.iter().zip(self.eval_each(ACTION, &calls).await?) {
            let results = match answer {
                Ok(Value::Array(results)) => results,
                Ok(answer) => return Err(CacheError::unexpected(ACTION, &answer)),
                Err(error) => {
                    done.push(Err(error));
                    continue;
                }
            };
            done.extend(now.iter().enumerate().map(|(index, repair)| {
                let result = match results.get(index) {
                    Some(Value::Int(1)) => Repaired::Done,
                    Some(Value::Int(2)) => Repaired::Stale,
                    Some(_) => Repaired::BelowZero,
                    None => Repaired::Stale,
                };
                Ok((repair.number, result))
            }));
            done.extend(later.iter().map(|repair| Ok((repair.number, Repaired::Stale))));
        }
        Ok(done)
    }
}
