//! A model of all clicks, which the demo compares with MySQL and Redis. It does no I/O.
//!
//! If a click's event is never published, only Redis has counted the click. So the click is not part of the model. The
//! user never clicks that video again, because the state of this pair is unknown.

use std::collections::{HashMap, HashSet};

use tallyd_core::event::LikeEvent;
use tallyd_core::model::Micros;

use crate::dice::Dice;

/// How many videos the site has. Video 1 is the most popular video.
pub const VIDEOS: u32 = 20_000;

/// How many users the site has.
pub const USERS: u64 = 4_000;

/// The maximum number of pairs. This number limits the size of the model and of MySQL, even if the demo runs long.
const PAIRS_MAX: usize = 1_000_000;

/// A user and a video.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Pair {
    pub video: u64,
    pub user: u64,
}

/// The state after a user's last click on a video.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct State {
    pub at: Micros,
    pub liked: bool,
}

/// The result of all clicks.
pub struct Model {
    pub pairs: HashMap<Pair, State>,
    /// The number of likes of each video, at the index of the video's id.
    pub likes: Vec<i64>,
    /// The keys of `pairs`, in a list from which a random key can be chosen.
    known: Vec<Pair>,
    /// The pairs whose click is in flight to Redis. Other tasks must not click on these pairs.
    busy: HashSet<Pair>,
    retired: HashSet<Pair>,
}

impl Model {
    pub fn new() -> Self {
        let likes = vec![0; VIDEOS as usize + 1];
        Self { pairs: HashMap::new(), likes, known: Vec::new(), busy: HashSet::new(), retired: HashSet::new() }
    }

    /// Begins a click and returns whether it is a like. Users unlike only videos that they like, and like only videos
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

    /// Returns a random pair that was clicked before, or `None` if there is none.
    pub fn any(&self, dice: &mut Dice) -> Option<Pair> {
        let place = dice.below(self.known.len().max(1) as u64);
        self.known.get(place as usize).copied()
    }

    /// Ends a click that failed and did not count.
    pub fn cancel(&mut self, pair: Pair) {
        self.busy.remove(&pair);
    }

    /// Stores a finished click: Redis has counted the click, and its event will be published.
    pub fn clicked(&mut self, event: &LikeEvent) {
        let pair = Pair { video: event.target.id.0, user: event.user.0 };
        self.busy.remove(&pair);
        if self.pairs.insert(pair, State { at: event.at, liked: event.liked }).is_none() {
            self.known.push(pair);
        }
        if let Some(likes) = self.likes.get_mut(pair.video as usize) {
            *likes += if event.liked { 1 } else { -1 };
        }
    }

    /// Excludes a pair from all later clicks: Redis has counted the pair's last click, but the click's event will never
    /// be published.
    pub fn lost(&mut self, pair: Pair) {
        self.busy.remove(&pair);
        self.retired.insert(pair);
    }

    /// Returns the number of likes of one video.
    pub fn likes_of(&self, video: u64) -> i64 {
        usize::try_from(video).ok().and_then(|video| self.likes.get(video)).copied().unwrap_or_default()
    }
}
