//! Compares the stored data with every answer that the users got. The checker has no side effects: it calculates the
//! violations from a history and a state.
//!
//! There are three rules for an event. If the broker confirmed the event, the event must be stored, unless the
//! documents allow a fault to lose the event. If the client received no answer, the event may be stored or missing. If
//! no user sent the event, the event must not be stored. The rules determine the allowed contents of each row, counter,
//! board and dead letter. The checker estimates nothing, because `at` or an id identifies each event.

mod boards;
mod fans;
mod letters;
mod likes;
mod numbers;
mod repairs;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fmt;

pub use boards::{HOT, PAST, SEEN};
pub use fans::POSTS;
pub use letters::mark;
pub use numbers::VIEW;

use crate::history::{Call, History, Micros, What};

/// The code of `like` in `[metrics]`.
pub const LIKE: u8 = 1;

/// The final contents of the stores. Only the targets, users and members that belong to this run are included.
#[derive(Clone, Debug, Default)]
pub struct State {
    /// Like records. The key has the target and the user. The value has the row's `at`, and a flag that is true if the
    /// user likes the target.
    pub rows: HashMap<(u64, u64), (Micros, bool)>,
    /// The table `counter`, by target and metric. A counter that is zero can be missing.
    pub counters: BTreeMap<(u64, u8), i64>,
    /// The same counters in Redis.
    pub redis: BTreeMap<(u64, u8), i64>,
    /// Number of buckets that Redis lost and that no daemon has loaded again.
    pub unloaded: usize,
    /// The events of the type `count` that the daemon has applied. Each entry contains the event's `at` in seconds, and
    /// the event's id.
    pub ledger: HashSet<(i64, [u8; 16])>,
    /// The newest event that set a counter. The key is target and metric; the value is `at` and the set value.
    pub sets: HashMap<(u64, u8), (Micros, i64)>,
    /// The repairs that runs have made in Redis, of numbers that the daemons add: target, metric and time.
    pub repairs: Vec<(u64, u8, Micros)>,
    /// Live boards in Redis. The key is board and period; the value is the members' scores.
    pub boards: BTreeMap<(String, String), BTreeMap<u64, i64>>,
    /// Closed and frozen boards in Redis.
    pub frozen: BTreeMap<(String, String), BTreeMap<u64, i64>>,
    /// Closed periods in MySQL.
    pub archives: BTreeMap<(String, String), Archive>,
    pub letters: Vec<Letter>,
}

impl State {
    /// Returns the part of the state that concerns this subject. For an event of the type `count`, this part is empty.
    /// Such a violation means that the ledger does not contain the event, and an empty ledger does not contain the
    /// event either.
    pub fn of(&self, about: &About) -> Self {
        let mut part = Self::default();
        match about {
            About::Pair { target, user } => {
                let pair = (*target, *user);
                part.rows.extend(self.rows.get(&pair).map(|row| (pair, *row)));
            }
            About::Letter { letter: Some(letter) } => {
                let mark = mark(*letter);
                part.letters.extend(self.letters.iter().filter(|kept| kept.body.contains(&mark)).cloned());
            }
            _ => {}
        }
        part
    }
}

/// A closed period in MySQL.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Archive {
    /// From `leaderboard_period`.
    pub state: String,
    /// Members and their scores, in the order of the places.
    pub places: Vec<(u64, i64)>,
    /// True if the places are 1, 2, 3 and so on.
    pub is_gapless: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Letter {
    pub body: String,
    pub reason: String,
    /// True if the dead letter was replayed. The checker then checks the result of the replay instead of the dead
    /// letter.
    pub is_replayed: bool,
}

/// The way in which tallyd broke a promise.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Class {
    /// A confirmed event is missing.
    Lost,
    /// A confirmed event was applied more than once.
    Doubled,
    /// An older event won over a newer, confirmed event.
    Reordered,
    /// The stored data contain an event that no user sent.
    Invented,
}

impl Class {
    pub const ALL: [Self; 4] = [Self::Lost, Self::Doubled, Self::Reordered, Self::Invented];

    /// Returns `Lost` if a counter is too low, and `Doubled` if a counter is too high.
    fn of(is: i64, should: i64) -> Self {
        if is < should { Self::Lost } else { Self::Doubled }
    }
}

impl fmt::Display for Class {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Lost => "lost",
            Self::Doubled => "doubled",
            Self::Reordered => "reordered",
            Self::Invented => "invented",
        })
    }
}

/// The subject of a violation. The subject determines which calls are printed.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum About {
    Pair {
        target: u64,
        user: u64,
    },
    /// All likes of a target.
    Likes {
        target: u64,
    },
    Number {
        target: u64,
        metric: u8,
    },
    Event {
        event: u64,
    },
    Gain {
        member: u64,
    },
    /// The daemon's additions to the board of views.
    Views {
        target: u64,
    },
    Late {
        day: i32,
        member: Option<u64>,
    },
    Letter {
        letter: Option<u64>,
    },
    Nothing,
}

impl About {
    /// Returns whether the call may have caused a violation that concerns this subject.
    pub fn concerns(&self, call: &Call) -> bool {
        match (self, &call.what) {
            (Self::Pair { target, user }, What::Like { target: of, user: by, .. }) => (target, user) == (of, by),
            (Self::Likes { target }, What::Like { target: of, .. }) => target == of,
            (
                Self::Number { target, metric },
                What::Add { target: of, metric: which, .. } | What::Set { target: of, metric: which, .. },
            ) => (target, metric) == (of, which),
            (Self::Event { event }, What::Add { event: of, .. }) => event == of,
            (Self::Gain { member }, What::Gain { member: of, .. }) => member == of,
            (Self::Views { target }, What::Add { target: of, metric, .. }) => target == of && *metric == VIEW,
            (Self::Views { target }, What::Zero { target: of }) => target == of,
            (Self::Late { day, member }, What::Late { day: of, member: who, .. }) => {
                day == of && member.is_none_or(|member| member == *who)
            }
            (Self::Letter { letter }, What::Letter { letter: of, .. }) => *letter == Some(*of),
            _ => false,
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation {
    pub class: Class,
    pub about: About,
    /// A sentence.
    pub says: String,
}

impl Violation {
    fn new(class: Class, about: About, says: String) -> Self {
        Self { class, about, says }
    }
}

/// Returns all violations.
pub fn check(history: &History, state: &State) -> Vec<Violation> {
    let mut found = Vec::new();
    let aside = letters::Aside::of(history, state);
    likes::check(history, state, &aside, &mut found);
    let applied = numbers::check(history, state, &aside, &mut found);
    numbers::compare_with_redis(state, &mut found);
    repairs::check(history, state, &mut found);
    boards::check(history, state, &applied, &mut found);
    fans::check(history, state, &mut found);
    letters::check(history, state, &aside, &mut found);
    found
}
