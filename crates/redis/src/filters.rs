//! Bloom filters in Redis: reads their state, builds new filters, replaces old filters, and adds users (decision 0046).
//!
//! Every call that changes a filter contains the number of the run, or the expected shape (size and hash count) of the
//! filter. If the run or the shape is outdated, the call does nothing. So a call that arrives twice or late is
//! harmless.

use std::collections::{BTreeMap, BTreeSet};

use redis::{Pipeline, RedisResult, Value};
use tallyd_core::bloom::{self, Shape};
use tallyd_core::keys::KindNames;
use tallyd_core::model::{Target, UserId};

use super::refused::{Outcome, Refused, read_each};
use super::{
    Cache, CacheError, Call, Context, FILTER_BEGIN, FILTER_EPOCH, FILTER_FOLD, FILTER_NOTE, FILTER_SWAP, FILTER_WRITE,
    Result, text,
};

/// The maximum number of bytes that one call appends. The limit keeps Redis responsive.
pub const PIECE_BYTES: usize = 64 << 10;

/// The number of pieces that are in flight at the same time.
const PIECES_AT_ONCE: usize = 8;

const FOLD_USERS: usize = 100;

const NOTE_USERS: usize = 1_000;

const SCAN_COUNT: u64 = 1_000;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FilterState {
    pub shape: Option<Shape>,
    pub expected: u64,
    /// The rate of false positives that the filter was sized for, in Java's number format.
    pub false_positive: String,
    /// How many users were added to the filter. The number includes users who have since unliked the target.
    pub inserted: u64,
    /// The count of further users that may be in the filter, because Redis remembered clicks of these users when the
    /// filter was built.
    pub others: u64,
    /// The number of the run that is building a new filter, or of a run that stopped during the build.
    pub building: Option<u64>,
    /// The epoch in which the filter was built. If the existing filters can no longer be trusted, a run begins a new
    /// epoch. The epoch is the number of that run.
    pub epoch: u64,
    pub waiting: u64,
    pub is_lost: bool,
}

#[derive(Clone, Debug)]
pub struct Built {
    pub run: u64,
    pub shape: Shape,
    pub expected: u64,
    pub false_positive: f64,
    pub users: u64,
    /// The number of users in the filter that were read from the recent clicks in Redis. Some of these users may also be
    /// counted in `users`.
    pub others: u64,
    pub epoch: u64,
}

impl Cache {
    pub async fn filter_states(&self, kinds: &KindNames, targets: &[Target]) -> Result<Vec<Option<FilterState>>> {
        const ACTION: &str = "read the states of filters";
        let mut states: Vec<Option<FilterState>> = Vec::with_capacity(targets.len());
        for some in targets.chunks(super::PIPELINE_COMMANDS_MAX) {
            let mut pipeline = Pipeline::with_capacity(some.len());
            for target in some {
                let [_, config, _] = self.filter_keys(kinds, *target);
                pipeline.cmd("HMGET").arg(config).arg(&FIELDS[..]);
            }
            let answers = self.run(ACTION, &pipeline).await?.into_iter().collect::<RedisResult<Vec<Value>>>();
            let configs = answers.context(ACTION)?;
            // Further commands are sent only for targets with a filter, because most targets have no filter.
            let mut lengths = Pipeline::new();
            for (target, _) in some.iter().zip(&configs).filter(|(_, config)| read_config(config).is_some()) {
                let [filter, _, added] = self.filter_keys(kinds, *target);
                lengths.cmd("STRLEN").arg(filter);
                lengths.cmd("SCARD").arg(added);
            }
            let answers = match lengths.is_empty() {
                true => Ok(Vec::new()),
                false => self.run(ACTION, &lengths).await?.into_iter().collect::<RedisResult<Vec<Value>>>(),
            };
            let lengths = answers.context(ACTION)?;
            let mut lengths = lengths.iter().map(|length| if let Value::Int(length) = length { *length } else { 0 });
            for config in &configs {
                let state = read_config(config).map(|(state, noted)| {
                    let (bytes, waiting) = (lengths.next().unwrap_or(0), lengths.next().unwrap_or(0).unsigned_abs());
                    let is_short = state.shape.is_some_and(|shape| shape.bytes() != bytes.unsigned_abs());
                    FilterState { waiting, is_lost: is_short || waiting < noted, ..state }
                });
                states.push(state);
            }
        }
        Ok(states)
    }

    /// From then on, scripts note users who like these targets beside the filter, until [`Cache::fold_filter`]. Returns
    /// the count of targets, which is smaller only if a later run has begun.
    pub async fn begin_filters(&self, kinds: &KindNames, run: u64, targets: &[Target]) -> Result<usize> {
        let call = |target: &Target| {
            let [_, config, _] = self.filter_keys(kinds, *target);
            Call::new(&FILTER_BEGIN, config).key(self.next_filter_key(kinds, *target)).number(run)
        };
        let calls: Vec<Call> = targets.iter().map(call).collect();
        let answers = self.eval("begin to build filters", &calls).await?;
        Ok(answers.iter().filter(|answer| **answer == Value::Int(1)).count())
    }

    /// Finds the users whose last remembered click on the target was a like, and calls `each` with every such user. The
    /// newer hash of clicks is read first, because this hash can become the older hash between the two reads.
    pub async fn recent_likers(&self, kinds: &KindNames, target: Target, mut each: impl FnMut(UserId)) -> Result<()> {
        const ACTION: &str = "read recent likes";
        let kind = kinds.get(target.kind).unwrap_or_default();
        let prefix = format!("{}:", target.id);
        for key in self.keys.recent(kind, self.keys.bucket(target)) {
            let scan = |cursor: &str| {
                let mut command = redis::cmd("HSCAN");
                command.arg(&key).arg(cursor).arg("MATCH").arg(format!("{prefix}*")).arg("COUNT").arg(SCAN_COUNT);
                command
            };
            let read = |parts: &[Value]| {
                for pair in parts.chunks(2) {
                    let [field, click] = pair else { continue };
                    let user = text(field).and_then(|field| field.strip_prefix(&prefix)?.parse().ok());
                    if let (Some(user), Some(b'+')) = (user, text(click).and_then(|click| click.as_bytes().last())) {
                        each(UserId(user));
                    }
                }
            };
            self.scan(ACTION, scan, read).await?;
        }
        Ok(())
    }

    /// Appends bytes to a filter that `run` is building. `from` is the number of bytes that the filter has so far.
    /// Returns false if another run builds the filter now, or if an earlier part is missing.
    pub async fn write_filter(
        &self,
        kinds: &KindNames,
        run: u64,
        target: Target,
        from: u64,
        bytes: &[u8],
    ) -> Result<bool> {
        let [_, config, _] = self.filter_keys(kinds, target);
        let next = self.next_filter_key(kinds, target);
        let mut at = from;
        for pieces in bytes.chunks(PIECE_BYTES * PIECES_AT_ONCE) {
            let mut calls = Vec::with_capacity(PIECES_AT_ONCE);
            for piece in pieces.chunks(PIECE_BYTES) {
                let call = Call::new(&FILTER_WRITE, config.clone()).key(next.clone());
                calls.push(call.number(run).number(at).arg(piece));
                at += piece.len() as u64;
            }
            let answers = self.eval("write a filter", &calls).await?;
            if answers.iter().any(|answer| *answer != Value::Int(1)) {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Replaces the old filter with the new one. Returns false and changes nothing if another run builds the filter, or
    /// if Redis has lost a part of the filter.
    pub async fn swap_filter(&self, kinds: &KindNames, target: Target, built: &Built) -> Result<bool> {
        let [filter, config, added] = self.filter_keys(kinds, target);
        let call = Call::new(&FILTER_SWAP, filter).key(config).key(added).key(self.next_filter_key(kinds, target));
        let call =
            call.number(built.run).number(built.shape.size).number(built.shape.iterations).number(built.expected);
        let call = call.arg(bloom::java_double(built.false_positive)).number(built.users).number(built.epoch);
        let call = call.number(built.others);
        let answer = self.eval("replace a filter", &[call]).await?.pop();
        Ok(answer == Some(Value::Int(1)))
    }

    /// Returns the number of users that wait no longer. `None` if the filter has another shape, is being built, or lost
    /// a part.
    pub async fn fold_filter(&self, kinds: &KindNames, target: Target, shape: Shape) -> Result<Option<u64>> {
        const ACTION: &str = "add users to a filter";
        let [filter, config, added] = self.filter_keys(kinds, target);
        let (mut cursor, mut folded) = ("0".to_owned(), 0);
        loop {
            let mut pipeline = Pipeline::new();
            pipeline.cmd("SSCAN").arg(&added).arg(&cursor).arg("COUNT").arg(SCAN_COUNT);
            let (next, members) = self.scanned(ACTION, &pipeline).await?;
            let users: Vec<UserId> = members.iter().filter_map(|user| text(user)?.parse().ok().map(UserId)).collect();
            let call = |users: &[UserId]| {
                let call = Call::new(&FILTER_FOLD, filter.clone()).key(config.clone()).key(added.clone());
                let call = call.number(shape.size).number(shape.iterations);
                users.iter().fold(call, |call, user| shape.bits(*user).fold(call.number(user), Call::number))
            };
            let calls: Vec<Call> = users.chunks(FOLD_USERS).map(call).collect();
            for answer in self.eval(ACTION, &calls).await? {
                let Value::Int(taken) = answer else { return Err(CacheError::unexpected(ACTION, &answer)) };
                let Ok(taken) = u64::try_from(taken) else { return Ok(None) };
                folded += taken;
            }
            if next == "0" {
                return Ok(Some(folded));
            }
            cursor = next;
        }
    }

    /// Makes readers trust only the filters of this epoch, for the next `keep_s` seconds. Returns false if a later run
    /// has already called this function.
    pub async fn trust_filters(&self, run: u64, epoch: u64, keep_s: u64) -> Result<bool> {
        let call = Call::new(&FILTER_EPOCH, self.keys.filter_epoch()).number(run).number(epoch).number(keep_s);
        Ok(self.eval("set which filters are trusted", &[call]).await?.pop() == Some(Value::Int(1)))
    }

    pub async fn filter_epoch(&self) -> Result<String> {
        const ACTION: &str = "read which filters are trusted";
        let mut pipeline = Pipeline::new();
        pipeline.cmd("HGET").arg(self.keys.filter_epoch()).arg("epoch");
        let answer = self.run(ACTION, &pipeline).await?.pop().unwrap_or(Ok(Value::Nil));
        let answer = answer.context(ACTION)?;
        Ok(text(&answer).unwrap_or_default().to_owned())
    }

    pub async fn drop_filters(&self, kinds: &KindNames, targets: &[Target]) -> Result<()> {
        const ACTION: &str = "delete filters";
        for some in targets.chunks(super::PIPELINE_COMMANDS_MAX) {
            let mut pipeline = Pipeline::with_capacity(some.len());
            for target in some {
                let keys = self.filter_keys(kinds, *target);
                pipeline.cmd("UNLINK").arg(&keys).arg(self.next_filter_key(kinds, *target));
            }
            for answer in self.run(ACTION, &pipeline).await? {
                answer.context(ACTION)?;
            }
        }
        Ok(())
    }

    /// Skips targets without a filter. If Redis refuses, deletes the target's filter, because it would give a wrong
    /// "no". Returns the refused users.
    pub async fn note_likers(&self, kinds: &KindNames, likers: &BTreeMap<Target, Vec<UserId>>) -> Result<Refused> {
        const ACTION: &str = "note who likes targets";
        let named = likers.iter().filter_map(|(target, users)| Some((kinds.get(target.kind)?, *target, users)));
        let call = |(kind, target, users): (&str, Target, &[UserId])| {
            let [_, config, added] = self.keys.filter(kind, target);
            let call = users.iter().fold(Call::new(&FILTER_NOTE, config).key(added), Call::number);
            (call, (target, users.len() as u64))
        };
        let calls =
            named.flat_map(|(kind, target, users)| users.chunks(NOTE_USERS).map(move |some| (kind, target, some)));
        let (calls, of_calls): (Vec<Call>, Vec<(Target, u64)>) = calls.map(call).unzip();
        let (mut refused, mut broken) = (Refused::default(), BTreeSet::new());
        let read = |place, outcome| {
            if let (Outcome::Refused(error), Some((target, users))) = (outcome, of_calls.get::<usize>(place)) {
                refused.note_call(*users, &error);
                broken.insert(*target);
            }
            Ok(())
        };
        let noted = read_each(self.eval_each(ACTION, &calls).await?, read);
        self.drop_filters(kinds, &broken.into_iter().collect::<Vec<_>>()).await?;
        noted.map(|()| refused)
    }

    fn filter_keys(&self, kinds: &KindNames, target: Target) -> [String; 3] {
        self.keys.filter(kinds.get(target.kind).unwrap_or_default(), target)
    }

    fn next_filter_key(&self, kinds: &KindNames, target: Target) -> String {
        self.keys.next_filter(kinds.get(target.kind).unwrap_or_default(), target)
    }

    async fn scan(
        &self,
        action: &'static str,
        command: impl Fn(&str) -> redis::Cmd,
        mut read: impl FnMut(&[Value]),
    ) -> Result<()> {
        let mut cursor = "0".to_owned();
        loop {
            let mut pipeline = Pipeline::new();
            pipeline.add_command(command(&cursor));
            let (next, parts) = self.scanned(action, &pipeline).await?;
            read(&parts);
            if next == "0" {
                return Ok(());
            }
            cursor = next;
        }
    }

    async fn scanned(&self, action: &'static str, pipeline: &Pipeline) -> Result<(String, Vec<Value>)> {
        let answer = self.run(action, pipeline).await?.pop().unwrap_or(Ok(Value::Nil));
        let answer = answer.context(action)?;
        let (cursor, found) = read_scan(&answer).ok_or_else(|| CacheError::unexpected(action, &answer))?;
        Ok((cursor.to_owned(), found.to_vec()))
    }
}

pub(super) fn read_scan(answer: &Value) -> Option<(&str, &[Value])> {
    let Value::Array(parts) = answer else { return None };
    let [cursor, Value::Array(found) | Value::Set(found)] = parts.as_slice() else { return None };
    Some((text(cursor)?, found))
}

/// The fields of a filter's config: first Redisson's, then tallyd's own.
const FIELDS: [&str; 9] = [
    "size",
    "hashIterations",
    "expectedInsertions",
    "falseProbability",
    "inserted",
    "building",
    "epoch",
    "waiting",
    "others",
];

pub(super) fn read_config(config: &Value) -> Option<(FilterState, u64)> {
    let Value::Array(fields) = config else { return None };
    if fields.iter().all(|field| *field == Value::Nil) {
        return None;
    }
    let number = |place: usize| fields.get(place).and_then(text).and_then(|number| number.parse::<u64>().ok());
    let shape = number(0).zip(number(1).and_then(|iterations| u32::try_from(iterations).ok()));
    let state = FilterState {
        shape: shape.map(|(size, iterations)| Shape { size, iterations }),
        expected: number(2).unwrap_or(0),
        false_positive: fields.get(3).and_then(text).unwrap_or_default().to_owned(),
        inserted: number(4).unwrap_or(0),
        others: number(8).unwrap_or(0),
        building: number(5),
        epoch: number(6).unwrap_or(0),
        waiting: 0,
        is_lost: false,
    };
    Some((state, number(7).unwrap_or(0)))
}
