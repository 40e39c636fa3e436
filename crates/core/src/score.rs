//! A board's score: two columns in the 53 bits that a double holds exactly (decision 0053), packed as in lua/board.lua.
//! tests/vectors/scores.json tests both programs. Pure.
//!
//! `score = primary * 2^low_bits + low`. The board's `tie` decides what `low` is: nothing, a second number, or the time
//! from the last change of the primary number until the period's end. With the remaining time, the member that reached
//! a number first is ahead.

use std::fmt;

pub const SCORE_BITS: u32 = 53;

/// The maximum number of bits for the remaining time. [`PeriodKind::Total`](crate::period::PeriodKind::Total) needs
/// this number. With this number of bits, the primary number is at most 134 million.
pub const LOW_BITS_MAX: u32 = 26;

/// The maximum number of bits for a second number. With this number of bits, the primary number is at most one billion.
pub const SECOND_BITS_MAX: u32 = 23;

/// How members with equal primary numbers are ordered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Tie {
    /// The names are compared byte by byte, and the greater name is ahead.
    #[default]
    Member,
    /// The member with the higher second metric is ahead.
    Second,
    /// The member that reached its number first is ahead.
    Earliest,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rule {
    pub tie: Tie,
    pub packing: Packing,
}

impl Rule {
    pub const PLAIN: Self = Self { tie: Tie::Member, packing: Packing::new(0) };

    pub fn name(self) -> &'static str {
        match self.tie {
            Tie::Member => "plain",
            Tie::Second => "second",
            Tie::Earliest => "earliest",
        }
    }

    /// Returns a score's two columns. Returns `None` if scores are plain numbers, or if this score is not valid for the
    /// rule.
    pub fn columns(self, score: f64) -> Option<Columns> {
        if self.tie == Tie::Member { None } else { self.packing.unpack(score) }
    }

    pub fn primary(self, score: f64) -> f64 {
        // A column has at most 53 bits, so a double holds it exactly.
        self.columns(score).map_or(score, |columns| columns.primary as f64)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Packing {
    low_bits: u32,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Columns {
    pub primary: u64,
    /// The number that orders members with equal primary numbers. The member with the higher number is ahead.
    pub low: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{column} is {value}, and the board's scores hold at most {max}")]
pub struct Overflow {
    column: Column,
    value: u64,
    max: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Column {
    Primary,
    Low,
}

impl fmt::Display for Column {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Primary => "the primary number",
            Self::Low => "the second number",
        })
    }
}

impl Packing {
    pub const fn new(low_bits: u32) -> Self {
        Self { low_bits: if low_bits > LOW_BITS_MAX { LOW_BITS_MAX } else { low_bits } }
    }

    pub const fn low_bits(self) -> u32 {
        self.low_bits
    }

    pub const fn primary_max(self) -> u64 {
        (1 << (SCORE_BITS - self.low_bits)) - 1
    }

    pub const fn low_max(self) -> u64 {
        (1 << self.low_bits) - 1
    }

    /// Packs the columns into a score. Sorted scores are in the order of (primary, low).
    pub fn pack(self, columns: Columns) -> Result<f64, Overflow> {
        let Columns { primary, low } = columns;
        for (column, value, max) in [(Column::Primary, primary, self.primary_max()), (Column::Low, low, self.low_max())]
        {
            if value > max {
                return Err(Overflow { column, value, max });
            }
        }
        // Below 2^53, so exact.
        #[expect(clippy::cast_precision_loss, reason = "below 2^53")]
        Ok(((primary << self.low_bits) | low) as f64)
    }

    pub fn unpack(self, score: f64) -> Option<Columns> {
        #[expect(clippy::cast_precision_loss, reason = "2^53 is exact")]
        let end = (1_u64 << SCORE_BITS) as f64;
        if !(score >= 0.0 && score < end && score.fract() == 0.0) {
            return None;
        }
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a whole number below 2^53")]
        let whole = score as u64;
        Some(Columns { primary: whole >> self.low_bits, low: whole & self.low_max() })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn what_does_not_fit_is_refused_with_its_column() {
        let packing = Packing::new(20);
        assert_eq!((packing.primary_max(), packing.low_max()), ((1 << 33) - 1, (1 << 20) - 1));
        let refused = |primary, low| packing.pack(Columns { primary, low }).unwrap_err().to_string();
        assert_eq!(
            refused(1 << 33, 0),
            "the primary number is 8589934592, and the board's scores hold at most 8589934591"
        );
        assert_eq!(refused(0, 1 << 20), "the second number is 1048576, and the board's scores hold at most 1048575");
        assert_eq!(Packing::new(99).low_bits(), LOW_BITS_MAX);
    }

    #[test]
    fn a_score_that_is_none_is_not_unpacked() {
        for score in [-1.0, 0.5, 9_007_199_254_740_992.0, f64::NAN, f64::INFINITY] {
            assert_eq!(Packing::new(20).unpack(score), None, "{score}");
        }
    }

    #[test]
    fn only_a_rule_with_two_columns_takes_a_score_apart() {
        let rule = |tie| Rule { tie, packing: Packing::new(4) };
        let names = [Tie::Member, Tie::Second, Tie::Earliest].map(|tie| rule(tie).name());
        assert_eq!(names, ["plain", "second", "earliest"]);
        for (tie, columns, primary) in [
            (Tie::Member, None, 37.0),
            (Tie::Second, Some(Columns { primary: 2, low: 5 }), 2.0),
            (Tie::Earliest, Some(Columns { primary: 2, low: 5 }), 2.0),
        ] {
            assert_eq!((rule(tie).columns(37.0), rule(tie).primary(37.0)), (columns, primary), "{tie:?}");
        }
        assert_eq!((rule(Tie::Second).columns(0.5), rule(Tie::Second).primary(0.5)), (None, 0.5));
    }

    fn columns(packing: Packing) -> impl Strategy<Value = Columns> {
        (0..=packing.primary_max(), 0..=packing.low_max()).prop_map(|(primary, low)| Columns { primary, low })
    }

    proptest! {
        #[test]
        fn packed_scores_keep_the_order_and_come_back(
            (packing, a, b) in (0..=LOW_BITS_MAX).prop_flat_map(|bits| {
                let packing = Packing::new(bits);
                (Just(packing), columns(packing), columns(packing))
            })
        ) {
            let (first, second) = (packing.pack(a).unwrap(), packing.pack(b).unwrap());
            prop_assert_eq!(a.cmp(&b), first.total_cmp(&second));
            prop_assert_eq!(packing.unpack(first), Some(a));
        }

        #[test]
        fn any_score_is_unpacked_or_refused(score: f64, bits in 0..40_u32) {
            let packing = Packing::new(bits);
            if let Some(columns) = packing.unpack(score) {
                prop_assert_eq!(packing.pack(columns).unwrap(), score);
            }
        }
    }
}
