//! Numbers that many threads add to at once, without a lock.

use std::sync::atomic::{AtomicU64, Ordering};

/// A number that only grows.
#[derive(Debug, Default)]
pub struct Count(AtomicU64);

impl Count {
    /// Zero, as a constant.
    pub const fn new() -> Self {
        Self(AtomicU64::new(0))
    }

    /// Adds so many.
    pub fn add(&self, more: u64) {
        self.0.fetch_add(more, Ordering::Relaxed);
    }

    /// So many as of now.
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// How often a value fell into each of some ranges.
#[derive(Debug)]
pub struct Histogram {
    bounds: &'static [f64],
    /// One for each bound, and one for what is above the last.
    buckets: Box<[AtomicU64]>,
    /// The bits of an f64.
    sum: AtomicU64,
}

/// What a [`Histogram`] holds at one moment.
#[derive(Clone, Debug, PartialEq)]
pub struct Buckets {
    /// Each range's upper bound, the last one infinite, and how many values fell into it.
    pub counts: Vec<(f64, u64)>,
    /// The sum of all values.
    pub sum: f64,
}

impl Histogram {
    /// Ranges between `bounds`, which ascend.
    pub fn new(bounds: &'static [f64]) -> Self {
        Self {
            bounds,
            buckets: (0..=bounds.len()).map(|_| AtomicU64::new(0)).collect(),
            sum: AtomicU64::new(0.0_f64.to_bits()),
        }
    }

    /// Adds a value. What is below zero (an event that is newer than this clock says) counts as zero.
    pub fn add(&self, value: f64) {
        let value = value.max(0.0);
        let place = self.bounds.partition_point(|bound| *bound < value);
        if let Some(bucket) = self.buckets.get(place) {
            bucket.fetch_add(1, Ordering::Relaxed);
        }
        let more = |sum: u64| Some((f64::from_bits(sum) + value).to_bits());
        // It never gives up: there is always another sum.
        let _ = self.sum.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more);
    }

    /// What it holds now.
    pub fn get(&self) -> Buckets {
        let bounds = self.bounds.iter().copied().chain([f64::INFINITY]);
        let counts = bounds.zip(&self.buckets).map(|(bound, count)| (bound, count.load(Ordering::Relaxed))).collect();
        Buckets { counts, sum: f64::from_bits(self.sum.load(Ordering::Relaxed)) }
    }
}

impl Buckets {
    /// How many values there are.
    pub fn total(&self) -> u64 {
        self.counts.iter().map(|(_, count)| count).sum()
    }

    /// What has come since `former`.
    #[must_use]
    pub fn since(&self, former: &Self) -> Self {
        let before = |place: usize| former.counts.get(place).map_or(0, |(_, count)| *count);
        let counts = self.counts.iter().enumerate();
        let counts = counts.map(|(place, (bound, count))| (*bound, count.saturating_sub(before(place)))).collect();
        Self { counts, sum: self.sum - former.sum }
    }

    /// The value below which the part `share` of all values lies, taken to lie evenly in each range, as Prometheus'
    /// `histogram_quantile` does; the last bound for what is above it. None where there is no value.
    pub fn quantile(&self, share: f64) -> Option<f64> {
        let rank = share * self.total() as f64;
        let (mut below, mut low) = (0.0, 0.0);
        for (bound, count) in &self.counts {
            let count = *count as f64;
            if count > 0.0 && below + count >= rank {
                return Some(if bound.is_finite() { low + (bound - low) * ((rank - below) / count) } else { low });
            }
            below += count;
            low = if bound.is_finite() { *bound } else { low };
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const BOUNDS: &[f64] = &[1.0, 2.0, 4.0];

    #[test]
    fn values_fall_into_the_range_up_to_their_bound() {
        let histogram = Histogram::new(BOUNDS);
        for value in [-1.0, 1.0, 1.5, 4.0, 9.0] {
            histogram.add(value);
        }
        let held = histogram.get();
        assert_eq!(held.counts, [(1.0, 2), (2.0, 1), (4.0, 1), (f64::INFINITY, 1)]);
        assert_eq!((held.sum, held.total()), (15.5, 5));
        assert_eq!(held.since(&held).total(), 0);
        assert_eq!((held.quantile(0.2), held.quantile(0.6), held.quantile(1.0)), (Some(0.5), Some(2.0), Some(4.0)));
        assert_eq!(Histogram::new(BOUNDS).get().quantile(0.5), None);
    }

    proptest! {
        #[test]
        fn a_quantile_lies_in_the_range_of_its_value(values in prop::collection::vec(0.0..8.0_f64, 1..50), share in 0.01..1.0_f64) {
            let histogram = Histogram::new(BOUNDS);
            values.iter().for_each(|value| histogram.add(*value));
            let mut sorted = values;
            sorted.sort_by(f64::total_cmp);
            let rank = ((share * sorted.len() as f64).ceil() as usize).max(1);
            let exact = sorted[rank - 1].min(4.0);
            let told = histogram.get().quantile(share).unwrap();
            let range = |value: f64| BOUNDS.partition_point(|bound| *bound < value);
            prop_assert!(range(told).abs_diff(range(exact)) <= usize::from(told == 4.0), "{told} for {exact}");
        }
    }
}
