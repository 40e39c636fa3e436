//! Functions that read samples of counters in Redis, and search for counters.

use std::ops::Range;

use redis::{Pipeline, Value};
use tallyd_core::drift::Sample;
use tallyd_core::keys::KindNames;
use tallyd_core::layout::{Form, Layout, Loaded};
use tallyd_core::model::{CounterKey, Kind, Metric, Micros, Target, TargetId};
use tallyd_core::outbox::OutboxOffsets;

use super::{COUNT_NUMBERS, Cache, CacheError, Call, Context, Result, SAMPLE, SAMPLE_PLAIN, text};

/// The maximum number of ids in one call of a script. The limit exists because Lua's stack holds only about 8,000
/// values.
pub const CALL_IDS_MAX: usize = 1_000;

/// Keys per SCAN. One SCAN of this size takes a few hundred microseconds.
const SCANNED_KEYS: usize = 1_000;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Size {
    pub fields: u64,
    pub numbers: u64,
}

impl Cache {
    /// In the order of `numbers`. `None` if the kind is unknown, the field is not a list of numbers, or the key is not
    /// a bucket. Neighbouring numbers of a target are read together.
    pub async fn sample(&self, kinds: &KindNames, numbers: &[CounterKey]) -> Result<Vec<Option<Sample>>> {
        const ACTION: &str = "sample counters";
        let mut places: Vec<(Kind, u32, usize)> = numbers
            .iter()
            .enumerate()
            .map(|(place, (target, _))| (target.kind, self.keys.bucket(*target), place))
            .collect();
        places.sort_unstable();
        let (mut calls, mut groups) = (Vec::new(), Vec::new());
        for members in places.chunk_by(|(kind, bucket, _), (other, next, _)| kind == other && bucket == next) {
            let Some((kind, bucket, _)) = members.first() else { continue };
            let Some(name) = kinds.get(*kind) else { continue };
            for piece in members.chunks(CALL_IDS_MAX) {
                let places = piece.iter().map(|(.., place)| *place);
                let known = places.filter_map(|place| Some((place, *numbers.get(place)?)));
                let (call, members) = self.sample_call(name, *bucket, known);
                calls.push(call);
                groups.push(members);
            }
        }
        let mut samples = vec![None; numbers.len()];
        for (members, answer) in groups.into_iter().zip(self.eval_each(ACTION, &calls).await?) {
            let answer = match answer {
                Err(error) if error.is_for_ever() => continue,
                answer => answer?,
            };
            let metrics: Vec<(usize, Metric)> = members.iter().map(|(_, field, metric)| (*field, *metric)).collect();
            let Some(read) = read_sample(&answer, self.keys.layout(), &metrics) else { continue };
            for ((place, ..), sample) in members.iter().zip(read) {
                if let Some(slot) = samples.get_mut(*place) {
                    *slot = sample;
                }
            }
        }
        Ok(samples)
    }

    fn sample_call(
        &self,
        kind: &str,
        bucket: u32,
        numbers: impl Iterator<Item = (usize, CounterKey)>,
    ) -> (Call, Vec<(usize, usize, Metric)>) {
        let key = self.keys.counters(kind, bucket);
        let mut members: Vec<(usize, usize, Metric)> = Vec::new();
        if !self.is_packed() {
            let mut call = Call::new(&SAMPLE_PLAIN, key);
            for (place, (target, metric)) in numbers {
                members.push((place, members.len(), metric));
                call = call.key(self.keys.place(kind, target, metric).key).arg(self.keys.part(metric));
            }
            return (call, members);
        }
        let (mut call, mut last, mut fields) = (Call::new(&SAMPLE, key), None, 0);
        for (place, (target, metric)) in numbers {
            if last != Some(target) {
                call = call.number(target.id);
                (last, fields) = (Some(target), fields + 1);
            }
            members.push((place, fields - 1, metric));
        }
        (call, members)
    }

    pub async fn largest_bucket(&self, kind: &str, buckets: Range<u32>) -> Result<u64> {
        const ACTION: &str = "count counters";
        let mut largest = 0;
        for buckets in pieces(buckets) {
            let mut pipeline = Pipeline::new();
            for bucket in buckets {
                pipeline.cmd("HLEN").arg(self.keys.counters(kind, bucket));
            }
            for answer in self.run(ACTION, &pipeline).await? {
                let answer = match answer.context(ACTION) {
                    Err(error) if error.is_for_ever() => continue,
                    answer => answer?,
                };
                let Value::Int(fields) = answer else { return Err(CacheError::unexpected(ACTION, &answer)) };
                largest = largest.max(u64::try_from(fields).unwrap_or(0));
            }
        }
        Ok(largest)
    }

    pub async fn bucket_sizes(&self, kind: &str, metrics: &[Metric], buckets: Range<u32>) -> Result<Vec<Size>> {
        const ACTION: &str = "count counters";
        let mut sizes = Vec::with_capacity(buckets.len());
        for buckets in pieces(buckets) {
            let call = |bucket| {
                let call = Call::new(&COUNT_NUMBERS, self.keys.counters(kind, bucket));
                metrics.iter().fold(call, |call, metric| call.number(metric.0))
            };
            let calls: Vec<Call> = buckets.map(call).collect();
            for answer in self.eval_each(ACTION, &calls).await? {
                let answer = match answer {
                    // The key is not a bucket.
                    Err(error) if error.is_for_ever() => {
                        sizes.push(Size { fields: 0, numbers: 0 });
                        continue;
                    }
                    answer => answer?,
                };
                let Value::Array(counts) = &answer else { return Err(CacheError::unexpected(ACTION, &answer)) };
                let [Value::Int(fields), Value::Int(numbers)] = counts.as_slice() else {
                    return Err(CacheError::unexpected(ACTION, &answer));
                };
                sizes.push(Size { fields: fields.unsigned_abs(), numbers: numbers.unsigned_abs() });
            }
        }
        Ok(sizes)
    }

    pub async fn numbers_of(&self, kind: (&str, Kind), metrics: &[Metric], buckets: &[u32]) -> Result<Vec<CounterKey>> {
        const ACTION: &str = "list counters";
        let mut pipeline = Pipeline::new();
        for bucket in buckets {
            pipeline.cmd("HGETALL").arg(self.keys.counters(kind.0, *bucket));
        }
        let mut numbers = Vec::new();
        for answer in self.run(ACTION, &pipeline).await? {
            let answer = match answer.context(ACTION) {
                Err(error) if error.is_for_ever() => continue,
                answer => answer?,
            };
            let Value::Array(fields) = &answer else { return Err(CacheError::unexpected(ACTION, &answer)) };
            for pair in fields.chunks_exact(2) {
                let [id, value] = pair else { continue };
                let id = text(id).and_then(|id| id.parse().ok()).map(TargetId);
                let (Some(id), Some(value)) = (id, text(value)) else { continue };
                let target = Target { kind: kind.1, id };
                numbers.extend(self.numbers_in(value, metrics).map(|(metric, _)| (target, metric)));
            }
        }
        numbers.sort_unstable();
        Ok(numbers)
    }

    pub(super) fn numbers_in<'a>(&self, field: &'a str, metrics: &'a [Metric]) -> impl Iterator<Item = (Metric, i64)> {
        let layout = self.keys.layout();
        metrics
            .iter()
            .filter_map(move |metric| Some((*metric, layout.value(field, *metric)?)))
            .filter(|(_, number)| *number != 0)
    }

    /// Only for `entity` and `string`. A target can appear twice.
    pub async fn scan_targets(
        &self,
        kind: (&str, Kind),
        metric: Metric,
        from: &str,
    ) -> Result<(Vec<Target>, Option<String>)> {
        const ACTION: &str = "search for counters";
        let Some(pattern) = self.keys.pattern(kind.0, metric) else { return Ok((Vec::new(), None)) };
        let mut pipeline = Pipeline::new();
        pipeline.cmd("SCAN").arg(from).arg("MATCH").arg(pattern).arg("COUNT").arg(SCANNED_KEYS);
        let answer = self.run(ACTION, &pipeline).await?.pop().unwrap_or(Ok(Value::Nil));
        let answer = answer.context(ACTION)?;
        let Value::Array(parts) = &answer else { return Err(CacheError::unexpected(ACTION, &answer)) };
        let [next, Value::Array(found)] = parts.as_slice() else { return Err(CacheError::unexpected(ACTION, &answer)) };
        let next = text(next).ok_or_else(|| CacheError::unexpected(ACTION, &answer))?;
        let targets = found.iter().filter_map(|key| self.keys.target(text(key)?, kind, metric)).collect();
        Ok((targets, (next != "0").then(|| next.to_owned())))
    }

    pub fn is_packed(&self) -> bool {
        self.keys.layout().form == Form::Packed
    }
}

pub(super) fn pieces(buckets: Range<u32>) -> impl Iterator<Item = Range<u32>> {
    let Range { start, end } = buckets;
    (start..end)
        .step_by(super::PIPELINE_COMMANDS_MAX)
        .map(move |from| from..end.min(from.saturating_add(super::PIPELINE_COMMANDS_MAX as u32)))
}

/// `numbers` has the place of each number's field in the answer, and its metric. The daemon never repairs a number
/// without a sample.
pub(super) fn read_sample(answer: &Value, layout: &Layout, numbers: &[(usize, Metric)]) -> Option<Vec<Option<Sample>>> {
    let Value::BulkString(bytes) = answer else { return None };
    let mut parts = bytes.split(|byte| *byte == 0);
    let cut = Micros(std::str::from_utf8(parts.next()?).ok()?.parse().ok()?);
    let loaded = Loaded::parse(std::str::from_utf8(parts.next()?).ok()?)?;
    let mut fields: Vec<&[u8]> = parts.collect();
    let offsets = OutboxOffsets::parse(std::str::from_utf8(fields.pop()?).ok()?);
    if fields.len() != numbers.last().map_or(0, |(field, _)| field + 1) {
        // One of the fields contains a separator, so it is unclear which part belongs to which target.
        return Some(vec![None; numbers.len()]);
    }
    let offsets = offsets?;
    let sample = |(field, metric): &(usize, Metric)| {
        let value = layout.value(std::str::from_utf8(fields.get(*field)?).ok()?, *metric)?;
        Some(Sample { value, cut, loaded, offsets: offsets.clone() })
    };
    Some(numbers.iter().map(sample).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_are_read_and_what_is_no_number_has_none() {
        let packed = Layout::new(Form::Packed, 13, "").unwrap();
        let members = |count: usize| (0..count).map(|field| (field, Metric(1))).collect::<Vec<_>>();
        let read = |text: &str, count| {
            let answer = Value::BulkString(text.replace('|', "\0").into());
            let samples = read_sample(&answer, &packed, &members(count))?;
            Some(samples.iter().map(|sample| sample.as_ref().map(|sample| sample.value)).collect::<Vec<_>>())
        };
        assert_eq!(read("7||5||x|-3,1|", 4), Some(vec![Some(5), Some(0), None, Some(-3)]));
        assert_eq!(read("7|3:9|5|5|0:1", 1), Some(vec![None]), "a separator in a field");
        let bytes = Value::BulkString(b"7\x00\x005\x00\xff\x000:7,2:9".to_vec());
        let samples = read_sample(&bytes, &packed, &members(2)).unwrap();
        let first = samples[0].as_ref().unwrap();
        assert_eq!((first.value, first.offsets.of(2)), (5, 9));
        assert_eq!(samples[1], None, "a field that is no text");
        let two = Value::BulkString(b"7\x00\x005,8\x00".to_vec());
        let both = read_sample(&two, &packed, &[(0, Metric(1)), (0, Metric(2))]).unwrap();
        assert_eq!(both.iter().flatten().map(|sample| sample.value).collect::<Vec<_>>(), [5, 8], "of one target");
        for junk in ["7|junk|5|", "x||5|", "7||5|junk"] {
            assert_eq!(read(junk, 1), None, "{junk}");
        }
    }
}
