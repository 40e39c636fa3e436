//! The events that every benchmark writes: 100,000 targets with a popularity of Zipf 1.0, 1 million users, 10 %
//! unlikes, 5 % duplicates.

use tallyd_core::event::LikeEvent;
use tallyd_core::model::{Kind, Micros, Target, TargetId, UserId};

const TARGETS: usize = 100_000;
/// The users have the ids 1 to `USERS`.
pub const USERS: u64 = 1_000_000;
const UNLIKES_PERCENT: u64 = 10;
const DUPLICATES_PERCENT: u64 = 5;
const START: i64 = 1_790_000_000_000_000;

/// A source of events. The same seed always gives the same events.
pub struct Workload {
    state: u64,
    /// `weights[i]` is the probability that an event has one of the first `i + 1` targets.
    weights: Vec<f64>,
    at: i64,
    past: Vec<LikeEvent>,
    has_hot_target: bool,
}

impl Workload {
    pub fn new(seed: u64) -> Self {
        let mut sum = 0.0;
        let weights = (1..=TARGETS)
            .map(|rank| {
                sum += 1.0 / rank as f64;
                sum
            })
            .collect();
        Self {
            state: seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1,
            weights,
            at: START,
            past: Vec::new(),
            has_hot_target: false,
        }
    }

    /// Generates the same events, but one target gets half of all events.
    pub fn with_hot_target(self) -> Self {
        Self { has_hot_target: true, ..self }
    }

    fn below(&mut self, below: u64) -> u64 {
        // xorshift64* (Vigna 2016).
        self.state ^= self.state >> 12;
        self.state ^= self.state << 25;
        self.state ^= self.state >> 27;
        (self.state.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 11) % below
    }

    fn target(&mut self) -> Target {
        if self.has_hot_target && self.below(2) == 0 {
            return Target { kind: Kind(1), id: TargetId(1) };
        }
        let all = self.weights.last().copied().unwrap_or(1.0);
        let drawn = self.below(1 << 40) as f64 / (1_u64 << 40) as f64 * all;
        let rank = self.weights.partition_point(|weight| *weight < drawn) as u64;
        // Gives popular targets ids that are spread over all ids, as on a real site.
        Target { kind: Kind(1), id: TargetId(1 + rank.wrapping_mul(7_919) % TARGETS as u64) }
    }
}

impl Iterator for Workload {
    type Item = LikeEvent;

    fn next(&mut self) -> Option<LikeEvent> {
        if self.below(100) < DUPLICATES_PERCENT && !self.past.is_empty() {
            let place = self.below(self.past.len() as u64) as usize;
            return self.past.get(place).copied();
        }
        self.at += 10;
        let event = LikeEvent {
            target: self.target(),
            user: UserId(1 + self.below(USERS)),
            at: Micros(self.at),
            liked: self.below(100) >= UNLIKES_PERCENT,
        };
        if self.past.len() < 10_000 {
            self.past.push(event);
        } else {
            let place = self.below(10_000) as usize;
            if let Some(kept) = self.past.get_mut(place) {
                *kept = event;
            }
        }
        Some(event)
    }
}
