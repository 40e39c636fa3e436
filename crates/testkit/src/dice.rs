//! Reproducible random numbers.

use std::process::Command;
use std::sync::LazyLock;

use super::root;

/// The seed of this run. Each commit has another seed, so the tests do not replay one history for ever. The seed is
/// printed, so that `TALLYD_TEST_SEED` can repeat a failure.
static RUN: LazyLock<u64> = LazyLock::new(|| {
    let seed = match std::env::var("TALLYD_TEST_SEED") {
        Ok(seed) => seed.parse().expect("TALLYD_TEST_SEED must be a number"),
        Err(_) => commits().unwrap_or(1),
    };
    eprintln!("TALLYD_TEST_SEED={seed}");
    seed
});

fn commits() -> Option<u64> {
    let counted = Command::new("git").args(["rev-list", "--count", "HEAD"]).current_dir(root()).output().ok()?;
    String::from_utf8(counted.stdout).ok()?.trim().parse().ok()
}

#[derive(Clone)]
pub struct Dice(u64);

impl Dice {
    /// Returns a generator for this run of the tests. A test that needs several generators gives each another number.
    pub fn of_run(number: u64) -> Self {
        Self::new(RUN.wrapping_mul(1_000_003).wrapping_add(number))
    }

    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    /// Returns a number below `below`. The generator is xorshift64* (Vigna 2016, "An experimental exploration").
    pub fn below(&mut self, below: u64) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 11) % below
    }

    pub fn percent(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }
}
