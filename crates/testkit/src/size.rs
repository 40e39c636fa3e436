//! How much a test does, and how long the programs in its world wait. A daily run proves the same with less data and in
//! less time than `dev/check-all`.

use std::hash::{DefaultHasher, Hash, Hasher};

use super::{Dice, World};

fn is_full() -> bool {
    std::env::var("TALLYD_TEST_SIZE").is_ok_and(|size| size == "full")
}

pub fn size<T>(daily: T, full: T) -> T {
    if is_full() { full } else { daily }
}

/// Returns one of these, which the test's name and the seed of the run choose. Returns all of them with
/// `TALLYD_TEST_SIZE=full`.
pub fn some_of<T: Copy>(all: &[T]) -> Vec<T> {
    if is_full() {
        return all.to_vec();
    }
    let mut name = DefaultHasher::new();
    std::thread::current().name().hash(&mut name);
    vec![all[Dice::of_run(name.finish()).below(all.len() as u64) as usize]]
}

/// Returns the number by which a hurried world divides intervals: `TALLYD_TEST_PACE`, or five.
pub fn pace() -> u32 {
    std::env::var("TALLYD_TEST_PACE").map_or(5, |pace| pace.parse().expect("TALLYD_TEST_PACE must be a number"))
}

impl World {
    /// Divides the intervals of the programs that start from now on (`crates/connect/src/pace.rs`), because the test
    /// waits for these intervals.
    pub fn hurried(mut self) -> Self {
        self.is_hurried = true;
        self
    }
}
