//! The packed layout: a target lives in one of 2^`bucket_bits` hashes of its kind, small enough that Redis keeps each
//! as a listpack; its field is the id in decimal, its value all metrics in the order of their codes as text,
//! `12,3,0,4`, trailing zeros left out. Pure; lua/like.lua and lua/repair.lua write the same.

use crate::model::{Metric, TargetId};

/// The target's bucket: CRC-32 (zlib's) of the id in decimal, its low `bucket_bits` bits. A hash, because the low bits
/// of snowflake ids are nearly constant.
pub fn bucket(id: TargetId, bucket_bits: u8) -> u32 {
    let hash = crc32fast::hash(id.to_string().as_bytes());
    hash & ((1_u32 << bucket_bits) - 1)
}

/// The metric's number in a field's value; zero where it is left out, none where the value is no such text.
pub fn value(text: &str, metric: Metric) -> Option<i64> {
    match text.split(',').nth(usize::from(metric.0) - 1) {
        None => Some(0),
        Some("") if text.is_empty() => Some(0),
        Some(number) => number.parse().ok(),
    }
}

/// Who loaded a bucket, and the last repair: the field `_`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Loaded {
    /// Missing targets are unknown: Redis was flushed, or nobody has ever loaded the bucket.
    No,
    /// A run is loading it: missing targets are unknown still.
    Loading {
        /// The run.
        generation: u64,
        /// The last repair.
        pass: u64,
    },
    /// Missing targets are zero.
    Yes {
        /// The run that loaded it.
        generation: u64,
        /// The last repair.
        pass: u64,
    },
}

impl Loaded {
    /// Reads the field; none where it is no such text.
    pub fn parse(text: &str) -> Option<Self> {
        if text.is_empty() {
            return Some(Self::No);
        }
        let (loading, numbers) = text.strip_prefix('~').map_or((false, text), |numbers| (true, numbers));
        let (generation, pass) = numbers.split_once(':')?;
        let (generation, pass) = (generation.parse().ok()?, pass.parse().ok()?);
        Some(if loading { Self::Loading { generation, pass } } else { Self::Yes { generation, pass } })
    }

    /// The field after a repair.
    #[must_use]
    pub fn repaired(self, pass: u64) -> Self {
        match self {
            Self::No => Self::No,
            Self::Loading { generation, .. } => Self::Loading { generation, pass },
            Self::Yes { generation, .. } => Self::Yes { generation, pass },
        }
    }
}

impl std::fmt::Display for Loaded {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::No => Ok(()),
            Self::Loading { generation, pass } => write!(f, "~{generation}:{pass}"),
            Self::Yes { generation, pass } => write!(f, "{generation}:{pass}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_value_is_found_by_its_place() {
        for (text, metric, expected) in [
            ("12,3,0,4", 1, Some(12)),
            ("12,3,0,4", 4, Some(4)),
            ("12", 2, Some(0)),
            ("", 1, Some(0)),
            ("-3", 1, Some(-3)),
            ("x", 1, None),
            ("12,,4", 2, None),
        ] {
            assert_eq!(value(text, Metric(metric)), expected, "{text}");
        }
    }

    #[test]
    fn snowflake_ids_spread_evenly() {
        // 41 bits of milliseconds, 10 bits of machine, 12 bits of sequence that is nearly always 0.
        let mut filled = vec![0_u32; 1 << 10];
        for step in 0..122_880_u64 {
            filled[bucket(TargetId((1_700_000_000_000 + step * 7) << 22 | 5 << 12), 10) as usize] += 1;
        }
        assert!(
            filled.iter().all(|members| (60..200).contains(members)),
            "{:?}",
            (filled.iter().min(), filled.iter().max())
        );
    }

    proptest! {
        #[test]
        fn a_bucket_is_in_range(id: u64, bits in 0_u8..=28) {
            prop_assert!(bucket(TargetId(id), bits) < 1 << bits);
        }

        #[test]
        fn who_loaded_it_is_read_back(generation: u64, pass: u64, next: u64) {
            for state in [Loaded::No, Loaded::Loading { generation, pass }, Loaded::Yes { generation, pass }] {
                prop_assert_eq!(Loaded::parse(&state.to_string()), Some(state));
                prop_assert_eq!(Loaded::parse(&state.repaired(next).to_string()), Some(state.repaired(next)));
            }
        }

        #[test]
        fn any_text_is_read_or_refused(text in ".*") {
            let _ = (value(&text, Metric(3)), Loaded::parse(&text));
        }
    }
}
