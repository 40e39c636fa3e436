//! What was really clicked: the truth that MySQL and Redis are compared with. Pure.
//!
//! A click whose publish is lost never becomes known outside of Redis, so it is not part of this truth, and its user
//! never clicks that video again: nobody could say which state it is in.

use std::collections::{HashMap, HashSet};

use tallyd_core::event::LikeEvent;
use tallyd_core::model::Micros;

use crate::dice::Dice;

/// Videos of the site; video 1 is the most popular one.
pub const VIDEOS: u32 = 20_000;

/// Users of the site.
pub const USERS: u64 = 4_000;

/// However long the demo plays, the model's and MySQL's size stay bounded.
const PAIRS_MAX: usize = 1_000_000;

/// Who clicks on what.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Pair {
    pub video: u64,
    pub user: u64,
}

/// The state that a user's last click on a video has set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct State {
    pub at: Micros,
    pub liked: bool,
}

/// All clicks' outcome.
pub struct Model {
    pub pairs: HashMap<Pair, State>,
    /// The likes of each video; its id is the place.
    pub likes: Vec<i64>,
    /// The keys of `pairs`, to choose among.
    known: Vec<Pair>,
    /// On their way to Redis: nobody else's turn.
    busy: HashSet<Pair>,
    retired: HashSet<Pair>,
}

impl Model {
    pub fn new() -> Self {
        let likes = vec![0; VIDEOS as usize + 1];
        Self { pairs: HashMap::new(), likes, known: Vec::new(), busy: HashSet::new(), retired: HashSet::new() }
    }

    /// The user is about to click: whether that is a like. A user unlikes only what they like, and likes only what they
    /// don't. None where it is not their turn.
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

    /// One that was clicked before; none while there is none.
    pub fn any(&self, dice: &mut Dice) -> Option<Pair> {
        let place = dice.below(self.known.len().max(1) as u64);
        self.known.get(place as usize).copied()
    }

    /// Not this one after all.
    pub fn cancel(&mut self, pair: Pair) {
        self.busy.remove(&pair);
    }

    /// The click counts in Redis, and its event will be published.
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

    /// The click counts in Redis, and its event will never be published.
    pub fn lost(&mut self, pair: Pair) {
        self.busy.remove(&pair);
        self.retired.insert(pair);
    }

    /// The likes of one video.
    pub fn likes_of(&self, video: u64) -> i64 {
        usize::try_from(video).ok().and_then(|video| self.likes.get(video)).copied().unwrap_or_default()
    }
}
