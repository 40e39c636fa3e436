//! What the daemons had committed and not yet added to Redis when it was sampled: of numbers with `writer = "daemon"`. Pure.
//!
//! Such a number is in Redis what `counter` has, less those rows of the outboxes that were not added to its bucket. Which these are
//! the bucket's offsets say, read with the number; so nothing has to be waited for, and a number that is written all the time is judged as
//! exactly as one that rests.

use std::collections::HashMap;

use tallyd_core::model::{Addition, CounterKey};
use tallyd_core::outbox_offsets::OutboxOffsets;
use tallyd_mysql::outbox::Since;

/// Rows that no sample of a page had, and some that they had.
#[derive(Debug, Default)]
pub(super) struct OutboxLag {
    /// By number: a row's partition and place in its outbox, and what it adds.
    additions: HashMap<CounterKey, Vec<(u16, u64, i64)>>,
    /// Rows up to these are deleted.
    pruned: OutboxOffsets,
    /// Rows up to these were in Redis before it was sampled, whatever a bucket's offsets say: they stand in none that the row has nothing for, and
    /// a bucket that was set back to an older state lost what it had.
    applied: OutboxOffsets,
}

impl OutboxLag {
    /// What followed `applied`, which was read before the sample.
    pub fn new(since: Since, applied: OutboxOffsets) -> Self {
        let mut additions: HashMap<CounterKey, Vec<_>> = HashMap::new();
        for row in since.rows {
            for Addition { target, metric, delta } in row.additions {
                additions.entry((target, metric)).or_default().push((row.partition, row.number, delta));
            }
        }
        Self { additions, pruned: since.pruned, applied }
    }

    /// What a sample of the number lacks whose bucket had `offsets`; none where rows are deleted that would tell.
    pub fn of(&self, number: CounterKey, offsets: &OutboxOffsets) -> Option<i64> {
        let had = |partition| offsets.of(partition).max(self.applied.of(partition));
        if self.pruned.iter().any(|(partition, pruned)| pruned > had(partition)) {
            return None;
        }
        let additions = self.additions.get(&number).map(Vec::as_slice).unwrap_or_default();
        Some(additions.iter().filter(|(partition, row, _)| *row > had(*partition)).map(|(.., delta)| delta).sum())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use tallyd_core::model::{Kind, Metric, Micros, Target, TargetId};
    use tallyd_mysql::outbox::OutboxRow;

    fn target(id: u64) -> Target {
        Target { kind: Kind(1), id: TargetId(id) }
    }

    proptest! {
        /// Batches are committed by two partitions; each is added to the two buckets some time later, or not yet; whenever the buckets are
        /// sampled, what they hold and what waits make the counters.
        #[test]
        fn what_a_bucket_holds_and_what_waits_make_the_counter(
            batches in prop::collection::vec((0..2_u16, 1..5_u64, -9..9_i64), 0..40),
            added in prop::collection::vec(0..40_u64, 4),
            noted in prop::collection::vec(0..40_u64, 2),
        ) {
            let (mut counters, mut held) = (HashMap::new(), HashMap::new());
            let (mut rows, mut last, mut offsets) = (Vec::new(), [0; 2], [OutboxOffsets::default(), OutboxOffsets::default()]);
            for (partition, id, delta) in batches {
                last[usize::from(partition)] += 1;
                let number = last[usize::from(partition)];
                *counters.entry(id).or_insert(0) += delta;
                let bucket = (id % 2) as usize;
                if number <= added[bucket * 2 + usize::from(partition)] {
                    *held.entry(id).or_insert(0) += delta;
                    offsets[bucket].raise(partition, number);
                }
                let additions = vec![Addition { target: target(id), metric: Metric(2), delta }];
                rows.push(OutboxRow { partition, number, written_at: Micros(0), is_old: false, additions });
            }
            // Known to be in both buckets.
            let applied: OutboxOffsets =
                (0..2_u16).map(|of| (of, noted[usize::from(of)].min(added[usize::from(of)]).min(added[2 + usize::from(of)]))).collect();
            rows.retain(|row| row.number > applied.of(row.partition));
            let lag = OutboxLag::new(Since { rows, pruned: applied.clone() }, applied);
            for (id, counted) in counters {
                let lacks = lag.of((target(id), Metric(2)), &offsets[(id % 2) as usize]);
                prop_assert_eq!(lacks.map(|lacks| counted - lacks), Some(held.get(&id).copied().unwrap_or(0)));
            }
        }
    }

    #[test]
    fn where_rows_are_deleted_that_would_tell_nothing_is_said() {
        let pruned = OutboxOffsets::parse("0:5").unwrap();
        let lag = OutboxLag::new(Since { rows: Vec::new(), pruned }, OutboxOffsets::parse("0:3").unwrap());
        assert_eq!(lag.of((target(1), Metric(2)), &OutboxOffsets::parse("0:4").unwrap()), None);
        assert_eq!(lag.of((target(1), Metric(2)), &OutboxOffsets::parse("0:5").unwrap()), Some(0));
    }
}
