//! The outbox, added to Redis: each row once in each bucket, however often and however late a call runs (crates/redis/lua/apply.lua).

use std::collections::BTreeMap;

use redis::Value;
use tallyd_core::keys::KindNames;
use tallyd_core::model::{Addition, Kind};

use super::{APPLY, Cache, CacheError, Call, PIPELINE_COMMANDS_MAX, Result, text};

/// A row of an outbox, or what of it is for one bucket: its number, and what it adds.
pub type Row = (u64, Vec<Addition>);

/// Rows of one partition's outbox that are being added, bucket by bucket.
pub struct Applying {
    /// One for each bucket with all that the rows have for it: a second one would find the mark raised.
    calls: Vec<Call>,
    /// The row before them, and theirs.
    numbers: (u64, Vec<u64>),
    left: Left,
    failed: Option<CacheError>,
}

/// What was left alone: no later call could add it. A reconcile finds it off or unknown.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Left {
    /// Additions to kinds or metrics that the configuration doesn't know.
    pub unknown: u64,
    /// Numbers that are something else, by somebody's hand.
    pub no_numbers: u64,
    /// Buckets that are no hashes, by somebody's hand.
    pub no_buckets: u64,
    /// Buckets whose mark names a row that MySQL doesn't have: it went back to an older state. To these the rows are added.
    pub unknown_marks: u64,
}

impl Applying {
    /// Whether no row between the first and the last has the number.
    fn is_unknown(&self, mark: u64) -> bool {
        let (after, rows) = &self.numbers;
        mark > *after && rows.last().is_some_and(|last| mark < *last) && rows.binary_search(&mark).is_err()
    }

    /// Whether all calls were sent.
    pub fn is_done(&self) -> bool {
        self.calls.is_empty()
    }

    /// What was left alone, once all calls were sent.
    ///
    /// # Errors
    /// One of the calls failed, while others may have run: all rows must be added again.
    pub fn ended(self) -> Result<Left> {
        self.failed.map_or(Ok(self.left), Err)
    }
}

impl Cache {
    /// What adds those rows of a partition's outbox, which are in the order of their numbers and all that follow `after`. Nothing is sent
    /// yet.
    pub fn applying(&self, kinds: &KindNames, partition: u16, after: u64, rows: &[Row]) -> Applying {
        let mut left = Left::default();
        let mut buckets: BTreeMap<(Kind, u32), Vec<Row>> = BTreeMap::new();
        for (number, additions) in rows {
            for addition in additions {
                let is_named = self.is_packed() || !self.keys.metric(addition.metric).is_empty();
                if kinds.get(addition.target.kind).is_none() || !is_named {
                    left.unknown += 1;
                    continue;
                }
                let bucket = (addition.target.kind, self.keys.bucket(addition.target));
                let rows = buckets.entry(bucket).or_default();
                match rows.last_mut().filter(|(last, _)| last == number) {
                    Some((_, additions)) => additions.push(*addition),
                    None => rows.push((*number, vec![*addition])),
                }
            }
        }
        let call = |((kind, bucket), rows): ((Kind, u32), Vec<Row>)| {
            Some(self.apply_call(kinds.get(kind)?, bucket, partition, &rows))
        };
        let numbers = (after, rows.iter().map(|(number, _)| *number).collect());
        Applying { calls: buckets.into_iter().filter_map(call).collect(), numbers, left, failed: None }
    }

    fn apply_call(&self, kind: &str, bucket: u32, partition: u16, rows: &[Row]) -> Call {
        let mut call = Call::new(&APPLY, self.keys.counters(kind, bucket)).number(partition);
        // By key, its place in KEYS.
        let mut keys: BTreeMap<String, usize> = BTreeMap::new();
        for (number, additions) in rows {
            call = call.number(number).number(additions.len());
            for Addition { target, metric, delta } in additions {
                if self.is_packed() {
                    call = call.number(target.id).number(metric.0).number(delta);
                    continue;
                }
                let place = self.keys.place(kind, *target, *metric);
                let next = keys.len() + 2;
                let position = *keys.entry(place.key.clone()).or_insert(next);
                if position == next {
                    call = call.key(place.key);
                }
                call = call.number(position).arg(place.part).number(delta);
            }
        }
        call
    }

    /// Sends as many of the calls as one pipeline holds. One that fails keeps none of the others from being sent: a node of a Cluster may be
    /// away.
    ///
    /// # Errors
    /// Redis is away: any of them may have run, or may run late.
    pub async fn apply_some(&self, applying: &mut Applying) -> Result<()> {
        const ACTION: &str = "add the outbox to counters";
        let rest = applying.calls.split_off(applying.calls.len().min(PIPELINE_COMMANDS_MAX));
        let now = std::mem::replace(&mut applying.calls, rest);
        for answer in self.eval_each(ACTION, &now).await? {
            match answer {
                Ok(Value::Int(-1)) => applying.left.no_buckets += 1,
                Ok(answer) => match read_applied(&answer) {
                    Some((left, mark)) => {
                        applying.left.no_numbers += left;
                        applying.left.unknown_marks += u64::from(applying.is_unknown(mark));
                    }
                    None => applying.failed = Some(CacheError::unexpected(ACTION, &answer)),
                },
                Err(error) => applying.failed = Some(error),
            }
        }
        Ok(())
    }
}

/// What crates/redis/lua/apply.lua says: how many numbers it left alone, and the bucket's mark before.
fn read_applied(answer: &Value) -> Option<(u64, u64)> {
    let Value::Array(parts) = answer else { return None };
    let [Value::Int(left), mark] = parts.as_slice() else { return None };
    Some((left.unsigned_abs(), text(mark)?.parse().ok()?))
}
