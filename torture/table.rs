//! The result of a run: a table for humans, and a JSON object for programs. Pure.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::time::Duration;

use serde_json::{Value, json};

use crate::checker::{Class, Violation};
use crate::history::{Answer, Call, History, What, Window};
use crate::shrink;

/// The result of one injection of a fault.
#[derive(Clone, Debug)]
pub struct Injected {
    pub fault: &'static str,
    /// The longest time from an accepted event to its row in MySQL. The time covers all events from the start of the
    /// fault until everything worked again.
    pub outage: Duration,
    /// Time from the end of the fault until everything worked again. `None` if the run never saw that everything worked
    /// again.
    pub recovery: Option<Duration>,
    /// True if another fault lasted at the same time, so the outage can't be attributed to this fault.
    pub has_met: bool,
    /// The reason why the fault could not be injected.
    pub error: Option<String>,
}

/// One line of the table.
#[derive(Clone, Debug, Default, PartialEq)]
struct Line {
    times: usize,
    outage: Duration,
    recovery: Duration,
    /// True if all injections overlapped with another fault.
    has_met: bool,
    not_well: usize,
    /// The slowest call during the fault, and the count of failed calls. These two numbers show whether users noticed
    /// the fault.
    slowest: Duration,
    failed: usize,
    violations: usize,
}

fn lines(injected: &[Injected], violations: &[Violation], history: &History) -> BTreeMap<&'static str, Line> {
    let mut lines: BTreeMap<&'static str, Line> = BTreeMap::new();
    for one in injected {
        let line = lines.entry(one.fault).or_default();
        line.times += usize::from(one.error.is_none());
        if one.has_met && injected.iter().any(|other| other.fault == one.fault && !other.has_met) {
            continue;
        }
        line.has_met = one.has_met;
        line.outage = line.outage.max(one.outage);
        match one.recovery {
            Some(recovery) => line.recovery = line.recovery.max(recovery),
            None => line.not_well += 1,
        }
    }
    for window in &history.windows {
        let met_another =
            |window: &Window| history.windows.iter().any(|other| other != window && other.overlaps(window));
        let mut others = history.windows.iter().filter(|other| other.fault == window.fault);
        if met_another(window) && others.any(|other| !met_another(other)) {
            continue;
        }
        let line = lines.entry(window.fault).or_default();
        for call in history.calls.iter().filter(|call| window.meets(call)) {
            let took = Duration::from_micros((call.end - call.begin).max(0).unsigned_abs());
            line.slowest = line.slowest.max(took);
            line.failed += usize::from(!matches!(call.answer, Answer::Done { .. } | Answer::Nothing));
        }
    }
    for violation in violations {
        for fault in shrink::met(violation, history) {
            lines.entry(fault).or_default().violations += 1;
        }
    }
    lines
}

/// Returns the median and the maximum, in seconds, of the times from the ends of faults that met no other fault until
/// everything worked again.
fn exact_s(injected: &[Injected]) -> (f64, f64) {
    let alone = injected.iter().filter(|one| !one.has_met);
    let mut times: Vec<Duration> = alone.filter_map(|one| one.recovery).collect();
    times.sort_unstable();
    let of = |place: usize| times.get(place).copied().unwrap_or_default().as_secs_f64();
    (of(times.len() / 2), of(times.len().saturating_sub(1)))
}

pub fn classes(violations: &[Violation]) -> BTreeMap<Class, usize> {
    let mut counts: BTreeMap<Class, usize> = Class::ALL.into_iter().map(|class| (class, 0)).collect();
    for violation in violations {
        *counts.entry(violation.class).or_default() += 1;
    }
    counts
}

pub fn text(injected: &[Injected], violations: &[Violation], history: &History) -> String {
    let lines = lines(injected, violations, history);
    let mut text = String::new();
    let _ = writeln!(text, "| fault | times | longest outage | recovery | slowest call | failed calls | violations |");
    let _ = writeln!(text, "|---|---|---|---|---|---|---|");
    for (fault, line) in &lines {
        let Line { times, outage, recovery, has_met, not_well, slowest, failed, violations } = line;
        let [outage, recovery, slowest] = [outage, recovery, slowest].map(Duration::as_secs_f64);
        let never = if *not_well > 0 { format!(", {not_well} times not seen") } else { String::new() };
        let met = if *has_met { "*" } else { "" };
        let _ = writeln!(
            text,
            "| {fault} | {times} | {outage:.1} s{met} | {recovery:.1} s{met}{never} | {slowest:.1} s{met} | {failed} | {violations} |"
        );
    }
    if lines.values().any(|line| line.has_met) {
        let _ = writeln!(text, "\n`*` whenever this fault was injected, another fault lasted at the same time.");
    }
    let (median, max) = exact_s(injected);
    let _ = writeln!(text, "\nexact after a fault: median {median:.1} s, at most {max:.1} s");
    let counts: Vec<String> = classes(violations).iter().map(|(class, count)| format!("{class} {count}")).collect();
    let _ = writeln!(text, "\n{}", counts.join(", "));
    text
}

/// Returns the result as JSON, with the durations of calls.
pub fn figures(injected: &[Injected], violations: &[Violation], history: &History) -> Value {
    let lines = lines(injected, violations, history);
    let of = |line: &Line| {
        json!({
            "times": line.times,
            "longest_outage_s": line.outage.as_secs_f64(),
            "recovery_s": line.recovery.as_secs_f64(),
            "met_another": line.has_met,
            "not_well": line.not_well,
            "slowest_call_s": line.slowest.as_secs_f64(),
            "failed_calls": line.failed,
            "violations": line.violations,
        })
    };
    let faults: BTreeMap<&str, Value> = lines.iter().map(|(fault, line)| (*fault, of(line))).collect();
    let counts: BTreeMap<String, usize> =
        classes(violations).into_iter().map(|(class, count)| (class.to_string(), count)).collect();
    let (median, max) = exact_s(injected);
    json!({
        "faults": faults,
        "violations": counts,
        "calls": calls(history),
        "exact_s": { "median": median, "max": max },
    })
}

/// Returns how many calls got each answer, and how long clicks took.
fn calls(history: &History) -> Value {
    let count = |is: fn(&Answer) -> bool| history.calls.iter().filter(|call| is(&call.answer)).count();
    let clicks = |is_wanted: &dyn Fn(&Call) -> bool| {
        let clicks = history.calls.iter().filter(|call| matches!(call.what, What::Like { .. }) && is_wanted(call));
        percentiles(clicks.map(|call| call.end - call.begin).collect())
    };
    let is_quiet = |call: &Call| !history.windows.iter().any(|window| window.meets(call));
    json!({
        "all": history.calls.len(),
        "done": count(|answer| matches!(answer, Answer::Done { .. })),
        "nothing": count(|answer| matches!(answer, Answer::Nothing)),
        "not_counted": count(|answer| matches!(answer, Answer::NotCounted)),
        "not_confirmed": count(|answer| matches!(answer, Answer::NotConfirmed { .. })),
        "unknown": count(|answer| matches!(answer, Answer::Unknown)),
        "click_ms": clicks(&|_| true),
        "click_without_faults_ms": clicks(&is_quiet),
    })
}

fn percentiles(mut micros: Vec<i64>) -> Value {
    micros.sort_unstable();
    let of = |percent: usize| {
        let place = (micros.len() * percent / 100).min(micros.len().saturating_sub(1));
        micros.get(place).map(|micros| shrink::seconds(*micros) * 1_000.0)
    };
    json!({ "p50": of(50), "p99": of(99), "most": of(100) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::history::Loses;

    #[test]
    fn the_table_has_a_line_for_each_fault_with_its_worst() {
        let injected = |outage, recovery: Option<u64>| Injected {
            fault: "mysql-killed",
            outage: Duration::from_secs(outage),
            recovery: recovery.map(Duration::from_secs),
            has_met: false,
            error: None,
        };
        let met = Injected { has_met: true, ..injected(99, None) };
        let all = [injected(3, Some(2)), met, injected(5, None), injected(1, Some(4))];
        let window = |begin, end| Window {
            fault: "mysql-killed",
            begin,
            end,
            loses: Loses::Nothing,
            loses_since: begin,
            loses_until: end,
        };
        let call = |begin, end, answer| Call { begin, end, who: 1, what: What::Read { target: 1 }, answer };
        let history = History {
            calls: vec![
                call(900_000, 2_400_000, Answer::Done { at: 0 }),
                call(1_500_000, 1_600_000, Answer::NotCounted),
                // A call before the fault, and a call during another fault.
                call(0, 999_999, Answer::NotCounted),
                call(5_000_000, 9_000_000, Answer::Unknown),
            ],
            windows: vec![
                window(1_000_000, 2_000_000),
                window(5_000_000, 6_000_000),
                Window { fault: "redis-killed", ..window(5_500_000, 5_600_000) },
            ],
        };
        let text = text(&all, &[], &history);
        assert!(text.contains("| mysql-killed | 4 | 5.0 s | 4.0 s, 1 times not seen | 1.5 s | 1 | 0 |"), "{text}");
        assert!(text.ends_with("lost 0, doubled 0, reordered 0, invented 0\n"), "{text}");
        let figures = figures(&all, &[], &history);
        assert_eq!(figures["faults"]["mysql-killed"]["times"], 4);
        assert_eq!(figures["violations"]["lost"], 0);
        assert_eq!(figures["exact_s"], json!({ "median": 4.0, "max": 4.0 }));
    }
}
