//! Outboxes: their rows, the offset up to which Redis contains each outbox, and the rows that a sample from Redis
//! lacks. Pure.
//!
//! For a counter with `writer = "daemon"`, Redis lags behind the table `counter` by the outbox rows after the offsets
//! of its bucket. A sample contains these offsets, so a reconcile compares the counter exactly, even while the counter
//! changes (decision 0033).

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::sync::Arc;

use crate::coalesce::Pair;
use crate::model::{Addition, CounterKey, Micros};

/// The partition number for the corrections that reconciles make in `counter`. This partition has an outbox but no
/// queue.
pub const CORRECTIONS: u16 = u16::MAX;

/// The slot number of the `counter` rows that imports write. No partition uses this slot, so an import never waits for
/// a row that a consumer has locked.
pub const IMPORTS: u16 = u16::MAX - 1;

/// Maps a partition to its offset: the number of a row in the partition's outbox. An offset of zero means that Redis
/// contains no row of this outbox. The text form is `0:17,3:12`. Cheap to clone.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OutboxOffsets(Arc<BTreeMap<u16, u64>>);

impl OutboxOffsets {
    pub fn parse(text: &str) -> Option<Self> {
        let mut offsets = BTreeMap::new();
        for pair in text.split(',').filter(|_| !text.is_empty()) {
            let (partition, number) = pair.split_once(':')?;
            match offsets.entry(partition.parse().ok()?) {
                Entry::Vacant(entry) => entry.insert(number.parse().ok()?),
                Entry::Occupied(_) => return None,
            };
        }
        Some(offsets.into_iter().collect())
    }

    pub fn of(&self, partition: u16) -> u64 {
        self.0.get(&partition).copied().unwrap_or(0)
    }

    pub fn raise(&mut self, partition: u16, number: u64) {
        if number > self.of(partition) {
            Arc::make_mut(&mut self.0).insert(partition, number);
        }
    }

    pub fn raise_all(&mut self, other: &Self) {
        for (partition, number) in other.iter() {
            self.raise(partition, number);
        }
    }

    pub fn iter(&self) -> impl Iterator<Item = (u16, u64)> {
        self.0.iter().map(|(partition, number)| (*partition, *number))
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl FromIterator<(u16, u64)> for OutboxOffsets {
    fn from_iter<I: IntoIterator<Item = (u16, u64)>>(numbers: I) -> Self {
        Self(Arc::new(numbers.into_iter().filter(|(_, number)| *number > 0).collect()))
    }
}

impl fmt::Display for OutboxOffsets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (place, (partition, number)) in self.iter().enumerate() {
            let separator = if place == 0 { "" } else { "," };
            write!(f, "{separator}{partition}:{number}")?;
        }
        Ok(())
    }
}

/// The marks with which a bucket accepts a call that adds outbox rows. The call contains the rows after `highest`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Accepts {
    pub lowest: u64,
    pub highest: u64,
}

impl Accepts {
    /// `mark` is the mark that the bucket has answered, or `after` before the first call. A call with the rows after
    /// `after` also accepts lower marks: the rows between such a mark and `after` add nothing to the bucket. If an
    /// answered mark was below `after`, Redis has gone back since the pass began.
    pub fn rows(after: u64, mark: u64, last: u64) -> Option<Self> {
        let highest = mark.max(after);
        let lowest = if highest == after { 0 } else { highest };
        (highest < last).then_some(Self { lowest, highest })
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OutboxRow {
    pub partition: u16,
    pub number: u64,
    /// The time of the write, by MySQL's clock.
    pub written_at: Micros,
    pub additions: Vec<Addition>,
    pub likers: Vec<Pair>,
}

/// The outbox rows that Redis can lack, as of one instant. Contains only sums, so its size does not depend on the number
/// of rows.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OutboxLag {
    /// Redis contained all rows up to these offsets before the sample. A bucket's own offsets can be lower, because it
    /// has offsets only for rows that changed it, and loses them if it goes back.
    applied: OutboxOffsets,
    /// Maps each counter that a later row changes to the sum of the amounts that the counter's sample lacks.
    lacks: HashMap<CounterKey, i64>,
    ends: OutboxOffsets,
    pruned: OutboxOffsets,
}

impl OutboxLag {
    /// Nothing was read yet. `applied` must be read before the sample.
    pub fn after(applied: OutboxOffsets) -> Self {
        Self { ends: applied.clone(), applied, ..Self::default() }
    }

    pub fn note<'a>(&mut self, row: &OutboxRow, sampled: impl Fn(CounterKey) -> Option<&'a OutboxOffsets>) {
        self.ends.raise(row.partition, row.number);
        for Addition { target, metric, delta } in &row.additions {
            let Some(offsets) = sampled((*target, *metric)) else { continue };
            let lacks = if row.number > self.had(row.partition, offsets) { *delta } else { 0 };
            let sum = self.lacks.entry((*target, *metric)).or_default();
            *sum = sum.saturating_add(lacks);
        }
    }

    /// Notes up to which offsets rows are deleted. These offsets must be read after all rows.
    pub fn note_pruned(&mut self, pruned: OutboxOffsets) {
        self.pruned = pruned;
    }

    /// Returns the amount that is missing from a sample of the counter. `offsets` are the offsets of the counter's
    /// bucket in the sample. Returns `None` if rows that are needed for this sum were deleted.
    pub fn of(&self, number: CounterKey, offsets: &OutboxOffsets) -> Option<i64> {
        if self.pruned.iter().any(|(partition, pruned)| pruned > self.had(partition, offsets)) {
            return None;
        }
        Some(self.lacks.get(&number).copied().unwrap_or(0))
    }

    pub fn numbers(&self) -> impl Iterator<Item = CounterKey> {
        self.lacks.keys().copied()
    }

    pub fn ends(&self) -> Option<&OutboxOffsets> {
        let is_whole = self.pruned.iter().all(|(partition, pruned)| pruned <= self.applied.of(partition));
        Some(&self.ends).filter(|_| is_whole)
    }

    fn had(&self, partition: u16, offsets: &OutboxOffsets) -> u64 {
        offsets.of(partition).max(self.applied.of(partition))
    }
}

/// The amounts that the kept rows of all outboxes add to some counters. If Redis goes back to an older state, it lacks some of these
/// rows.
#[derive(Clone, Debug)]
pub struct KeptAmounts(HashMap<CounterKey, (i64, i64)>);

impl KeptAmounts {
    pub fn of(counters: impl IntoIterator<Item = CounterKey>) -> Self {
        Self(counters.into_iter().map(|key| (key, (0, 0))).collect())
    }

    pub fn note(&mut self, row: &OutboxRow) {
        for Addition { target, metric, delta } in &row.additions {
            let Some((below, above)) = self.0.get_mut(&(*target, *metric)) else { continue };
            let sum = if *delta < 0 { below } else { above };
            *sum = sum.saturating_add(*delta);
        }
    }

    pub fn explain(&self, counter: CounterKey, lacks: i64) -> bool {
        self.0.get(&counter).is_some_and(|(below, above)| (*below..=*above).contains(&lacks))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{Kind, Metric, Target, TargetId};
    use proptest::prelude::*;

    fn offsets() -> impl Strategy<Value = OutboxOffsets> {
        prop::collection::vec((any::<u16>(), any::<u64>()), 0..9).prop_map(|numbers| numbers.into_iter().collect())
    }

    #[test]
    fn what_is_no_marks_is_refused() {
        assert_eq!(OutboxOffsets::parse("0:17,3:12").unwrap().of(3), 12);
        assert_eq!(["", "0:0", "0:1"].map(|it| OutboxOffsets::parse(it).unwrap().is_empty()), [true, true, false]);
        let mut none = OutboxOffsets::default();
        none.raise(0, 0);
        assert!(none.is_empty(), "there is no row with the number 0");
        assert_ne!(CORRECTIONS, IMPORTS);
        for text in ["0", "0:", ":1", "0:1,", ",", "0:1,0:2", "0:-1", "65536:1", "x:1"] {
            assert_eq!(OutboxOffsets::parse(text), None, "{text}");
        }
    }

    proptest! {
        #[test]
        fn marks_are_read_back(offsets in offsets()) {
            prop_assert_eq!(OutboxOffsets::parse(&offsets.to_string()), Some(offsets));
        }

        #[test]
        fn a_mark_is_only_raised(mut offsets in offsets(), other in offsets(), partition: u16, number: u64) {
            let (before, of) = (offsets.clone(), offsets.of(partition));
            offsets.raise(partition, number);
            prop_assert_eq!(offsets.of(partition), of.max(number));
            offsets.raise_all(&other);
            for (partition, number) in before.iter().chain(other.iter()) {
                prop_assert!(offsets.of(partition) >= number);
            }
        }

        #[test]
        fn any_text_is_read_or_refused(text in "[0-9:,]*") {
            let _ = OutboxOffsets::parse(&text);
        }
    }

    fn target(id: u64) -> Target {
        Target { kind: Kind(1), id: TargetId(id) }
    }

    proptest! {
        /// Two partitions commit batches. Each batch is added to the two buckets some time later, or never. At any
        /// time, the sampled buckets plus the missing rows must equal the counters in MySQL.
        #[test]
        fn what_a_bucket_holds_and_what_waits_make_the_counter(
            batches in prop::collection::vec((0..2_u16, 1..5_u64, -9..9_i64), 0..40),
            added in prop::collection::vec(0..40_u64, 4),
            noted in prop::collection::vec(0..40_u64, 2),
        ) {
            let (mut counters, mut in_redis) = (HashMap::new(), HashMap::new());
            let (mut rows, mut last, mut offsets) = (Vec::new(), [0; 2], [OutboxOffsets::default(), OutboxOffsets::default()]);
            for (partition, id, delta) in batches {
                last[usize::from(partition)] += 1;
                let number = last[usize::from(partition)];
                *counters.entry(id).or_insert(0) += delta;
                let bucket = (id % 2) as usize;
                if number <= added[bucket * 2 + usize::from(partition)] {
                    *in_redis.entry(id).or_insert(0) += delta;
                    offsets[bucket].raise(partition, number);
                }
                let additions = vec![Addition { target: target(id), metric: Metric(2), delta }];
                rows.push(OutboxRow { partition, number, written_at: Micros(0), additions, likers: Vec::new() });
            }
            // Rows up to these offsets are known to be in both buckets.
            let applied: OutboxOffsets =
                (0..2_u16).map(|of| (of, noted[usize::from(of)].min(added[usize::from(of)]).min(added[2 + usize::from(of)]))).collect();
            rows.retain(|row| row.number > applied.of(row.partition));
            let of = |(target, _): CounterKey| &offsets[(target.id.0 % 2) as usize];
            let mut lag = OutboxLag::after(applied.clone());
            rows.iter().for_each(|row| lag.note(row, |number| Some(of(number))));
            lag.note_pruned(applied);
            for (id, counted) in counters {
                let number = (target(id), Metric(2));
                let lacks = lag.of(number, of(number));
                prop_assert_eq!(lacks.map(|lacks| counted - lacks), Some(in_redis.get(&id).copied().unwrap_or(0)));
            }
        }
    }

    #[test]
    fn a_bucket_accepts_the_rows_after_the_mark_it_has_answered() {
        let rows =
            |after, mark, last| Accepts::rows(after, mark, last).map(|Accepts { lowest, highest }| (lowest, highest));
        assert_eq!([rows(5, 5, 9), rows(5, 3, 9)], [Some((0, 5)); 2], "the first call accepts lower marks");
        assert_eq!([rows(5, 7, 9), rows(5, 9, 9), rows(5, 10, 9)], [Some((7, 7)), None, None]);
    }

    #[test]
    fn where_rows_are_deleted_that_would_tell_nothing_is_reported() {
        let offsets = |text| OutboxOffsets::parse(text).unwrap();
        let mut lag = OutboxLag::after(offsets("0:3"));
        lag.note_pruned(offsets("0:5"));
        assert_eq!((lag.of((target(1), Metric(2)), &offsets("0:4")), lag.ends()), (None, None));
        assert_eq!(lag.of((target(1), Metric(2)), &offsets("0:5")), Some(0));
    }

    #[test]
    fn kept_rows_explain_what_a_counter_lacks_of_them() {
        let key = |id| (target(id), Metric(2));
        let mut kept = KeptAmounts::of([key(1), key(2)]);
        for (number, id, delta) in [(5, 1, 3), (6, 1, -1), (7, 1, 2), (8, 3, 9)] {
            let additions = vec![Addition { target: target(id), metric: Metric(2), delta }];
            kept.note(&OutboxRow { partition: 0, number, written_at: Micros(0), additions, likers: Vec::new() });
        }
        let explained = |id| (-9..=9).filter(|lacks| kept.explain(key(id), *lacks)).collect::<Vec<_>>();
        assert_eq!([1, 2, 3].map(explained), [vec![-1, 0, 1, 2, 3, 4, 5], vec![0], vec![]]);
    }

    #[test]
    fn only_the_sums_of_asked_counters_are_kept_of_any_number_of_rows() {
        let offsets = |text| OutboxOffsets::parse(text).unwrap();
        let (sampled, mut lag) = (offsets("0:6"), OutboxLag::after(offsets("0:4")));
        for number in 5..1_000 {
            let additions = (1..9).map(|id| Addition { target: target(id), metric: Metric(2), delta: 1 }).collect();
            let row = OutboxRow { partition: 0, number, written_at: Micros(0), additions, likers: Vec::new() };
            lag.note(&row, |(target, _)| Some(&sampled).filter(|_| target.id.0 < 3));
        }
        assert_eq!(lag.lacks, HashMap::from([1, 2].map(|id| ((target(id), Metric(2)), 993))));
        assert_eq!(lag.ends(), Some(&offsets("0:999")));
    }
}
