//! Checks that no run repaired a number of the daemons before a fault could make it wrong.

use super::{About, Class, State, Violation};
use crate::history::{History, Loses, Window};

/// The faults that can make a number of the daemons wrong, beside those that set a server back.
const FAULTS: [&str; 4] =
    ["daemon-with-other-writer", "redis-other-type", "redis-other-type-beside", "redis-repair-late"];

pub fn check(history: &History, state: &State, found: &mut Vec<Violation>) {
    let makes_wrong =
        |window: &&Window| matches!(window.loses, Loses::Boards | Loses::Tables) || FAULTS.contains(&window.fault);
    let wrong_from = history.windows.iter().filter(makes_wrong).map(|window| window.begin).min();
    for (target, metric, at) in &state.repairs {
        if wrong_from.is_none_or(|from| *at < from) {
            let says =
                format!("a run repaired metric {metric} of target {target}, although no fault had made it wrong");
            found.push(Violation::new(Class::Invented, About::Number { target: *target, metric: *metric }, says));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_repair_before_a_fault_that_makes_numbers_wrong_is_found() {
        let state = State { repairs: vec![(7, 1, 30)], ..State::default() };
        let window = |fault, begin, loses| Window { fault, begin, end: 40, loses, loses_since: 0, loses_until: 40 };
        for (windows, expected) in [
            (vec![], 1),
            (vec![window("mysql-killed", 10, Loses::Nothing)], 1),
            (vec![window("redis-repair-late", 10, Loses::Nothing)], 0),
            (vec![window("redis-older", 31, Loses::Boards)], 1),
            (vec![window("redis-older", 30, Loses::Boards)], 0),
        ] {
            let mut found = Vec::new();
            check(&History { windows: windows.clone(), ..History::default() }, &state, &mut found);
            assert_eq!(found.len(), expected, "{windows:?}");
        }
    }
}
