//! Tracks the counters that a run must measure when it loads buckets into Redis: those to which the outbox has added
//! since the cut, the instant at which the run read the bucket.
//!
//! Only counters that the daemon adds to Redis. `outbox` has the last outbox rows before the cut, and the script that
//! reads a bucket also raises the bucket's offsets to them. So the load must set each counter to the value with exactly
//! the rows up to these offsets. It reads counters in pages, each one snapshot. If the snapshot has a later row for a
//! counter, the load measures the counter; otherwise the page's value is right.
//!
//! * A: `outbox` is read. B: an outbox row is committed. C: the page is read. The page includes the row's addition, and
//!   the outbox also adds it to the bucket. The page's snapshot has the row, so the row's counter is measured.
//! * A: the page is read. B: a row is committed. The counter's value in the page does not include the row's addition.
//!   The load uses this value, and the outbox adds the row to the bucket later. The snapshot of the next page contains
//!   every new row, also a row whose counter is in an earlier page.
//! * A: `outbox` is read. B: a row is committed and added to the bucket. C: the cut. At the cut, the bucket already
//!   contains the row's addition, and the bucket's offset is higher than the number in `outbox`. The page's snapshot
//!   has the row, so the row's counter is measured.
//! * A: a row is committed. B: `outbox` is read, and then the bucket is read at the cut. C: the outbox reaches the row.
//!   The page includes the row's addition. Because of the bucket's offset, the outbox does not add the row again.
//! * A: rows of one partition are read up to number 7. B: number 6 is committed. This cannot happen, because numbers
//!   are assigned under the partition's lock. So each page needs only the rows after the last row of the previous page.
//! * A: a reconcile corrects `counter`. The correction's row is in the partition `CORRECTIONS`. This partition is read
//!   like all other partitions.
//! * A: a page is read. B: newer rows are deleted before the next page. The counters of these rows are unknown, so all
//!   counters of the following pages are measured.
//! * A: `outbox` is read. B: MySQL goes back to an earlier state. The page has the data of the earlier state. New
//!   outbox rows have higher numbers than all earlier rows.

use std::collections::HashSet;

use crate::model::{CounterKey, Metric, TargetId};
use crate::outbox::{OutboxLag, OutboxOffsets};

/// Maximum number of keys in memory. This number of keys needs about 20 MB.
const KEYS_MAX: usize = 500_000;

/// The counters of one kind that have new outbox rows. An outbox row is new if its number is higher than the number in
/// `outbox`, and the last page's snapshot contains the row.
pub enum Touched {
    Keys {
        offsets: OutboxOffsets,
        keys: HashSet<(TargetId, Metric)>,
    },
    /// It is unknown which counters have such outbox rows. So every counter must be measured.
    Any,
}

impl Touched {
    pub fn none_after(outbox: OutboxOffsets) -> Self {
        Self::Keys { offsets: outbox, keys: HashSet::new() }
    }

    /// The rows after these must be read with the next page.
    pub fn offsets(&self) -> Option<&OutboxOffsets> {
        match self {
            Self::Keys { offsets, .. } => Some(offsets),
            Self::Any => None,
        }
    }

    pub fn note(&mut self, after: TargetId, lag: &OutboxLag) {
        let Self::Keys { offsets, keys } = self else { return };
        keys.extend(lag.numbers().map(|(target, metric)| (target.id, metric)));
        if keys.len() > KEYS_MAX {
            keys.retain(|(id, _)| after < *id);
        }
        match lag.ends().filter(|_| keys.len() <= KEYS_MAX) {
            Some(ends) => *offsets = ends.clone(),
            None => *self = Self::Any,
        }
    }

    pub fn has(&self, (target, metric): CounterKey) -> bool {
        match self {
            Self::Keys { keys, .. } => keys.contains(&(target.id, metric)),
            Self::Any => true,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{Addition, Kind, Micros, Target};
    use crate::outbox::{CORRECTIONS, OutboxRow};

    const LIKE: Metric = Metric(1);

    fn key(id: u64) -> CounterKey {
        (Target { kind: Kind(1), id: TargetId(id) }, LIKE)
    }

    fn row(partition: u16, number: u64, keys: impl IntoIterator<Item = CounterKey>) -> OutboxRow {
        let addition = |(target, metric)| Addition { target, metric, delta: 1 };
        let additions = keys.into_iter().map(addition).collect();
        OutboxRow { partition, number, written_at: Micros(0), additions, likers: Vec::new() }
    }

    /// The rows that were read with a page, after the last rows of the page before.
    fn lag(touched: &Touched, rows: &[OutboxRow], pruned: &str) -> OutboxLag {
        let (mut lag, none) = (OutboxLag::after(touched.offsets().unwrap().clone()), OutboxOffsets::default());
        rows.iter().for_each(|row| lag.note(row, |_| Some(&none)));
        lag.note_pruned(OutboxOffsets::parse(pruned).unwrap());
        lag
    }

    fn begun() -> Touched {
        Touched::none_after(OutboxOffsets::parse("0:5").unwrap())
    }

    fn note(touched: &mut Touched, after: u64, rows: &[OutboxRow], pruned: &str) {
        let lag = lag(touched, rows, pruned);
        touched.note(TargetId(after), &lag);
    }

    #[test]
    fn counters_that_rows_name_stay_touched_on_later_pages() {
        let mut touched = begun();
        note(&mut touched, 0, &[row(0, 6, [key(7)]), row(CORRECTIONS, 3, [key(9)])], "0:5");
        note(&mut touched, 5, &[row(1, 1, [key(6)])], "0:5");
        assert_eq!([6, 7, 8, 9].map(|id| touched.has(key(id))), [true, true, false, true]);
        assert_eq!(touched.offsets(), Some(&OutboxOffsets::parse("0:6,1:1,65535:3").unwrap()));
    }

    #[test]
    fn rows_that_were_deleted_unread_touch_every_counter() {
        let mut touched = begun();
        note(&mut touched, 0, &[row(0, 8, [])], "0:6");
        assert_eq!((touched.has(key(1)), touched.offsets()), (true, None));
        let mut touched = begun();
        note(&mut touched, 0, &[row(0, 8, [])], "0:5");
        note(&mut touched, 0, &[], "0:8");
        assert!(!touched.has(key(1)), "the deleted rows were read before");
    }

    #[test]
    fn more_counters_than_memory_allows_touch_all_of_them() {
        let many = |from: u64| row(0, 6, (0..=KEYS_MAX as u64).map(|id| key(from + id)));
        let mut touched = begun();
        note(&mut touched, 0, &[many(1)], "");
        assert!(touched.has(key(u64::MAX)));
        let mut touched = begun();
        note(&mut touched, 0, &[row(0, 6, [key(1), key(2)])], "");
        note(&mut touched, 2, &[many(2)], "");
        assert!(!touched.has(key(u64::MAX)), "counters of earlier pages are forgotten");
    }
}
