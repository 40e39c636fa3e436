//! The history of a run: every call of every user with its answer, and every fault.

use std::sync::{Mutex, PoisonError};

/// This machine's clock, in microseconds since 1970. Redis has the same clock, because everything runs on one machine.
pub type Micros = i64;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Call {
    pub begin: Micros,
    pub end: Micros,
    /// The number of the task that made the call.
    pub who: u32,
    pub what: What,
    pub answer: Answer,
}

/// The kind of request that a call makes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    /// A user likes or unlikes a target.
    Like { target: u64, user: u64, liked: bool },
    /// A count event changes a counter of a target. The event's id is made from `event`.
    Add { target: u64, metric: u8, delta: i64, event: u64 },
    /// A counter of a target is set to a value.
    Set { target: u64, metric: u8, value: i64 },
    /// On the board of likes, a member's score increases in all current periods.
    Gain { member: u64, delta: i64 },
    /// On the board of a past day, a member's score increases. `day` is the number of days since 1970-01-01.
    Late { day: i32, member: u64, delta: i64 },
    /// A message that can never be applied.
    Letter { letter: u64, reason: &'static str },
    /// A client reads the counters of some targets.
    Read { target: u64 },
    /// A client has read that a target has no views.
    Zero { target: u64 },
}

/// The client's answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// The broker confirmed the event with that `at`. If the request has no event, Redis answered the request, and `at`
    /// is 0.
    Done { at: Micros },
    /// The request has no effect: the counter would be negative, or the user clicked too often.
    Nothing,
    /// Nothing was published. Redis may contain the request's effect until the next reconcile.
    NotCounted,
    /// The broker did not confirm the event with that `at`, but may have received it.
    NotConfirmed { at: Micros },
    /// The request may have had its effect once, or not at all.
    Unknown,
}

/// The losses that the documents allow for a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Loses {
    Nothing,
    /// Events that were in a queue.
    Queued,
    /// Data that only Redis has: scores that were added to boards since their last snapshot.
    Boards,
    /// Nothing is lost. An event whose `at` is in the future waits as a dead letter.
    Ahead,
    /// The fault restored a copy of MySQL. Rows that MySQL got after that copy was taken are lost.
    Tables,
    /// Views on their board. Their counters have them.
    BoardOfViews,
}

/// The value of `[consumer] future_max`. An event whose `at` is further in the future is dead-lettered.
const FUTURE_MAX: Micros = 300_000_000;

/// The time during which a fault lasted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Window {
    pub fault: &'static str,
    pub begin: Micros,
    /// The time when the fault was undone.
    pub end: Micros,
    pub loses: Loses,
    /// Calls that were made from this time on may be lost. For boards, this is the time of the last snapshot.
    pub loses_since: Micros,
    /// Calls that were made up to this time may be lost. For boards, this is the time of the restore.
    pub loses_until: Micros,
}

impl Window {
    /// Returns true if the documents allow this fault to lose the effect of the call.
    pub fn excuses(&self, loses: Loses, call: &Call) -> bool {
        self.loses == loses && call.end >= self.loses_since && call.begin <= self.loses_until
    }

    /// Returns whether the call was in flight while the fault lasted.
    pub fn meets(&self, call: &Call) -> bool {
        call.end >= self.begin && call.begin <= self.end
    }

    /// Returns whether the two faults lasted at the same time.
    pub fn overlaps(&self, other: &Self) -> bool {
        other.end >= self.begin && other.begin <= self.end
    }
}

#[derive(Clone, Debug, Default)]
pub struct History {
    pub calls: Vec<Call>,
    pub windows: Vec<Window>,
}

impl History {
    /// Returns true if the documents allow at least one of the faults to lose the effect of the call.
    pub fn excuses(&self, loses: Loses, call: &Call) -> bool {
        self.windows.iter().any(|window| window.excuses(loses, call))
    }

    /// Returns true if the documents allow a fault to lose the call's event, even after the broker has confirmed the
    /// event.
    pub fn may_lose(&self, call: &Call) -> bool {
        self.excuses(Loses::Queued, call) || self.excuses(Loses::Tables, call)
    }

    /// Returns whether the call's `at` is ahead of the real time because a fault had set a clock ahead. Even after the
    /// clock is corrected, the `at` of the user's next events stays ahead.
    pub fn is_ahead(&self, call: &Call, at: Micros) -> bool {
        let is_before = |window: &Window| window.loses == Loses::Ahead && window.begin <= call.end;
        is_ahead(at, call.end) && self.windows.iter().any(is_before)
    }
}

/// Returns whether, at that time, `at` was so far in the future that the daemon rejected the event.
pub fn is_ahead(at: Micros, now: Micros) -> bool {
    at - now > FUTURE_MAX
}

/// Returns a count's `event_id` as text.
pub fn event_id(event: u64) -> String {
    format!("torture-{event}")
}

/// Returns the name of a day's period.
pub fn period(day: i32) -> String {
    let first = jiff::civil::date(1970, 1, 1);
    first.saturating_add(jiff::Span::new().days(day)).to_string()
}

/// Records the history during the run.
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

    /// Returns the history. The calls of the history are in the order in which they began.
    pub fn history(&self) -> History {
        let mut calls = self.calls.lock().unwrap_or_else(PoisonError::into_inner).clone();
        calls.sort_by_key(|call| (call.begin, call.end, call.who));
        History { calls, windows: self.windows() }
    }
}

/// This machine's clock.
pub fn now() -> Micros {
    tallyd_base::runtime::clock::now().0
}
