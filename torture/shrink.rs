//! The shortest history that shows a violation: what has to do with it alone, and the faults that it met. Pure.

use std::fmt::Write as _;

use crate::checker::{About, Violation};
use crate::history::{Answer, Call, History, Micros, What};

/// Calls that are printed of one violation.
const CALLS_MAX: usize = 40;

/// A violation with the calls that it is about, for a person.
pub fn tell(violation: &Violation, history: &History, began: Micros) -> String {
    let calls = concerned(violation, history);
    let mut text = format!("{}: {}\n", violation.class, violation.says);
    let left_out = calls.len().saturating_sub(CALLS_MAX);
    if left_out > 0 {
        let _ = writeln!(text, "    ({left_out} earlier calls are left out)");
    }
    for call in &calls[left_out..] {
        let _ = writeln!(text, "    {}", line(call, history, began));
    }
    text
}

/// The faults during which one of the calls was made.
pub fn met(violation: &Violation, history: &History) -> Vec<&'static str> {
    let calls = concerned(violation, history);
    let windows = history.windows.iter().filter(|window| calls.iter().any(|call| window.meets(call)));
    let mut names: Vec<&'static str> = windows.map(|window| window.fault).collect();
    names.sort_unstable();
    names.dedup();
    names
}

/// Of a pair, all; of a number that many have changed, those that met a fault or were not confirmed: the others are like thousands.
fn concerned<'a>(violation: &Violation, history: &'a History) -> Vec<&'a Call> {
    let about = &violation.about;
    let is_one = matches!(about, About::Pair { .. } | About::Event { .. } | About::Letter { .. });
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
    };
    let answer = match call.answer {
        Answer::Done { at: 0 } => "done".to_owned(),
        Answer::Done { at } => format!("done, at {at}"),
        Answer::Nothing => "nothing counts".to_owned(),
        Answer::NotCounted => "not counted, or not answered; not published".to_owned(),
        Answer::NotConfirmed { at } => format!("not confirmed, at {at}"),
        Answer::Unknown => "no answer".to_owned(),
    };
    let faults: Vec<&str> =
        history.windows.iter().filter(|window| window.meets(call)).map(|window| window.fault).collect();
    let faults = if faults.is_empty() { String::new() } else { format!("  during {}", faults.join(", ")) };
    let (begin, took) = (seconds(call.begin - began), seconds(call.end - call.begin));
    format!("+{begin:9.3} s for {took:6.3} s  task {:<4} {what}: {answer}{faults}", call.who)
}

/// Of microseconds.
#[expect(clippy::cast_precision_loss, reason = "for people")]
pub fn seconds(micros: Micros) -> f64 {
    micros as f64 / 1e6
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checker::Class;
    use crate::history::{Loses, Window};

    #[test]
    fn a_violation_is_told_with_its_own_calls_and_the_faults_that_they_met() {
        let call = |begin: Micros, target, answer| Call {
            begin,
            end: begin + 1_000,
            who: 3,
            what: What::Like { target, user: 7, liked: true },
            answer,
        };
        let window = |fault, begin, end| Window {
            fault,
            begin,
            end,
            loses: Loses::Nothing,
            loses_since: begin,
            loses_until: end,
        };
        let history = History {
            calls: vec![
                call(1_000_000, 1, Answer::Done { at: 1_000_500 }),
                call(2_000_000, 2, Answer::Done { at: 2_000_500 }),
                call(3_000_000, 1, Answer::NotConfirmed { at: 3_000_500 }),
            ],
            windows: vec![window("mysql-killed", 2_900_000, 3_500_000), window("redis-flushed", 1_500_000, 2_500_000)],
        };
        let violation =
            Violation { class: Class::Lost, about: About::Pair { target: 1, user: 7 }, says: "it is gone".to_owned() };
        assert_eq!(met(&violation, &history), ["mysql-killed"]);
        let told = tell(&violation, &history, 0);
        assert_eq!(told.lines().count(), 3, "{told}");
        assert!(told.starts_with("lost: it is gone\n"), "{told}");
        assert!(told.ends_with("not confirmed, at 3000500  during mysql-killed\n"), "{told}");
    }
}
