//! Removes calls from a history as long as the checker still finds a violation. Also finds the faults during which
//! users made calls that concern a violation. Pure.

use std::fmt::Write as _;

use crate::checker::{About, State, Violation, check};
use crate::history::{Answer, Call, History, Micros, What};

/// Maximum number of calls that are printed for a violation.
const CALLS_MAX: usize = 40;

/// Returns a text that contains a violation and the calls that concern the violation. The text marks the calls that are
/// enough to show the violation.
pub fn tell(violation: &Violation, history: &History, state: &State, began: Micros) -> String {
    let calls = concerned(violation, history);
    let shortest = if is_one(violation) { shortest(violation, &calls, history, state) } else { Vec::new() };
    let mut text = format!("{}: {}\n", violation.class, violation.says);
    if !shortest.is_empty() {
        let _ = writeln!(text, "  (the calls marked with > are enough to show it)");
    }
    let late = calls.len().saturating_sub(CALLS_MAX);
    let told = calls.iter().enumerate().filter(|(place, call)| *place >= late || shortest.contains(*call));
    let told: Vec<&Call> = told.map(|(_, call)| *call).collect();
    if told.len() < calls.len() {
        let _ = writeln!(text, "  ({} earlier calls are left out)", calls.len() - told.len());
    }
    for call in told {
        let mark = if shortest.contains(&call) { '>' } else { ' ' };
        let _ = writeln!(text, "  {mark} {}", line(call, history, began));
    }
    text
}

/// Removes calls as long as the checker still finds the violation, and returns the remaining calls. The search removes
/// many calls together, then fewer, then single calls (Zeller and Hildebrandt, *Simplifying and Isolating
/// Failure-Inducing Input*, 2002).
fn shortest<'a>(violation: &Violation, calls: &[&'a Call], history: &History, state: &State) -> Vec<&'a Call> {
    let state = state.of(&violation.about);
    let shows = |calls: &[&Call]| {
        let calls = calls.iter().map(|call| **call).collect();
        check(&History { calls, windows: history.windows.clone() }, &state).contains(violation)
    };
    let mut needed = if shows(calls) { calls.to_vec() } else { Vec::new() };
    let mut at_once = needed.len();
    while at_once > 0 {
        let mut from = 0;
        while from < needed.len() {
            let until = (from + at_once).min(needed.len());
            let without = [&needed[..from], &needed[until..]].concat();
            if shows(&without) {
                needed = without;
            } else {
                from = until;
            }
        }
        at_once /= 2;
    }
    needed
}

/// Returns the faults during which one of the calls was made.
pub fn met(violation: &Violation, history: &History) -> Vec<&'static str> {
    let calls = concerned(violation, history);
    let windows = history.windows.iter().filter(|window| calls.iter().any(|call| window.meets(call)));
    let mut names: Vec<&'static str> = windows.map(|window| window.fault).collect();
    names.sort_unstable();
    names.dedup();
    names
}

/// Returns whether the violation concerns one pair, one event or one message. Only a few calls concern such a subject.
/// In contrast, thousands of calls of the same kind change a counter's sum.
fn is_one(violation: &Violation) -> bool {
    matches!(violation.about, About::Pair { .. } | About::Event { .. } | About::Letter { .. })
}

/// Returns the calls to print. If the violation concerns a pair, an event or a message, returns all calls that concern
/// the same subject. If the violation concerns a counter, returns only calls that were made during a fault or were not
/// confirmed. A counter has thousands of other calls, and these calls tell nothing about the violation.
fn concerned<'a>(violation: &Violation, history: &'a History) -> Vec<&'a Call> {
    let (about, is_one) = (&violation.about, is_one(violation));
    let is_odd = |call: &Call| {
        !matches!(call.answer, Answer::Done { .. }) || history.windows.iter().any(|window| window.meets(call))
    };
    history.calls.iter().filter(|call| about.concerns(call) && (is_one || is_odd(call))).collect()
}

fn line(call: &Call, history: &History, began: Micros) -> String {
    let what = match call.what {
        What::Like { target, user, liked: true } => format!("like({target}, user {user})"),
        What::Like { target, user, liked: false } => format!("unlike({target}, user {user})"),
        What::Add { target, metric, delta, event } => {
            format!("add({target}, metric {metric}, {delta:+}, event {event})")
        }
        What::Set { target, metric, value } => format!("set({target}, metric {metric}, {value})"),
        What::Gain { member, delta } => format!("gain(member {member}, {delta:+})"),
        What::Late { day, member, delta } => {
            format!("late({}, member {member}, {delta:+})", crate::history::period(day))
        }
        What::Letter { letter, reason } => format!("letter({letter}, {reason})"),
        What::Read { target } => format!("read({target} ...)"),
        What::Zero { target } => format!("read zero views of {target}"),
    };
    let answer = match call.answer {
        Answer::Done { at: 0 } => "done".to_owned(),
        Answer::Done { at } => format!("done, at {at}"),
        Answer::Nothing => "nothing counts".to_owned(),
        Answer::NotCounted => "not counted, or no answer; not published".to_owned(),
        Answer::NotConfirmed { at } => format!("not confirmed, at {at}"),
        Answer::Unknown => "no answer".to_owned(),
    };
    let faults: Vec<&str> =
        history.windows.iter().filter(|window| window.meets(call)).map(|window| window.fault).collect();
    let faults = if faults.is_empty() { String::new() } else { format!("  during {}", faults.join(", ")) };
    let (begin, took) = (seconds(call.begin - began), seconds(call.end - call.begin));
    format!("+{begin:9.3} s for {took:6.3} s  task {:<4} {what}: {answer}{faults}", call.who)
}

#[expect(clippy::cast_precision_loss, reason = "for people")]
pub fn seconds(micros: Micros) -> f64 {
    micros as f64 / 1e6
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checker::Class;
    use crate::history::{Loses, Window};

    const PAIR: About = About::Pair { target: 1, user: 7 };

    fn like(begin: Micros, target: u64, answer: Answer) -> Call {
        Call { begin, end: begin + 1_000, who: 3, what: What::Like { target, user: 7, liked: true }, answer }
    }

    fn window(fault: &'static str, begin: Micros, end: Micros) -> Window {
        Window { fault, begin, end, loses: Loses::Nothing, loses_since: begin, loses_until: end }
    }

    #[test]
    fn a_violation_is_told_with_its_own_calls_and_the_faults_that_they_met() {
        let history = History {
            calls: vec![
                like(1_000_000, 1, Answer::Done { at: 1_000_500 }),
                like(2_000_000, 2, Answer::Done { at: 2_000_500 }),
                like(3_000_000, 1, Answer::NotConfirmed { at: 3_000_500 }),
            ],
            windows: vec![window("mysql-killed", 2_900_000, 3_500_000), window("redis-flushed", 1_500_000, 2_500_000)],
        };
        let state = State::default();
        let violation = &check(&history, &state)[0];
        assert_eq!((violation.class, &violation.about), (Class::Lost, &PAIR));
        assert_eq!(met(violation, &history), ["mysql-killed"]);
        let told = tell(violation, &history, &state, 0);
        let told: Vec<&str> = told.lines().collect();
        assert!(told[0].starts_with("lost: the like of 1000500 is confirmed"), "{told:?}");
        assert_eq!(told[1], "  (the calls marked with > are enough to show it)");
        assert!(told[2].starts_with("  > ") && told[2].ends_with("done, at 1000500"), "{told:?}");
        assert!(told[3].starts_with("    ") && told[3].ends_with("at 3000500  during mysql-killed"), "{told:?}");
        assert_eq!(told.len(), 4, "{told:?}");
    }

    #[test]
    fn of_a_hundred_calls_those_are_marked_that_show_the_violation_alone() {
        let calls = (0..100).map(|second| like(second * 1_000_000, 1, Answer::Done { at: second * 1_000_000 + 500 }));
        let history = History { calls: calls.collect(), windows: Vec::new() };
        let mut state = State::default();
        state.rows.insert((1, 7), (17_000_500, true));
        state.counters.insert((1, crate::checker::LIKE), 1);
        let violation = &check(&history, &state)[0];
        assert_eq!((violation.class, &violation.about), (Class::Reordered, &PAIR));
        let told = tell(violation, &history, &state, 0);
        let marked: Vec<&str> = told.lines().filter(|line| line.starts_with("  > ")).collect();
        assert_eq!(marked.len(), 2, "{told}");
        // The first marked call published the old event, which is still in MySQL. The second marked call published the
        // newest event.
        assert!(marked[0].ends_with("done, at 17000500") && marked[1].ends_with("done, at 99000500"), "{told}");
        assert!(told.contains("(59 earlier calls are left out)"), "{told}");
    }
}
