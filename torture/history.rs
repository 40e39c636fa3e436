//! What was done and what was answered: every call of every user, and every fault.

use std::sync::{Mutex, PoisonError};

/// This machine's clock, in microseconds since 1970. It is Redis' clock, too: all run on one machine.
pub type Micros = i64;

/// A call of a user.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Call {
    pub begin: Micros,
    pub end: Micros,
    /// Which user's task.
    pub who: u32,
    pub what: What,
    pub answer: Answer,
}

/// What was asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    /// A user likes a target, or does no longer.
    Like { target: u64, user: u64, liked: bool },
    /// A number of a target changes; `event` makes its id.
    Add { target: u64, metric: u8, delta: i64, event: u64 },
    /// A number of a target becomes a value.
    Set { target: u64, metric: u8, value: i64 },
    /// A member gains on the board of likes, in the periods of now.
    Gain { member: u64, delta: i64 },
    /// A member gains on the board of a day that is over: so many days after 1970-01-01.
    Late { day: i32, member: u64, delta: i64 },
    /// A message that can never be applied.
    Letter { letter: u64, reason: &'static str },
    /// The numbers of some targets.
    Read { target: u64 },
}

/// What the client said.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// The broker has confirmed the event of that `at`, or Redis has answered where there is none (0).
    Done { at: Micros },
    /// Nothing counts: it would have been less than zero, or the user had clicked too often.
    Nothing,
    /// Nothing was published; Redis may have counted it, until a reconcile.
    NotCounted,
    /// The event of that `at` was not confirmed: the broker may have it all the same.
    NotConfirmed { at: Micros },
    /// It may have been done once.
    Unknown,
}

/// What a fault may lose, by the documents.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Loses {
    Nothing,
    /// Events that were in a queue.
    Queued,
    /// What only Redis knew: what boards have gained since their last snapshot.
    Boards,
    /// Nothing: an event whose `at` is ahead waits as a dead letter.
    Ahead,
    /// What MySQL has got since the copy from which it came back.
    Tables,
}

/// `[consumer] future_max`: an event that is further ahead is set aside.
const FUTURE_MAX: Micros = 300_000_000;

/// A fault's time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Window {
    pub fault: &'static str,
    pub begin: Micros,
    /// When it was undone.
    pub end: Micros,
    pub loses: Loses,
    /// Since when what is lost may have been done: of boards the last snapshot.
    pub loses_since: Micros,
    /// Until when: of boards until they were put back.
    pub loses_until: Micros,
}

impl Window {
    /// Whether what was called then may be lost.
    pub fn excuses(&self, loses: Loses, call: &Call) -> bool {
        self.loses == loses && call.end >= self.loses_since && call.begin <= self.loses_until
    }

    /// Whether the call was on its way while the fault lasted.
    pub fn meets(&self, call: &Call) -> bool {
        call.end >= self.begin && call.begin <= self.end
    }

    /// Whether the other fault lasted at the same time.
    pub fn overlaps(&self, other: &Self) -> bool {
        other.end >= self.begin && other.begin <= self.end
    }
}

/// All of it.
#[derive(Clone, Debug, Default)]
pub struct History {
    pub calls: Vec<Call>,
    pub windows: Vec<Window>,
}

impl History {
    /// Whether a fault may have lost what the call did.
    pub fn excuses(&self, loses: Loses, call: &Call) -> bool {
        self.windows.iter().any(|window| window.excuses(loses, call))
    }

    /// Whether what the broker has confirmed may be gone all the same.
    pub fn may_lose(&self, call: &Call) -> bool {
        self.excuses(Loses::Queued, call) || self.excuses(Loses::Tables, call)
    }

    /// Whether the call got an `at` of a clock that a fault had set ahead. It stays ahead for its user when the clock is right again.
    pub fn is_ahead(&self, call: &Call, at: Micros) -> bool {
        let is_before = |window: &Window| window.loses == Loses::Ahead && window.begin <= call.end;
        is_ahead(at, call.end) && self.windows.iter().any(is_before)
    }
}

/// Whether `at` was too far ahead at that instant to be written.
pub fn is_ahead(at: Micros, now: Micros) -> bool {
    at - now > FUTURE_MAX
}

/// The text of a count's `event_id`.
pub fn event_id(event: u64) -> String {
    format!("torture-{event}")
}

/// The name of a day's period.
pub fn period(day: i32) -> String {
    let first = jiff::civil::date(1970, 1, 1);
    first.saturating_add(jiff::Span::new().days(day)).to_string()
}

/// Who writes a history while it happens.
#[derive(Debug, Default)]
pub struct Recorder {
    calls: Mutex<Vec<Call>>,
    windows: Mutex<Vec<Window>>,
}

impl Recorder {
    pub fn call(&self, call: Call) {
        self.calls.lock().unwrap_or_else(PoisonError::into_inner).push(call);
    }

    pub fn window(&self, window: Window) {
        self.windows.lock().unwrap_or_else(PoisonError::into_inner).push(window);
    }

    pub fn windows(&self) -> Vec<Window> {
        self.windows.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub fn calls(&self) -> usize {
        self.calls.lock().unwrap_or_else(PoisonError::into_inner).len()
    }

    /// What was recorded, in the order of the calls' begin.
    pub fn history(&self) -> History {
        let mut calls = self.calls.lock().unwrap_or_else(PoisonError::into_inner).clone();
        calls.sort_by_key(|call| (call.begin, call.end, call.who));
        History { calls, windows: self.windows() }
    }
}

/// This machine's clock.
pub fn now() -> Micros {
    tallyd::runtime::clock::now().0
}
