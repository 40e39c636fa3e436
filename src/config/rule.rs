//! `[[rule]]`: how a metric counts, where it isn't as usual; of one kind, or of all.

use std::collections::HashMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::key::Key;
use super::problem::Faults;
use super::{Config, LIKE};
use crate::model::{Kind, Metric};

/// Rules for one metric.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Rule {
    /// A name of `[metrics]`.
    pub metric: String,
    /// A name of `[kinds]`; all of them unless given. A rule of one kind goes before that of all.
    #[serde(default)]
    #[schemars(with = "String")]
    pub kind: Option<String>,
    /// Who counts it in Redis.
    #[serde(default)]
    pub writer: Writes,
    /// Whether it may be less than zero.
    #[serde(default)]
    pub below_zero: bool,
    /// Whether events of the types `set` and `reset` are taken.
    #[serde(default)]
    pub settable: bool,
    /// The board on which what is added to it counts, too: a name of `[[board]]` whose `score` has the metric. The member is the target's id
    /// in decimal.
    #[serde(default)]
    #[schemars(with = "String")]
    pub board: Option<String>,
}

/// Who counts a metric in Redis.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Writes {
    /// API servers, at once, with lua/count.lua; likes with lua/like.lua.
    Api,
    /// The daemon, once the event is committed.
    #[default]
    Daemon,
}

/// How one metric of one kind counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ruled {
    /// Who counts it in Redis.
    pub writer: Writes,
    /// Whether it may be less than zero.
    pub below_zero: bool,
    /// Whether events of the types `set` and `reset` are taken.
    pub settable: bool,
}

/// All rules, to be asked.
#[derive(Clone, Debug, Default)]
pub struct Rules {
    like: Option<Metric>,
    of_kind: HashMap<(Kind, Metric), Ruled>,
    of_all: HashMap<Metric, Ruled>,
    /// By the rules' kinds: which have a board.
    boards: HashMap<(Option<Kind>, Metric), String>,
}

impl Rules {
    /// By configuration.
    pub fn new(config: &Config) -> Self {
        let mut rules = Self { like: Some(config.metrics.like()), ..Self::default() };
        for Rule { metric, kind, writer, below_zero, settable, board } in &config.rules {
            let ruled = Ruled { writer: *writer, below_zero: *below_zero, settable: *settable };
            let Some(metric) = config.metrics.named(metric) else { continue };
            if let Some(board) = board {
                let kind = kind.as_ref().and_then(|kind| config.kinds.named(kind));
                rules.boards.insert((kind, metric), board.clone());
            }
            match kind {
                None => drop(rules.of_all.insert(metric, ruled)),
                Some(kind) => {
                    if let Some(kind) = config.kinds.named(kind) {
                        rules.of_kind.insert((kind, metric), ruled);
                    }
                }
            }
        }
        rules
    }

    /// Whether any metric is settable.
    pub fn has_settable(&self) -> bool {
        self.of_kind.values().chain(self.of_all.values()).any(|ruled| ruled.settable)
    }

    /// On which board what is added to this metric of that kind counts, too.
    pub fn board(&self, kind: Kind, metric: Metric) -> Option<&str> {
        let of = if self.of_kind.contains_key(&(kind, metric)) { Some(kind) } else { None };
        self.boards.get(&(of, metric)).map(String::as_str)
    }

    /// How this metric of that kind counts.
    pub fn of(&self, kind: Kind, metric: Metric) -> Ruled {
        if self.like == Some(metric) {
            return Ruled { writer: Writes::Api, ..Ruled::default() };
        }
        let of_kind = self.of_kind.get(&(kind, metric));
        of_kind.or_else(|| self.of_all.get(&metric)).copied().unwrap_or_default()
    }
}

/// Rules that fit nothing.
pub(super) fn problems(config: &Config, found: &mut Faults) {
    let Config { rules, kinds, metrics, boards, .. } = config;
    let name = |rule: &Rule| match &rule.kind {
        Some(kind) => format!("[[rule]] of {} {}", kind, rule.metric),
        None => format!("[[rule]] of {}", rule.metric),
    };
    for (place, rule) in rules.iter().enumerate() {
        let block = Key::from("rule").then(place);
        let mut say = |key: &str, text: &str| found.at(block.then(key), format!("{}{text}", name(rule)));
        if rule.metric == LIKE {
            say("metric", ": likes follow from who likes what, there are no rules for them");
        } else if metrics.named(&rule.metric).is_none() {
            say("metric", ": the metric is not in [metrics]");
        }
        if rule.kind.as_ref().is_some_and(|kind| kinds.named(kind).is_none()) {
            say("kind", ": the kind is not in [kinds]");
        }
        if let Some(board) = &rule.board {
            let of_board = boards.iter().find(|it| it.name == *board);
            if !of_board.is_some_and(|it| it.score.contains(&rule.metric)) {
                let what = if of_board.is_some() { "has another score" } else { "is not there" };
                say("board", &format!(": the board {board} {what}"));
            }
        }
        let same = |other: &Rule| (&other.metric, &other.kind) == (&rule.metric, &rule.kind);
        if rules.iter().take(place).any(same) {
            say("metric", " stands twice");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::parse;

    const NAMES: &str =
        "[kinds]\nvideo = 1\ninbox = 2\n[metrics]\nlike = 1\nview = 2\nunread = 3\nscore = 4\n[[rule]]\nmetric = ";

    fn config(rules: &str) -> Config {
        parse(&format!("{NAMES}{rules}"), "test", []).unwrap()
    }

    #[test]
    fn the_rule_of_one_kind_goes_before_that_of_all() {
        let rules = Rules::new(&config(
            "\"unread\"\nkind = \"inbox\"\nsettable = true\n[[rule]]\nmetric = \"unread\"\nwriter = \"api\"\nbelow_zero = true",
        ));
        let of = |kind, metric| rules.of(Kind(kind), Metric(metric));
        assert_eq!(of(2, 3), Ruled { writer: Writes::Daemon, below_zero: false, settable: true });
        assert_eq!(of(1, 3), Ruled { writer: Writes::Api, below_zero: true, settable: false });
        assert_eq!(of(1, 2), Ruled::default());
        assert_eq!(of(1, 1).writer, Writes::Api);
    }

    #[test]
    fn a_rule_of_one_kind_without_a_board_feeds_none() {
        let rules = Rules::new(&config(
            "\"view\"\nboard = \"hot\"\n[[rule]]\nmetric = \"view\"\nkind = \"inbox\"\n[[rule]]\nmetric = \"score\"\nkind = \"video\"\nboard = \"best\"",
        ));
        let boards =
            [(1, 2), (2, 2), (1, 4), (2, 4), (1, 3)].map(|(kind, metric)| rules.board(Kind(kind), Metric(metric)));
        assert_eq!(boards, [Some("hot"), None, Some("best"), None, None]);
    }

    #[test]
    fn rules_that_fit_nothing_are_told() {
        let found = |rules: &str| {
            let mut found = Faults::default();
            problems(&config(rules), &mut found);
            found.texts()
        };
        for (rules, problem) in [
            ("\"like\"", "[[rule]] of like: likes follow from who likes what, there are no rules for them"),
            ("\"viev\"", "[[rule]] of viev: the metric is not in [metrics]"),
            ("\"view\"\nkind = \"post\"", "[[rule]] of post view: the kind is not in [kinds]"),
            ("\"view\"\n[[rule]]\nmetric = \"view\"", "[[rule]] of view stands twice"),
            ("\"view\"\nboard = \"hot\"", "[[rule]] of view: the board hot is not there"),
            (
                "\"view\"\nboard = \"hot\"\n[[board]]\nname = \"hot\"\nperiod = \"day\"",
                "[[rule]] of view: the board hot has another score",
            ),
        ] {
            assert_eq!(found(rules), [problem]);
        }
        assert_eq!(found("\"view\"\n[[rule]]\nmetric = \"view\"\nkind = \"video\""), Vec::<String>::new());
    }
}
