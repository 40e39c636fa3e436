//! `[[rule]]`: a metric that is not counted in the usual way. A rule applies to one kind or to all kinds.

use std::collections::{BTreeMap, BTreeSet};

use super::key::Key;
use super::problem::Faults;
use super::{Config, LIKE, Rule, Rules, Writes};
use tallyd_core::model::Kind;

pub(super) fn problems(config: &Config, found: &mut Faults) {
    let Config { rules, kinds, metrics, boards, .. } = config;
    let name = |rule: &Rule| match &rule.kind {
        Some(kind) => format!("[[rule]] of {} {}", kind, rule.metric),
        None => format!("[[rule]] of {}", rule.metric),
    };
    for (place, rule) in rules.iter().enumerate() {
        let block = Key::from("rule").then(place);
        let mut report = |key: &str, text: &str| found.at(block.then(key), format!("{}{text}", name(rule)));
        if rule.metric == LIKE {
            if rule.settable {
                report("settable", ": likes are counted from rows and can't be set: remove settable");
            }
            if rule.below_zero {
                report("below_zero", ": remove below_zero, because likes are never below zero");
            }
            if rule.board.is_some() && rule.writer == Writes::Api {
                report(
                    "board",
                    ": API servers that count likes also add to boards: remove board, or set writer = \"daemon\"",
                );
            }
        } else if metrics.named(&rule.metric).is_none() {
            report("metric", ": the metric is not in [metrics]");
        }
        if rule.kind.as_ref().is_some_and(|kind| kinds.named(kind).is_none()) {
            report("kind", ": the kind is not in [kinds]");
        }
        if let Some(board) = &rule.board {
            let of_board = boards.iter().find(|it| it.name == *board);
            if !of_board.is_some_and(|it| it.score.contains(&rule.metric)) {
                let what = if of_board.is_some() {
                    "does not have the metric in its score: add the metric to score"
                } else {
                    "does not exist: add a [[board]]"
                };
                report("board", &format!(": the board {board} {what}"));
            }
        }
        let same = |other: &Rule| (&other.metric, &other.kind) == (&rule.metric, &rule.kind);
        if rules.iter().take(place).any(same) {
            report("metric", " is configured twice: remove one block");
        }
    }
}

/// Returns the boards that get the numbers of several kinds, each with these kinds. Targets of these kinds that have the
/// same id share a member.
pub fn shared_boards(config: &Config) -> Vec<(String, BTreeSet<&str>)> {
    let rules = Rules::from(config);
    let mut kinds_of = BTreeMap::<String, BTreeSet<&str>>::new();
    for (kind, code) in &config.kinds.0 {
        let boards = config.metrics.codes().into_iter().filter_map(|metric| rules.board(Kind(*code), metric));
        for board in boards {
            kinds_of.entry(board.to_owned()).or_default().insert(kind);
        }
    }
    kinds_of.into_iter().filter(|(_, kinds)| kinds.len() > 1).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::parse;

    const NAMES: &str =
        "[kinds]\nvideo = 1\ninbox = 2\n[metrics]\nlike = 1\nview = 2\nunread = 3\nscore = 4\n[[rule]]\nmetric = ";

    #[test]
    fn rules_that_fit_nothing_are_reported() {
        let found = |rules: &str| {
            let config = parse(&format!("{NAMES}{rules}"), "test", []).unwrap();
            Faults::texts(|found| problems(&config, found))
        };
        for (rules, problem) in [
            (
                "\"like\"\nsettable = true",
                "[[rule]] of like: likes are counted from rows and can't be set: remove settable",
            ),
            ("\"like\"\nbelow_zero = true", "[[rule]] of like: remove below_zero, because likes are never below zero"),
            (
                "\"like\"\nwriter = \"api\"\nboard = \"hot\"\n[[board]]\nname = \"hot\"\nperiod = \"day\"",
                "[[rule]] of like: API servers that count likes also add to boards: remove board, or set writer = \"daemon\"",
            ),
            ("\"viev\"", "[[rule]] of viev: the metric is not in [metrics]"),
            ("\"view\"\nkind = \"post\"", "[[rule]] of post view: the kind is not in [kinds]"),
            ("\"view\"\n[[rule]]\nmetric = \"view\"", "[[rule]] of view is configured twice: remove one block"),
            ("\"view\"\nboard = \"hot\"", "[[rule]] of view: the board hot does not exist: add a [[board]]"),
            (
                "\"view\"\nboard = \"hot\"\n[[board]]\nname = \"hot\"\nperiod = \"day\"",
                "[[rule]] of view: the board hot does not have the metric in its score: add the metric to score",
            ),
        ] {
            assert_eq!(found(rules), [problem]);
        }
        for right in [
            "\"view\"\n[[rule]]\nmetric = \"view\"\nkind = \"video\"",
            "\"like\"\nwriter = \"api\"\n[[rule]]\nmetric = \"like\"\nkind = \"video\"",
            "\"like\"\nboard = \"hot\"\n[[board]]\nname = \"hot\"\nperiod = \"day\"",
        ] {
            assert_eq!(found(right), Vec::<String>::new());
        }
    }

    #[test]
    fn a_board_that_several_kinds_share_is_reported() {
        let board = "board = \"hot\"\n[[board]]\nname = \"hot\"\nperiod = \"day\"\n";
        for (rules, expected) in [
            (format!("\"like\"\n{board}"), vec![("hot".to_owned(), BTreeSet::from(["inbox", "video"]))]),
            (format!("\"like\"\nkind = \"video\"\n{board}"), vec![]),
            ("\"like\"".to_owned(), vec![]),
        ] {
            assert_eq!(shared_boards(&parse(&format!("{NAMES}{rules}"), "test", []).unwrap()), expected, "{rules}");
        }
    }
}
