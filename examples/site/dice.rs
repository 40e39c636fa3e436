//! Random numbers.

use std::time::{SystemTime, UNIX_EPOCH};

/// A generator of random numbers: xorshift64* (Vigna 2016, "An experimental exploration").
pub struct Dice(u64);

impl Dice {
    /// Makes a generator. Each start of the demo and each `stream` gives different numbers.
    pub fn new(stream: u64) -> Self {
        let nanos = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.subsec_nanos());
        Self((u64::from(nanos) ^ (stream << 32)).wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    /// Returns a number below `below`.
    pub fn below(&mut self, below: u64) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 11) % below
    }
}

/// Chooses places by Zipf's law with exponent 1. The second place is chosen half as often as the first place, the third
/// place a third as often, and so on.
pub struct Zipf {
    /// For each place, the sum of its own share and the shares of all places before it.
    sums: Vec<f64>,
}

impl Zipf {
    /// Uses the places 1 to `places`.
    pub fn new(places: u32) -> Self {
        let mut sum = 0.0;
        let shares = (1..=places).map(|place| {
            sum += 1.0 / f64::from(place);
            sum
        });
        Self { sums: shares.collect() }
    }

    /// Returns a random place. The first place is 1.
    pub fn roll(&self, dice: &mut Dice) -> u64 {
        let all = self.sums.last().copied().unwrap_or_default();
        let rolled = dice.below(1 << 50) as f64 / (1_u64 << 50) as f64 * all;
        self.sums.partition_point(|sum| *sum < rolled) as u64 + 1
    }
}
