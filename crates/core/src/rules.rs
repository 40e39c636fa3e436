//! The `[[rule]]` blocks: settings of a metric that differ from the default, for one kind or for all kinds.

use std::collections::HashMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::kinds::{Kinds, Metrics};
use crate::model::{Kind, Metric};

/// Rules for one metric.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Rule {
    /// A name of `[metrics]`.
    pub metric: String,
    /// A name of `[kinds]`. Default: all. A rule for one kind takes precedence.
    #[serde(default)]
    #[schemars(with = "String")]
    pub kind: Option<String>,
    /// The writer that counts in Redis.
    #[serde(default)]
    pub writer: Writes,
    /// Whether the number can be negative. Not for `like`.
    #[serde(default)]
    pub below_zero: bool,
    /// Whether `set` and `reset` events are accepted. Not for `like`.
    #[serde(default)]
    pub settable: bool,
    /// Board that also gets the additions: a `[[board]]` with this metric in its `score`. Members are target ids in
    /// decimal.
    #[serde(default)]
    #[schemars(with = "String")]
    pub board: Option<String>,
}

impl Rule {
    pub fn of(metric: impl Into<String>) -> Self {
        let metric = metric.into();
        Self { metric, kind: None, writer: Writes::default(), below_zero: false, settable: false, board: None }
    }
}

/// The writer that counts a metric in Redis.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Writes {
    /// API servers, with lua/count.lua (likes: lua/like.lua), before they publish.
    Api,
    /// The daemon, after the commit.
    // Decision 0042.
    #[default]
    Daemon,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ruled {
    pub writer: Writes,
    pub below_zero: bool,
    pub settable: bool,
}

#[derive(Clone, Debug, Default)]
pub struct Rules {
    of_kind: HashMap<(Kind, Metric), Ruled>,
    of_all: HashMap<Metric, Ruled>,
    boards: HashMap<(Option<Kind>, Metric), String>,
}

impl Rules {
    pub fn new(kinds: &Kinds, metrics: &Metrics, blocks: &[Rule]) -> Self {
        let mut rules = Self::default();
        for Rule { metric, kind, writer, below_zero, settable, board } in blocks {
            let ruled = Ruled { writer: *writer, below_zero: *below_zero, settable: *settable };
            let Some(metric) = metrics.named(metric) else { continue };
            if let Some(board) = board {
                let kind = kind.as_ref().and_then(|kind| kinds.named(kind));
                rules.boards.insert((kind, metric), board.clone());
            }
            match kind {
                None => drop(rules.of_all.insert(metric, ruled)),
                Some(kind) => {
                    if let Some(kind) = kinds.named(kind) {
                        rules.of_kind.insert((kind, metric), ruled);
                    }
                }
            }
        }
        rules
    }

    /// Builds the rules from each number's name, as `kind:metric`.
    pub fn of_numbers(kinds: &Kinds, metrics: &Metrics, ruled: impl Fn(&String) -> Ruled) -> Self {
        let mut rules = Self::default();
        for (kind, kind_code) in &kinds.0 {
            for (metric, metric_code) in &metrics.0 {
                let key = (Kind(*kind_code), Metric(*metric_code));
                rules.of_kind.insert(key, ruled(&format!("{kind}:{metric}")));
            }
        }
        rules
    }

    pub fn has_settable(&self) -> bool {
        self.of_kind.values().chain(self.of_all.values()).any(|ruled| ruled.settable)
    }

    pub fn has_counts_by_api(&self, kinds: &Kinds, metrics: &Metrics) -> bool {
        let is_by_api = |kind: u8, metric: u8| self.of(Kind(kind), Metric(metric)).writer == Writes::Api;
        kinds.0.values().any(|kind| metrics.0.values().any(|metric| is_by_api(*kind, *metric)))
    }

    /// The kinds and metrics must exist in both configurations.
    pub fn other_writers(&self, new: &Self, (kinds, metrics): (&Kinds, &Metrics)) -> Vec<String> {
        let numbers = kinds.0.iter().flat_map(|kind| metrics.0.iter().map(move |metric| (kind, metric)));
        let is_other = |kind: u8, metric: u8| {
            let writer = |rules: &Self| rules.of(Kind(kind), Metric(metric)).writer;
            writer(self) != writer(new)
        };
        let others = numbers.filter(|((_, kind), (_, metric))| is_other(**kind, **metric));
        others.map(|((kind, _), (metric, _))| format!("{kind}:{metric}")).collect()
    }

    pub fn board(&self, kind: Kind, metric: Metric) -> Option<&str> {
        let of = if self.of_kind.contains_key(&(kind, metric)) { Some(kind) } else { None };
        self.boards.get(&(of, metric)).map(String::as_str)
    }

    pub fn of(&self, kind: Kind, metric: Metric) -> Ruled {
        let of_kind = self.of_kind.get(&(kind, metric));
        of_kind.or_else(|| self.of_all.get(&metric)).copied().unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    /// The rules of two kinds and four metrics.
    fn rules(blocks: &[Rule]) -> Rules {
        let codes = |names: &[(&str, u8)]| names.iter().map(|(name, code)| ((*name).to_owned(), *code)).collect();
        let kinds = Kinds(codes(&[("video", 1), ("inbox", 2)]));
        let metrics = Metrics(codes(&[("like", 1), ("view", 2), ("unread", 3), ("score", 4)]));
        Rules::new(&kinds, &metrics, blocks)
    }

    fn of_kind(kind: &str, metric: &str) -> Rule {
        Rule { kind: Some(kind.to_owned()), ..Rule::of(metric) }
    }

    #[test]
    fn the_rule_of_one_kind_goes_before_that_of_all() {
        let rules = rules(&[
            Rule { settable: true, ..of_kind("inbox", "unread") },
            Rule { writer: Writes::Api, below_zero: true, ..Rule::of("unread") },
        ]);
        let of = |kind, metric| rules.of(Kind(kind), Metric(metric));
        assert_eq!(of(2, 3), Ruled { writer: Writes::Daemon, below_zero: false, settable: true });
        assert_eq!(of(1, 3), Ruled { writer: Writes::Api, below_zero: true, settable: false });
        assert_eq!(of(1, 2), Ruled::default());
        assert_eq!(of(1, 1), Ruled::default());
    }

    #[test]
    fn a_number_with_another_writer_is_named() {
        let by_api = |rule: Rule| Rule { writer: Writes::Api, ..rule };
        let (before, after) = (rules(&[by_api(Rule::of("view"))]), rules(&[by_api(of_kind("video", "view"))]));
        let (kinds, metrics) =
            (BTreeMap::from([("video", 1), ("inbox", 2)]), BTreeMap::from([("like", 1), ("view", 2)]));
        let owned = |names: BTreeMap<&str, u8>| names.into_iter().map(|(name, code)| (name.to_owned(), code)).collect();
        let (kinds, metrics) = (Kinds(owned(kinds)), Metrics(owned(metrics)));
        assert_eq!(before.other_writers(&after, (&kinds, &metrics)), ["inbox:view"]);
        assert_eq!(after.other_writers(&before, (&kinds, &metrics)), ["inbox:view"]);
        assert_eq!(after.other_writers(&after, (&kinds, &metrics)), Vec::<String>::new());
    }

    #[test]
    fn rules_tell_whether_any_number_is_set_or_counted_by_api() {
        let code = |name: &str| BTreeMap::from([(name.to_owned(), 2)]);
        let (kinds, metrics) = (Kinds(code("inbox")), Metrics(code("view")));
        let has = |block: Rule| {
            let rules = rules(&[block]);
            (rules.has_settable(), rules.has_counts_by_api(&kinds, &metrics))
        };
        assert_eq!(has(Rule::of("view")), (false, false));
        assert_eq!(has(Rule { settable: true, ..of_kind("video", "unread") }), (true, false));
        assert_eq!(has(Rule { settable: true, ..Rule::of("unread") }), (true, false));
        assert_eq!(has(Rule { writer: Writes::Api, ..of_kind("inbox", "view") }), (false, true));
        assert_eq!(has(Rule { writer: Writes::Api, ..of_kind("video", "view") }), (false, false), "of another site");
    }

    #[test]
    fn a_rule_of_one_kind_without_a_board_feeds_none() {
        let rules = rules(&[
            Rule { board: Some("hot".to_owned()), ..Rule::of("view") },
            of_kind("inbox", "view"),
            Rule { board: Some("best".to_owned()), ..of_kind("video", "score") },
        ]);
        let boards =
            [(1, 2), (2, 2), (1, 4), (2, 4), (1, 3)].map(|(kind, metric)| rules.board(Kind(kind), Metric(metric)));
        assert_eq!(boards, [Some("hot"), None, Some("best"), None, None]);
    }
}
