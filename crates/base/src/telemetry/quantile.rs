//! Quantiles of a histogram, for the status page and systemd's status line.

use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;

/// For each range: its upper bound, and the number of values at or below this bound. The last bound is infinite.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Buckets(Vec<(f64, u64)>);

impl Buckets {
    /// Reads a histogram's buckets from its encoded text, because the library offers no other access to them.
    pub(super) fn of(histogram: &Histogram) -> Self {
        let (mut registry, mut text) = (Registry::default(), String::new());
        registry.register("it", "", histogram.clone());
        // Writing to a String can't fail.
        let _ = encode(&mut text, &registry);
        let read = |line: &str| {
            let (bound, count) = line.strip_prefix("it_bucket{le=\"")?.split_once("\"} ")?;
            Some((bound.parse().ok()?, count.parse().ok()?))
        };
        Self(text.lines().filter_map(read).collect())
    }

    #[must_use]
    pub(super) fn since(&self, former: &Self) -> Self {
        let before = former.0.iter().map(|(_, count)| *count).chain(std::iter::repeat(0));
        Self(self.0.iter().zip(before).map(|((bound, count), before)| (*bound, count.saturating_sub(before))).collect())
    }

    /// Values are spread evenly in each range, as in Prometheus's `histogram_quantile`. Above the last finite bound,
    /// returns this bound.
    pub(super) fn quantile(&self, share: f64) -> Option<f64> {
        let rank = share * self.0.last().map_or(0, |(_, total)| *total) as f64;
        let (mut below, mut low) = (0.0, 0.0);
        for (bound, count) in &self.0 {
            let count = *count as f64;
            if count > below && count >= rank {
                return Some(if bound.is_finite() {
                    low + (bound - low) * ((rank - below) / (count - below))
                } else {
                    low
                });
            }
            (below, low) = (count, *bound);
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const BOUNDS: [f64; 3] = [1.0, 2.0, 4.0];

    #[test]
    fn values_fall_into_the_range_up_to_their_bound() {
        let histogram = Histogram::new(BOUNDS);
        for value in [0.0, 1.0, 1.5, 4.0, 9.0] {
            histogram.observe(value);
        }
        let buckets = Buckets::of(&histogram);
        assert_eq!(buckets.0, [(1.0, 2), (2.0, 3), (4.0, 4), (f64::INFINITY, 5)]);
        assert_eq!(buckets.since(&buckets).quantile(0.5), None);
        assert_eq!(buckets.since(&Buckets::default()), buckets);
        assert_eq!(
            (buckets.quantile(0.2), buckets.quantile(0.6), buckets.quantile(1.0)),
            (Some(0.5), Some(2.0), Some(4.0))
        );
        assert_eq!(Buckets::of(&Histogram::new(BOUNDS)).quantile(0.5), None);
    }

    proptest! {
        #[test]
        fn a_quantile_lies_in_the_range_of_its_value(values in prop::collection::vec(0.0..8.0_f64, 1..50), share in 0.01..1.0_f64) {
            let histogram = Histogram::new(BOUNDS);
            values.iter().for_each(|value| histogram.observe(*value));
            let mut sorted = values;
            sorted.sort_by(f64::total_cmp);
            let rank = ((share * sorted.len() as f64).ceil() as usize).max(1);
            let exact = sorted[rank - 1].min(4.0);
            let estimate = Buckets::of(&histogram).quantile(share).unwrap();
            let range = |value: f64| BOUNDS.partition_point(|bound| *bound < value);
            prop_assert!(range(estimate).abs_diff(range(exact)) <= usize::from(estimate == 4.0), "{estimate} for {exact}");
        }
    }
}
