//! A model of all clicks, which the demo compares with MySQL and Redis. It does no I/O.
//!
//! If a click's event is never published, only Redis has counted the click. So the click is not part of the model. The
//! user never clicks that target again, because the state of this pair is unknown.

use std::collections::{HashMap, HashSet};

use tallyd_core::event::LikeEvent;
use tallyd_core::model::{Kind, Micros, Target, UserId};

use crate::dice::Dice;

/// How many videos the site has, and how many articles. Number 1 is the most popular.
pub const TARGETS: u32 = 20_000;

/// How many users the site has.
pub const USERS: u64 = 4_000;

/// The maximum number of pairs. This number limits the size of the model and of MySQL, even if the demo runs long.
const PAIRS_MAX: usize = 1_000_000;

/// A user, and a video or an article.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Pair {
    pub target: Target,
    pub user: UserId,
}

/// The state after a user's last click on a target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct State {
    pub at: Micros,
    pub liked: bool,
}

/// The result of all clicks.
#[derive(Default)]
pub struct Model {
    pub pairs: HashMap<Pair, State>,
    /// The number of likes of each target that was ever clicked.
    pub likes: HashMap<Target, i64>,
    /// The keys of `pairs` for each kind, in a list from which a random key can be chosen.
    known: HashMap<Kind, Vec<Pair>>,
    /// The pairs whose click is in flight. Other tasks must not click on these pairs.
    busy: HashSet<Pair>,
    retired: HashSet<Pair>,
}

impl Model {
    /// Begins a click and returns whether it is a like. Users unlike only targets that they like, and like only targets
    /// that they don't like. Returns `None` if the pair's last click has not ended, or if an event of the pair was
    /// lost. Also returns `None` if the model has no room for a new pair.
    pub fn begin(&mut self, pair: Pair) -> Option<bool> {
        let known = self.pairs.get(&pair);
        if self.busy.contains(&pair) || self.retired.contains(&pair) {
            return None;
        }
        if known.is_none() && self.pairs.len() >= PAIRS_MAX {
            return None;
        }
        let liked = known.is_some_and(|state| state.liked);
        self.busy.insert(pair);
        Some(!liked)
    }

    /// Returns a random pair of this kind that was clicked before, or `None` if there is none.
    pub fn any(&self, kind: Kind, dice: &mut Dice) -> Option<Pair> {
        let known = self.known.get(&kind)?;
        known.get(dice.below(known.len() as u64) as usize).copied()
    }

    /// Ends a click that failed and did not count.
    pub fn cancel(&mut self, pair: Pair) {
        self.busy.remove(&pair);
    }

    /// Stores a click whose event is published, or will certainly be published.
    pub fn clicked(&mut self, event: &LikeEvent) {
        let LikeEvent { target, user, at, liked } = *event;
        let pair = Pair { target, user };
        self.busy.remove(&pair);
        if self.pairs.insert(pair, State { at, liked }).is_none() {
            self.known.entry(target.kind).or_default().push(pair);
        }
        *self.likes.entry(target).or_default() += if liked { 1 } else { -1 };
    }

    /// Excludes a pair from all later clicks: Redis has counted the pair's last click, but the click's event will never
    /// be published.
    pub fn lost(&mut self, pair: Pair) {
        self.busy.remove(&pair);
        self.retired.insert(pair);
    }

    /// Returns the number of pairs of this kind.
    pub fn pairs_of(&self, kind: Kind) -> u64 {
        self.known.get(&kind).map_or(0, |known| known.len() as u64)
    }

    /// Returns the number of likes of one target.
    pub fn likes_of(&self, target: Target) -> i64 {
        self.likes.get(&target).copied().unwrap_or_default()
    }
}
