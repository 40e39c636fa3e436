//! Finds errors in `[[board]]` that the types can't exclude.

use std::collections::BTreeSet;

use super::Config;
use super::check::is_name;
use super::key::Key;
use super::problem::Faults;
use tallyd_core::period::{PeriodKind, WeekStart};
use tallyd_core::score::Tie;

pub(super) fn problems(Config { boards, metrics, .. }: &Config, found: &mut Faults) {
    let mut seen = BTreeSet::new();
    for (place, board) in boards.iter().enumerate() {
        let block = Key::from("board").then(place);
        let mut report = |names: &[&str], text: String| {
            let keys: Vec<Key> = names.iter().map(|name| block.then(name)).chain([block.clone()]).collect();
            found.between(&keys, format!("[[board]] {}{text}", board.name));
        };
        if !is_name(&board.name) {
            report(&["name"], ": a name must have 1 to 32 characters of a-z, 0-9, - and _".to_owned());
        }
        if !seen.insert((&board.name, board.period)) {
            report(&["period", "name"], " is configured twice with the same period: remove one block".to_owned());
        }
        let other = boards.iter().find(|other| other.name == board.name);
        if other.is_some_and(|other| (other.tie, &other.score) != (board.tie, &board.score)) {
            report(
                &["score", "tie"],
                ": the keys score and tie must have the same values in all its blocks".to_owned(),
            );
        }
        let columns = if board.tie == Tie::Second { 2..=2 } else { 1..=1 };
        if !columns.contains(&board.score.len()) {
            let it = "two are required with tie = \"second\", otherwise one";
            report(&["score", "tie"], format!(": score has {} names: {it}", board.score.len()));
        }
        for name in board.score.iter().filter(|name| !metrics.0.contains_key(*name)) {
            report(&["score"], format!(": score contains {name}, which is not in [metrics]"));
        }
        if board.week_starts != WeekStart::Monday && board.period != PeriodKind::Week {
            report(&["week_starts"], ": week_starts is only for period = \"week\": remove week_starts".to_owned());
        }
        if board.score.first() == board.score.get(1) {
            report(&["score"], ": score contains the same metric twice".to_owned());
        }
        if let Err(error) = board.calendar(jiff::tz::db()) {
            report(&["time_zone"], format!(": time_zone \"{}\": {error}", board.time_zone));
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::config::check::tests::found;

    #[test]
    fn boards_that_do_not_fit_are_reported() {
        for (text, expected) in [
            ("[[board]]\nname = \"a\"\nperiod = \"week\"\ntime_zone = \"Mars/Olympus\"", "time_zone \"Mars/Olympus\""),
            ("[[board]]\nname = \"a\"\nperiod = \"day\"\nweek_starts = \"sunday\"", "week_starts is only for period"),
            ("[[board]]\nname = \"a\"\nperiod = \"day\"\ntie = \"second\"", "otherwise one"),
            (
                "[[board]]\nname = \"a\"\nperiod = \"day\"\nscore = [\"view\"]",
                "score contains view, which is not in [metrics]",
            ),
            ("[[board]]\nname = \"a\"\nperiod = \"day\"\nsecond_bits = 24", "allowed are 1 to 23"),
            (
                "[[board]]\nname = \"a\"\nperiod = \"day\"\ntie = \"second\"\nscore = [\"like\", \"like\"]",
                "the same metric twice",
            ),
            (
                "[[board]]\nname = \"a\"\nperiod = \"day\"\n[[board]]\nname = \"a\"\nperiod = \"week\"\ntie = \"earliest\"",
                "the keys score and tie must have the same values in all its blocks",
            ),
        ] {
            let problems = found(text);
            assert!(problems.iter().any(|problem| problem.contains(expected)), "{text}: {problems:?}");
        }
    }
}
