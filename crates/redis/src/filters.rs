//! What others than the filters' job do with Bloom filters (decision 0046): the outbox notes users beside a filter,
//! and an erase finds and deletes filters. `crates/filters` builds them.
//!
//! A call that arrives twice or late is harmless.

use std::collections::{BTreeMap, BTreeSet};

use redis::{Pipeline, RedisResult, Value};
use tallyd_core::bloom::Shape;
use tallyd_core::keys::KindNames;
use tallyd_core::model::{Target, UserId};

use super::refused::{CallOutcome, Refused, read_each};
use super::{Cache, Call, Context, FILTER_NOTE, Result, text};

const NOTE_USERS: usize = 1_000;

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
            if let (CallOutcome::Refused(error), Some((target, users))) = (outcome, of_calls.get::<usize>(place)) {
                refused.note_call(*users, &error);
                broken.insert(*target);
            }
            Ok(())
        };
        let noted = read_each(self.eval_each(ACTION, &calls).await?, read);
        self.drop_filters(kinds, &broken.into_iter().collect::<Vec<_>>()).await?;
        noted.map(|()| refused)
    }

    pub fn filter_keys(&self, kinds: &KindNames, target: Target) -> [String; 3] {
        self.keys.filter(kinds.get(target.kind).unwrap_or_default(), target)
    }

    pub fn next_filter_key(&self, kinds: &KindNames, target: Target) -> String {
        self.keys.next_filter(kinds.get(target.kind).unwrap_or_default(), target)
    }
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
