//! Adds outbox rows to Redis. Each bucket gets each row once, even if a call runs twice or late
//! (crates/redis/lua/apply.lua).
//!
//! In the layout packed, one call adds to several buckets the sums over all rows of the pass (decision 0021). If a
//! bucket already has some of these rows, the script only returns its mark, and another call has the rows after it.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::fmt::Write;

use redis::Value;
use tallyd_core::keys::KindNames;
use tallyd_core::model::{Addition, Kind, TargetId};
use tallyd_core::outbox::Accepts;

use super::refused::{CallOutcome, read_each};
use super::{APPLY, APPLY_PLAIN, Cache, CacheError, Call, Result, text};

/// An outbox row: its number and its additions. Some lists contain only the row's additions to one bucket.
pub type Row = (u64, Vec<Addition>);

pub type Bucket = (Kind, u32);

type Sum = (Bucket, TargetId, u8, i64);

/// Buckets per call. With this limit, the script blocks other commands for only a fraction of a millisecond.
const CALL_BUCKETS_MAX: usize = 32;

const SENT_BUCKETS_MAX: usize = 500;

pub struct Applying<'r> {
    pass: Pass<'r>,
    calls: VecDeque<BucketCall>,
    partly: HashMap<Bucket, u64>,
    left: Left,
    behind: BTreeSet<Bucket>,
    is_answered: bool,
    failed: Result<()>,
}

pub struct Applied {
    pub left: Left,
    /// The buckets that can lack some of the rows. All other buckets have all rows.
    pub behind: BTreeSet<Bucket>,
    pub is_answered: bool,
    /// The first error of a call that must be sent again.
    pub failed: Result<()>,
}

#[derive(Clone, Copy)]
struct Pass<'r> {
    kinds: &'r KindNames,
    partition: u16,
    /// The numbers of all rows are higher than this number.
    after: u64,
    rows: &'r [Row],
}

/// All additions to a bucket must be in the same call, because the first call raises the bucket's mark, and a second
/// call would be skipped.
struct BucketCall {
    call: Call,
    buckets: Vec<Bucket>,
}

/// Counts the additions that were skipped. A later call could not make these additions either. A reconcile reports the
/// affected numbers as drifted or unknown.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Left {
    pub unknown: u64,
    /// The number of targets or numbers that were skipped, because someone changed their field by hand to a text
    /// without numbers.
    pub no_numbers: u64,
    /// The number of buckets that are not hashes or have an invalid mark, because someone wrote to the key by hand.
    pub no_buckets: u64,
    /// After MySQL went back to an older state, a bucket's mark can be a row number that does not exist in MySQL. This
    /// is the number of such buckets. The rows are added to these buckets.
    pub unknown_marks: u64,
}

impl Pass<'_> {
    fn last(&self) -> u64 {
        self.rows.last().map_or(self.after, |(number, _)| *number)
    }

    /// Returns true if `mark` is above `after` and below the last row's number, but is not the number of any row.
    fn is_unknown(&self, mark: u64) -> bool {
        mark > self.after && mark < self.last() && self.rows.binary_search_by_key(&mark, |(number, _)| *number).is_err()
    }
}

impl Applying<'_> {
    pub fn is_done(&self) -> bool {
        self.calls.is_empty() && self.partly.is_empty()
    }

    /// Sends nothing to these buckets, because they lack earlier rows.
    #[must_use]
    pub fn without(mut self, behind: &BTreeSet<Bucket>) -> Self {
        let lacks = |call: &BucketCall| call.buckets.iter().any(|bucket| behind.contains(bucket));
        let (unsent, calls): (VecDeque<_>, VecDeque<_>) = self.calls.into_iter().partition(lacks);
        // A call is left out as a whole. On a Cluster it is for only one bucket.
        self.behind = unsent.into_iter().flat_map(|call| call.buckets).collect();
        self.is_answered = calls.is_empty();
        self.calls = calls;
        self
    }

    /// All calls must have been sent.
    pub fn ended(self) -> Applied {
        let Self { left, behind, is_answered, failed, .. } = self;
        Applied { left, behind, is_answered, failed }
    }

    fn next_calls(&mut self) -> Vec<BucketCall> {
        let mut buckets = 0;
        let fits = |call: &&BucketCall| {
            buckets += call.buckets.len();
            buckets <= SENT_BUCKETS_MAX
        };
        let count = self.calls.iter().take_while(fits).count();
        self.calls.drain(..count).collect()
    }
}

impl Cache {
    /// The rows must be sorted by number, and all numbers must be above `after`.
    pub fn applying<'r>(&self, kinds: &'r KindNames, partition: u16, after: u64, rows: &'r [Row]) -> Applying<'r> {
        let pass = Pass { kinds, partition, after, rows };
        let all = rows.iter().flat_map(|(_, additions)| additions);
        let unknown = all.filter(|addition| self.bucket_of(kinds, addition).is_none()).count() as u64;
        let calls = if self.is_packed() { self.sum_calls(&pass, None) } else { self.row_calls(&pass) };
        let left = Left { unknown, ..Left::default() };
        let (partly, is_answered) = (HashMap::new(), calls.is_empty());
        Applying { pass, calls: calls.into(), partly, left, behind: BTreeSet::new(), is_answered, failed: Ok(()) }
    }

    pub fn buckets_of(&self, kinds: &KindNames, rows: &[Row]) -> BTreeSet<Bucket> {
        let all = rows.iter().flat_map(|(_, additions)| additions);
        all.filter_map(|addition| self.bucket_of(kinds, addition)).collect()
    }

    fn bucket_of(&self, kinds: &KindNames, Addition { target, metric, .. }: &Addition) -> Option<Bucket> {
        let is_named = self.is_packed() || !self.keys.metric(*metric).is_empty();
        let is_known = is_named && kinds.get(target.kind).is_some();
        is_known.then(|| (target.kind, self.keys.bucket(*target)))
    }

    /// Only the buckets in `marks`, if given, and for each only the rows after its mark.
    fn sum_calls(&self, pass: &Pass<'_>, marks: Option<&HashMap<Bucket, u64>>) -> Vec<BucketCall> {
        let mark_of = |bucket| marks.map_or(Some(pass.after), |marks| marks.get(&bucket).copied());
        let mut additions = Vec::new();
        for (number, of_row) in pass.rows {
            for addition in of_row {
                let Some(bucket) = self.bucket_of(pass.kinds, addition) else { continue };
                if mark_of(bucket).is_some_and(|mark| *number > mark) {
                    additions.push((bucket, addition.target.id, addition.metric.0, addition.delta));
                }
            }
        }
        additions.sort_unstable();
        let buckets_max = if self.needs_one_slot() { 1 } else { CALL_BUCKETS_MAX };
        let (mut calls, mut mark_before) = (Vec::<BucketCall>::new(), None);
        for of_bucket in additions.chunk_by(|a, b| a.0 == b.0) {
            let Some((bucket, ..)) = of_bucket.first().copied() else { continue };
            let (Some(kind), Some(mark)) = (pass.kinds.get(bucket.0), mark_of(bucket)) else { continue };
            let key = self.keys.counters(kind, bucket.1);
            let last = calls.pop_if(|call| mark_before == Some(mark) && call.buckets.len() < buckets_max);
            let BucketCall { mut call, mut buckets } = match last {
                Some(BucketCall { call, buckets }) => BucketCall { call: call.key(key), buckets },
                None => {
                    let Some(call) = begin_sums(pass, mark, key) else { continue };
                    BucketCall { call, buckets: Vec::new() }
                }
            };
            call = push_sums(call, of_bucket.chunk_by(|a, b| a.1 == b.1));
            buckets.push(bucket);
            calls.push(BucketCall { call, buckets });
            mark_before = Some(mark);
        }
        calls
    }

    fn row_calls(&self, pass: &Pass<'_>) -> Vec<BucketCall> {
        let mut buckets: BTreeMap<Bucket, Vec<Row>> = BTreeMap::new();
        for (number, additions) in pass.rows {
            for addition in additions {
                let Some(bucket) = self.bucket_of(pass.kinds, addition) else { continue };
                let rows = buckets.entry(bucket).or_default();
                match rows.last_mut().filter(|(last, _)| last == number) {
                    Some((_, additions)) => additions.push(*addition),
                    None => rows.push((*number, vec![*addition])),
                }
            }
        }
        let call = |(bucket, rows): (Bucket, Vec<Row>)| {
            let call = self.row_call(pass.kinds.get(bucket.0)?, bucket.1, pass.partition, &rows);
            Some(BucketCall { call, buckets: vec![bucket] })
        };
        buckets.into_iter().filter_map(call).collect()
    }

    fn row_call(&self, kind: &str, bucket: u32, partition: u16, rows: &[Row]) -> Call {
        let mut call = Call::new(&APPLY_PLAIN, self.keys.counters(kind, bucket)).number(partition);
        // The position of each key in KEYS.
        let mut keys: BTreeMap<String, usize> = BTreeMap::new();
        for (number, additions) in rows {
            call = call.number(number).number(additions.len());
            for Addition { target, metric, delta } in additions {
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

    /// Sends the calls of one pipeline.
    ///
    /// # Errors
    /// No server answers. Each of the calls may have run already, or may still run later.
    pub async fn apply_some(&self, applying: &mut Applying<'_>) -> Result<()> {
        const ACTION: &str = "add the outbox to counters";
        if applying.calls.is_empty() {
            let partly = std::mem::take(&mut applying.partly);
            applying.calls = self.sum_calls(&applying.pass, Some(&partly)).into();
        }
        let (calls, buckets): (Vec<Call>, Vec<Vec<Bucket>>) =
            applying.next_calls().into_iter().map(|BucketCall { call, buckets }| (call, buckets)).unzip();
        let answers = self.eval_each(ACTION, &calls).await?;
        let read = |place: usize, outcome| {
            let buckets = buckets.get(place).map(Vec::as_slice).unwrap_or_default();
            match outcome {
                CallOutcome::Answered(answer) => {
                    let Some((left, marks)) = read_applied(&answer) else {
                        applying.behind.extend(buckets);
                        return Err(CacheError::unexpected(ACTION, &answer));
                    };
                    applying.left.no_numbers += left;
                    marks.iter().for_each(|(place, mark)| self.note_mark(applying, buckets.get(*place), *mark));
                }
                CallOutcome::Refused(_) => applying.left.no_buckets += buckets.len() as u64,
                CallOutcome::Failed => {
                    applying.behind.extend(buckets);
                    return Ok(());
                }
            }
            applying.is_answered = true;
            Ok(())
        };
        let failed = read_each(answers, read);
        applying.failed = std::mem::replace(&mut applying.failed, Ok(())).and(failed);
        Ok(())
    }

    /// Records the mark that the bucket had before the call. A mark of `None` means that the key is not a bucket.
    fn note_mark(&self, applying: &mut Applying<'_>, bucket: Option<&Bucket>, mark: Option<u64>) {
        let Some(mark) = mark else {
            applying.left.no_buckets += 1;
            return;
        };
        applying.left.unknown_marks += u64::from(applying.pass.is_unknown(mark));
        let accepts = Accepts::rows(applying.pass.after, mark, applying.pass.last());
        if let Some((bucket, accepts)) = bucket.filter(|_| self.is_packed()).zip(accepts) {
            applying.partly.insert(*bucket, accepts.highest);
        }
    }
}

/// Begins a call that adds rows to buckets with the mark `mark`. Returns `None` if such buckets have all rows.
fn begin_sums(pass: &Pass<'_>, mark: u64, key: String) -> Option<Call> {
    let Accepts { lowest, highest } = Accepts::rows(pass.after, mark, pass.last())?;
    Some(Call::new(&APPLY, key).number(pass.partition).number(lowest).number(highest).number(pass.last()))
}

fn push_sums<'a>(mut call: Call, targets: impl Iterator<Item = &'a [Sum]> + Clone) -> Call {
    call = call.number(targets.clone().count());
    for id in targets.clone().filter_map(|of_target| of_target.first()).map(|(_, id, ..)| id) {
        call = call.number(id);
    }
    for of_target in targets {
        let (mut deltas, mut place) = (String::new(), 1);
        for of_metric in of_target.chunk_by(|a, b| a.2 == b.2) {
            let metric = of_metric.first().map_or(place, |(_, _, metric, _)| *metric);
            (place..metric).for_each(|_| deltas.push_str("0,"));
            place = metric.saturating_add(1);
            let delta = of_metric.iter().fold(0_i64, |sum, (.., delta)| sum.saturating_add(*delta));
            // Writing to a String can't fail.
            let _ = write!(deltas, "{delta},");
        }
        call = call.arg(deltas.trim_end_matches(','));
    }
    call
}

/// The positions of skipped buckets in a call, each with the bucket's mark. A mark of `None` means that the key is not
/// a bucket, or that someone changed its mark by hand.
type Marks = Vec<(usize, Option<u64>)>;

fn read_applied(answer: &Value) -> Option<(u64, Marks)> {
    let Value::Array(parts) = answer else { return None };
    let [Value::Int(left), marks @ ..] = parts.as_slice() else { return None };
    let mark = |pair: &[Value]| {
        let [Value::Int(place), mark] = pair else { return None };
        Some((usize::try_from(*place).ok()?.checked_sub(1)?, text(mark)?.parse().ok()))
    };
    Some((left.unsigned_abs(), marks.chunks(2).map(mark).collect::<Option<_>>()?))
}
