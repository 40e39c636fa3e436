//! Counters in Redis: sampled at a cut, repaired by adding, searched for.

use std::collections::BTreeMap;
use std::ops::Range;

use redis::{Pipeline, Value};

use super::keys::{KindNames, LOADED, MARKED, SET_AT};
use super::layout::{Form, Layout, Loaded};
use super::{COUNT_NUMBERS, Cache, Call, REPAIR, REPAIR_PLAIN, Result, SAMPLE, SAMPLE_PLAIN, text, unexpected};
use crate::marks::Marks;
use crate::model::{Kind, Metric, Micros, Target, TargetId};

/// Ids that one call of a script names at most: Lua's stack holds about 8,000.
pub const CALL_IDS_MAX: usize = 1_000;

/// Keys that one SCAN looks at: some hundred microseconds.
const SCANNED_KEYS: usize = 1_000;

/// A target's number in Redis at a cut.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sample {
    /// The number.
    pub value: i64,
    /// When it was read, by Redis' clock: every like counted in it has an earlier `at`.
    pub cut: Micros,
    /// The state of its bucket then.
    pub loaded: Loaded,
    /// What of each partition's outbox was added to its bucket by then.
    pub marks: Marks,
}

/// How large a bucket is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Size {
    /// Its number.
    pub bucket: u32,
    /// How many targets have a field.
    pub targets: u64,
    /// How many fields it has.
    pub fields: u64,
}

/// What is added to a target's number, and the state of its bucket when that was measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Repair {
    /// The target.
    pub target: Target,
    /// What is added.
    pub delta: i64,
    /// Whether it may take the number below zero.
    pub below_zero: bool,
    /// Only where no number of the bucket was set since: a difference says nothing of a number that was.
    pub not_set_since: Option<Micros>,
    /// The bucket's state at the sample.
    pub loaded: Loaded,
    /// Not after this instant, by Redis' clock.
    pub until: Micros,
}

/// What became of a repair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Repaired {
    /// Added.
    Done,
    /// The number would have gone below zero: left alone.
    BelowZero,
    /// The bucket has changed since the sample, or it was too late: left alone, the next run measures again.
    Stale,
}

impl Repair {
    /// As the script is told.
    fn text(&self) -> String {
        let only = self.not_set_since.map_or_else(String::new, |cut| format!("@{}", cut.0));
        format!("{}{only}{}", self.delta, if self.below_zero { "!" } else { "" })
    }
}

impl Repaired {
    /// Its name in the table `repair`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Done => "done",
            Self::BelowZero => "below-zero",
            Self::Stale => "stale",
        }
    }
}

impl Cache {
    /// Samples `targets`, and gives each one's sample in their order. A target whose kind the configuration doesn't know, or
    /// whose field or bucket holds something else, has none.
    ///
    /// # Errors
    /// Redis is away.
    pub async fn sample(&self, kinds: &KindNames, metric: Metric, targets: &[Target]) -> Result<Vec<Option<Sample>>> {
        const ACTION: &str = "sample counters";
        let mut places: Vec<(Kind, u32, usize)> =
            targets.iter().enumerate().map(|(place, target)| (target.kind, self.keys.bucket(*target), place)).collect();
        places.sort_unstable();
        let (mut calls, mut groups) = (Vec::new(), Vec::new());
        for members in places.chunk_by(|(kind, bucket, _), (other, next, _)| kind == other && bucket == next) {
            let Some((kind, bucket, _)) = members.first() else { continue };
            let Some(name) = kinds.get(*kind) else { continue };
            for piece in members.chunks(CALL_IDS_MAX) {
                let targets = piece.iter().filter_map(|(_, _, place)| targets.get(*place).copied());
                calls.push(self.sample_call(name, *bucket, metric, targets));
                groups.push(piece);
            }
        }
        let mut samples = vec![None; targets.len()];
        for (members, answer) in groups.into_iter().zip(self.eval_each(ACTION, &calls).await?) {
            let answer = match answer {
                Err(error) if error.is_for_ever() => continue,
                answer => answer?,
            };
            let Some(read) = read_sample(&answer, self.keys.layout(), metric, members.len()) else { continue };
            for ((_, _, place), sample) in members.iter().zip(read) {
                if let Some(slot) = samples.get_mut(*place) {
                    *slot = sample;
                }
            }
        }
        Ok(samples)
    }

    fn sample_call(&self, kind: &str, bucket: u32, metric: Metric, targets: impl Iterator<Item = Target>) -> Call {
        let key = self.keys.counters(kind, bucket);
        if self.is_packed() {
            return targets.fold(Call::new(&SAMPLE, key), |call, target| call.number(target.id));
        }
        let call = Call::new(&SAMPLE_PLAIN, key).arg(self.keys.part(metric));
        targets.fold(call, |call, target| call.key(self.keys.place(kind, target, metric).key))
    }

    /// Applies repairs, each bucket's in one call that notes `pass`, a number never used before: at most
    /// [`CALL_IDS_MAX`] of a bucket. Never tried twice: one that timed out may run late.
    ///
    /// # Errors
    /// Redis is away: which of them ran is unknown, and each was added at most once.
    pub async fn repair(
        &self,
        kinds: &KindNames,
        metric: Metric,
        pass: u64,
        repairs: &[Repair],
    ) -> Result<Vec<(Target, Repaired)>> {
        const ACTION: &str = "repair counters";
        let mut groups = Vec::new();
        for ((kind, bucket), members) in self.by_bucket(repairs.iter().map(|repair| (repair.target, *repair))) {
            let (Some(name), Some((_, first))) = (kinds.get(kind), members.first()) else { continue };
            // Targets of one bucket sampled by two calls could have seen two states: only the first one's go.
            let (now, later): (Vec<_>, Vec<_>) = members.iter().partition(|(_, repair)| repair.loaded == first.loaded);
            // One call for each bucket, or the second would no longer be held to what the sample saw.
            let (now, more) = now.split_at(now.len().min(CALL_IDS_MAX));
            let call =
                Call::new(if self.is_packed() { &REPAIR } else { &REPAIR_PLAIN }, self.keys.counters(name, bucket))
                    .arg(first.loaded.to_string())
                    .arg(first.loaded.repaired(pass).to_string())
                    .arg(self.keys.part(metric))
                    .number(now.iter().map(|(_, repair)| repair.until.0).min().unwrap_or(0));
            let call = if self.is_packed() {
                now.iter().fold(call, |call, (target, repair)| call.number(target.id).arg(repair.text()))
            } else {
                now.iter().fold(call, |call, (target, repair)| {
                    call.key(self.keys.place(name, *target, metric).key).arg(repair.text())
                })
            };
            groups.push((call, (now.to_vec(), [more, later.as_slice()].concat())));
        }
        let (calls, groups): (Vec<Call>, Vec<_>) = groups.into_iter().unzip();
        let mut done = Vec::new();
        for ((now, later), answer) in groups.iter().zip(self.eval(ACTION, &calls).await?) {
            let Value::Array(results) = &answer else { return Err(unexpected(ACTION, &answer)) };
            done.extend(now.iter().enumerate().map(|(index, (target, _))| {
                let result = match results.get(index) {
                    Some(Value::Int(1)) => Repaired::Done,
                    Some(Value::Int(2)) => Repaired::Stale,
                    Some(_) => Repaired::BelowZero,
                    None => Repaired::Stale,
                };
                (*target, result)
            }));
            done.extend(later.iter().map(|(target, _)| (*target, Repaired::Stale)));
        }
        Ok(done)
    }

    /// How many fields the largest of these buckets of the kind has.
    ///
    /// # Errors
    /// Redis is away.
    pub async fn largest_bucket(&self, kind: &str, buckets: Range<u32>) -> Result<u64> {
        let sizes = self.bucket_sizes(kind, buckets).await?;
        Ok(sizes.into_iter().map(|size| size.fields).max().unwrap_or(0))
    }

    /// How large these buckets of the kind are.
    ///
    /// # Errors
    /// Redis is away.
    pub async fn bucket_sizes(&self, kind: &str, buckets: Range<u32>) -> Result<Vec<Size>> {
        const ACTION: &str = "count counters";
        let mut sizes = Vec::new();
        for buckets in buckets.collect::<Vec<_>>().chunks(super::PIPELINE_COMMANDS_MAX / 2) {
            let mut pipeline = Pipeline::new();
            for bucket in buckets {
                let key = self.keys.counters(kind, *bucket);
                pipeline.cmd("HLEN").arg(&key).cmd("HMGET").arg(key).arg(LOADED).arg(MARKED).arg(SET_AT);
            }
            let answers = self.run(ACTION, &pipeline).await?;
            for (bucket, answers) in buckets.iter().zip(answers.chunks_exact(2)) {
                let failed = answers.iter().find_map(|answer| answer.as_ref().err());
                match failed.map(|source| super::CacheError { action: ACTION, source: source.clone() }) {
                    Some(error) if error.is_for_ever() => continue,
                    Some(error) => return Err(error),
                    None => {}
                }
                let [Ok(Value::Int(fields)), Ok(Value::Array(beside))] = answers else {
                    return Err(unexpected(ACTION, &Value::Nil));
                };
                let fields = u64::try_from(*fields).unwrap_or(0);
                let targets = fields.saturating_sub(count_beside(beside));
                sizes.push(Size { bucket: *bucket, targets, fields });
            }
        }
        Ok(sizes)
    }

    /// How many targets' numbers of the metric are not zero in each of these buckets of the kind, in the layout packed.
    ///
    /// # Errors
    /// Redis is away.
    pub async fn count_numbers(&self, kind: &str, metric: Metric, buckets: Range<u32>) -> Result<Vec<(u32, u64)>> {
        const ACTION: &str = "count counters";
        let mut counts = Vec::new();
        for buckets in pieces(buckets) {
            let call = |bucket| Call::new(&COUNT_NUMBERS, self.keys.counters(kind, bucket)).number(metric.0);
            let calls: Vec<Call> = buckets.clone().map(call).collect();
            for (bucket, answer) in buckets.zip(self.eval_each(ACTION, &calls).await?) {
                let answer = match answer {
                    Err(error) if error.is_for_ever() => continue,
                    answer => answer?,
                };
                let Value::Int(count) = answer else { return Err(unexpected(ACTION, &answer)) };
                counts.push((bucket, u64::try_from(count).unwrap_or(0)));
            }
        }
        Ok(counts)
    }

    /// The targets whose number of the metric is not zero in these buckets of the kind, in the layout packed.
    ///
    /// # Errors
    /// Redis is away.
    pub async fn targets_in(&self, kind: (&str, Kind), metric: Metric, buckets: &[u32]) -> Result<Vec<Target>> {
        const ACTION: &str = "list counters";
        let mut pipeline = Pipeline::new();
        for bucket in buckets {
            pipeline.cmd("HGETALL").arg(self.keys.counters(kind.0, *bucket));
        }
        let mut targets = Vec::new();
        for answer in self.run(ACTION, &pipeline).await? {
            let answer = match answer.map_err(|source| super::CacheError { action: ACTION, source }) {
                Err(error) if error.is_for_ever() => continue,
                answer => answer?,
            };
            let Value::Array(fields) = &answer else { return Err(unexpected(ACTION, &answer)) };
            targets.extend(fields.chunks_exact(2).filter_map(|pair| {
                let [id, value] = pair else { return None };
                let id = TargetId(text(id)?.parse().ok()?);
                self.numbers_in(text(value)?, &[metric]).next().map(|_| Target { kind: kind.1, id })
            }));
        }
        targets.sort_unstable();
        Ok(targets)
    }

    /// The numbers that are not zero in a field.
    pub(super) fn numbers_in<'a>(&self, field: &'a str, metrics: &'a [Metric]) -> impl Iterator<Item = (Metric, i64)> {
        let layout = self.keys.layout();
        metrics
            .iter()
            .filter_map(move |metric| Some((*metric, layout.value(field, *metric)?)))
            .filter(|(_, number)| *number != 0)
    }

    /// Some targets of the kind that have a key of their own, and where to go on; no place where that was all. A target may come twice. For
    /// the layouts `entity` and `string`; there are none of the others.
    ///
    /// # Errors
    /// Redis is away.
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
        let answer = answer.map_err(|source| super::CacheError { action: ACTION, source })?;
        let Value::Array(parts) = &answer else { return Err(unexpected(ACTION, &answer)) };
        let [next, Value::Array(found)] = parts.as_slice() else { return Err(unexpected(ACTION, &answer)) };
        let next = text(next).ok_or_else(|| unexpected(ACTION, &answer))?;
        let targets = found.iter().filter_map(|key| self.keys.target(text(key)?, kind, metric)).collect();
        Ok((targets, (next != "0").then(|| next.to_owned())))
    }

    /// Whether buckets hold the numbers.
    pub fn is_packed(&self) -> bool {
        self.keys.layout().form == Form::Packed
    }

    fn by_bucket<T>(&self, targets: impl Iterator<Item = (Target, T)>) -> BTreeMap<(Kind, u32), Vec<(Target, T)>> {
        let mut buckets: BTreeMap<_, Vec<_>> = BTreeMap::new();
        for (target, with) in targets {
            buckets.entry((target.kind, self.keys.bucket(target))).or_default().push((target, with));
        }
        buckets
    }
}

/// Cuts `buckets` into ranges of as many as one pipeline holds.
pub(super) fn pieces(buckets: Range<u32>) -> impl Iterator<Item = Range<u32>> {
    let Range { start, end } = buckets;
    (start..end)
        .step_by(super::PIPELINE_COMMANDS_MAX)
        .map(move |from| from..end.min(from.saturating_add(super::PIPELINE_COMMANDS_MAX as u32)))
}

/// How many fields of a bucket are no targets', by its fields `_`, `_o` and `_s`.
pub(super) fn count_beside(beside: &[Value]) -> u64 {
    let field = |place: usize| beside.get(place).and_then(text);
    // `_o` itself, the marks that it counts, and the one for what reconciles correct.
    let marks = field(1).and_then(|count| count.parse::<u64>().ok()).map_or(0, |count| count.saturating_add(2));
    marks.saturating_add(u64::from(field(0).is_some())).saturating_add(u64::from(field(2).is_some()))
}

/// Reads what lua/sample.lua returns of `members` targets. A field that holds something else has no sample, and so is
/// unknown: it is nobody's to repair.
pub(super) fn read_sample(
    answer: &Value,
    layout: &Layout,
    metric: Metric,
    members: usize,
) -> Option<Vec<Option<Sample>>> {
    let Value::BulkString(bytes) = answer else { return None };
    let mut parts = bytes.split(|byte| *byte == 0);
    let cut = Micros(std::str::from_utf8(parts.next()?).ok()?.parse().ok()?);
    let loaded = Loaded::parse(std::str::from_utf8(parts.next()?).ok()?)?;
    let mut fields: Vec<&[u8]> = parts.collect();
    let marks = Marks::parse(std::str::from_utf8(fields.pop()?).ok()?);
    if fields.len() != members {
        // One of the fields holds a separator: then nobody knows which is whose.
        return Some(vec![None; members]);
    }
    let marks = marks?;
    let sample = |field: &&[u8]| {
        let value = layout.value(std::str::from_utf8(field).ok()?, metric)?;
        Some(Sample { value, cut, loaded, marks: marks.clone() })
    };
    Some(fields.iter().map(sample).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_are_read_and_what_is_no_number_has_none() {
        let packed = Layout::new(Form::Packed, 13, "").unwrap();
        let read = |text: &str, members| {
            let samples = read_sample(&Value::BulkString(text.replace('|', "\0").into()), &packed, Metric(1), members)?;
            Some(samples.iter().map(|sample| sample.as_ref().map(|sample| sample.value)).collect::<Vec<_>>())
        };
        assert_eq!(read("7||5||x|-3,1|", 4), Some(vec![Some(5), Some(0), None, Some(-3)]));
        assert_eq!(read("7|3:9|5|5|0:1", 1), Some(vec![None]), "a separator in a field");
        let bytes = Value::BulkString(b"7\x00\x005\x00\xff\x000:7,2:9".to_vec());
        let samples = read_sample(&bytes, &packed, Metric(1), 2).unwrap();
        let first = samples[0].as_ref().unwrap();
        assert_eq!((first.value, first.marks.of(2)), (5, 9));
        assert_eq!(samples[1], None, "a field that is no text");
        for junk in ["7|junk|5|", "x||5|", "7||5|junk"] {
            assert_eq!(read(junk, 1), None, "{junk}");
        }
    }
}
