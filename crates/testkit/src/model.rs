//! What must come out of events.

use std::collections::{BTreeMap, HashMap};

use tallyd_core::event::{LikeEvent, encode_like};
use tallyd_core::model::{Kind, Micros, Target, TargetId, UserId};

/// What the tables must hold: per (target, user) the newest event.
#[derive(Default)]
pub struct Model {
    pub rows: HashMap<(Target, UserId), (Micros, bool)>,
}

impl Model {
    pub fn apply(&mut self, event: &LikeEvent) {
        let new = (event.at, !event.liked);
        let row = self.rows.entry((event.target, event.user)).or_insert(new);
        *row = (*row).max(new);
    }

    pub fn counters(&self) -> BTreeMap<Target, i64> {
        let mut counters = BTreeMap::new();
        for ((target, _), (_, is_del)) in &self.rows {
            *counters.entry(*target).or_default() += i64::from(!is_del);
        }
        counters
    }
}

/// A video.
pub fn target(id: u64) -> Target {
    Target { kind: Kind(1), id: TargetId(id) }
}

/// An event as producers send it.
pub fn body(event: &LikeEvent) -> (UserId, Vec<u8>) {
    (event.user, encode_like(event, "video", None))
}
