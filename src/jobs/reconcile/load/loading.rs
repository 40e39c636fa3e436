//! The buckets of one kind that are being loaded.

use tallyd_core::model::{CounterKey, Micros};
use tallyd_redis::layout::Loaded;
use tallyd_redis::load::Lost;

/// How far each bucket is.
pub(super) struct Loading {
    /// Which they are, and what they held.
    pub lost: Lost,
    /// By place in `lost.cuts`: the last repair.
    passes: Vec<u64>,
    /// The run that loads them.
    run: u64,
    /// Counters that were written since the buckets' cuts.
    pub busy: Vec<CounterKey>,
}

/// What is known of one of them.
pub(super) struct LoadingBucket {
    pub cut: Micros,
    pub state: Loaded,
}

impl Loading {
    pub fn new(lost: Lost, run: u64) -> Self {
        let passes = vec![0; lost.cuts.len()];
        Self { lost, passes, run, busy: Vec::new() }
    }

    /// The bucket; `None` where it is not being loaded.
    pub fn bucket(&self, bucket: u32) -> Option<LoadingBucket> {
        let place = bucket.checked_sub(self.lost.from)? as usize;
        let cut = (*self.lost.cuts.get(place)?)?;
        let state = Loaded::Loading { generation: self.run, pass: *self.passes.get(place)? };
        Some(LoadingBucket { cut: Micros(cut.get()), state })
    }

    /// Notes that the bucket was repaired.
    pub fn note(&mut self, bucket: u32, pass: u64) {
        if let Some(last) = bucket.checked_sub(self.lost.from).and_then(|place| self.passes.get_mut(place as usize)) {
            *last = pass;
        }
    }

    /// Leaves the bucket as it is.
    pub fn leave(&mut self, bucket: u32) {
        if let Some(cut) = bucket.checked_sub(self.lost.from).and_then(|place| self.lost.cuts.get_mut(place as usize)) {
            *cut = None;
        }
    }
}
