//! The counters that every layout stores. The same kind of ids and the same number of targets always give the same
//! counters.

use serde::Serialize;
use tallyd_redis::keys::Keys;

use crate::layout::{self, METRICS};

/// The largest value of a counter.
const COUNT_MAX: f64 = 1e8;

/// The kind of ids.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Ids {
    /// 1, 2, 3, ...
    Dense,
    /// 42 bits for the milliseconds, 10 bits for the machine, and 12 bits for the sequence number.
    Snowflake,
}

impl Ids {
    pub fn name(self) -> &'static str {
        match self {
            Self::Dense => "dense",
            Self::Snowflake => "snowflake",
        }
    }
}

/// The stored counters: a number of targets, each with four counters.
pub struct Counts {
    pub ids: Ids,
    /// tallyd's keys. The number of buckets depends on the number of targets.
    pub keys: Keys,
    targets: Vec<(u64, [u32; METRICS])>,
}

impl Counts {
    /// Counters as on real sites: 99 of 100 are below 1,000, one in ten thousand is above a million. No
    /// counter is zero, so that every layout holds all of them.
    pub fn new(ids: Ids, targets: u64) -> Self {
        let mut dice = Dice(targets.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1);
        let mut ms = 400_000_000_000_u64;
        let keys = layout::keys(targets);
        let targets = (1..=targets)
            .map(|number| {
                let id = match ids {
                    Ids::Dense => number,
                    Ids::Snowflake => {
                        ms += 1 + dice.below(2_000);
                        // Few ids are made in the same millisecond, so the sequence number is nearly always 0.
                        ms << 22 | dice.below(32) << 12 | u64::from(dice.below(100) == 0)
                    }
                };
                (id, [(); METRICS].map(|()| dice.count()))
            })
            .collect();
        Self { ids, keys, targets }
    }

    pub fn targets(&self) -> u64 {
        self.targets.len() as u64
    }

    pub fn iter(&self) -> impl Iterator<Item = &(u64, [u32; METRICS])> {
        self.targets.iter()
    }

    /// Returns the targets of a page. The page can contain old and new targets.
    pub fn page(&self, seed: u64, targets: usize) -> Vec<(u64, [u32; METRICS])> {
        let mut dice = Dice(seed.wrapping_mul(0xD134_2543_DE82_EF95) | 1);
        dice.below(2);
        (0..targets).filter_map(|_| self.targets.get(dice.below(self.targets()) as usize).copied()).collect()
    }
}

struct Dice(u64);

impl Dice {
    /// Returns a random number below `below`, by xorshift64* (Vigna 2016).
    fn below(&mut self, below: u64) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 11) % below
    }

    /// Returns a count from a Pareto distribution: one in a hundred counts is at least 1,000, and one in ten thousand
    /// is at least a million.
    fn count(&mut self) -> u32 {
        let part = (self.below(1 << 40) + 1) as f64 / (1_u64 << 40) as f64;
        part.powf(-1.5).min(COUNT_MAX) as u32
    }
}
