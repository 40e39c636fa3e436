//! `[[import]]`: an old table, or old Redis keys, that `tallyd import` copies.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use tallyd_base::config::{Config, Faults, Key, LIKE, Mysql, Pause, Rules, is_name};
use tallyd_core::site_query::{OF_LIKES, OF_NUMBERS, Query};
use tallyd_core::template::Template;
use tallyd_core::unit::Unit;

/// An old table or old keys with the likes of one kind, or with the numbers of one metric.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Import {
    /// Name in commands and reports: 1 to 32 of a-z, 0-9, - and _. The name marks the imported rows: don't change it.
    pub name: String,
    /// A name of `[kinds]`.
    pub kind: String,
    /// A name of `[metrics]`, not settable.
    #[serde(default = "like")]
    pub metric: String,
    /// SELECT of `target` and `user`, and of `deleted` and `at` if the table has them: up to `:rows` rows after
    /// `:after_target` and `:after_user`, in this order. For other metrics than `like`: `target` and `value`, with
    /// `:after_target` and `:rows`.
    #[schemars(with = "String")]
    #[serde(default)]
    pub query: Option<String>,
    /// Pattern (with `{id}`) of the keys in `[redis]` that contain the numbers. Not with `query`, not for `like`.
    #[schemars(with = "String")]
    #[serde(default)]
    pub keys: Option<String>,
    /// Unit of an integer `at` (time since 1970). Not for DATETIME and TIMESTAMP.
    #[schemars(with = "Unit")]
    #[serde(default)]
    pub unit: Option<Unit>,
    /// Whether an unlike keeps the row, with `deleted` = 1. Required if the query has `deleted`.
    #[schemars(with = "bool")]
    #[serde(default)]
    pub keeps_deleted: Option<bool>,
    /// Rows per query. Checksum queries read four times as many. Fewer rows make slow queries shorter.
    #[serde(default = "ten_thousand")]
    #[schemars(range(min = 1, max = 100_000))]
    pub page_rows: usize,
    /// Time limit of one query.
    #[schemars(extend("x-minimum" = "1s", "x-maximum" = "1h"))]
    #[serde(default = "half_a_minute")]
    pub query_max: Pause,
    /// Name of the table's server: a `[server.NAME]`. Default: the server of `[mysql]`.
    #[schemars(with = "String")]
    #[serde(default)]
    pub server: Option<String>,
    #[serde(skip)]
    pub mysql: Option<Mysql>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reads {
    Likes(Query),
    Numbers(Query),
    Keys(Template),
}

impl Import {
    pub fn reads(&self) -> Result<Reads, (&'static str, String)> {
        let wrong = |key| move |problem| (key, problem);
        match (&self.query, &self.keys) {
            (Some(query), None) if self.is_of_likes() => {
                Query::parse(query, OF_LIKES).map(Reads::Likes).map_err(wrong("query"))
            }
            (Some(query), None) => Query::parse(query, OF_NUMBERS).map(Reads::Numbers).map_err(wrong("query")),
            (None, Some(_)) if self.is_of_likes() => {
                Err(("keys", "keys can't hold likes: write a query that selects target and user".to_owned()))
            }
            (None, Some(keys)) => {
                Template::parse(keys).map(Reads::Keys).map_err(|problem| ("keys", format!("keys {problem}")))
            }
            _ => Err(("query", "set either query or keys".to_owned())),
        }
    }

    pub fn is_of_likes(&self) -> bool {
        self.metric == LIKE
    }
}

fn like() -> String {
    LIKE.to_owned()
}

fn ten_thousand() -> usize {
    10_000
}

fn half_a_minute() -> Pause {
    Pause::from_secs(30)
}

pub(super) fn problems(config: &Config, imports: &[Import], found: &mut Faults) {
    let rules = Rules::from(config);
    for (place, import) in imports.iter().enumerate() {
        let Import { name, kind, metric, .. } = import;
        let block = Key::from("import").then(place);
        let mut report = |key: &str, problem: &str| found.at(block.then(key), format!("[[import]] {name}: {problem}"));
        if !is_name(name) {
            report("name", "a name must have 1 to 32 characters of a-z, 0-9, - and _");
        }
        if imports.iter().take(place).any(|other| other.name == *name) {
            report("name", "another [[import]] has the same name: rename one");
        }
        let (kind_code, metric_code) = (config.kinds.named(kind), config.metrics.named(metric));
        if kind_code.is_none() {
            report("kind", &format!("the kind {kind} is not in [kinds]"));
        }
        if metric_code.is_none() {
            report("metric", &format!("the metric {metric} is not in [metrics]"));
        }
        if let (Some(kind), Some(metric)) = (kind_code, metric_code)
            && rules.of(kind, metric).settable
        {
            report("metric", "its [[rule]] is settable: publish a `set` event for each counter instead");
        }
        if config.recounts.iter().any(|recount| (&recount.kind, &recount.metric) == (kind, metric)) {
            report(
                "metric",
                "a [[recount]] corrects this counter from another table: run `tallyd admin recount` instead",
            );
        }
        if let Err((key, problem)) = import.reads() {
            report(key, &problem);
        }
        keys_of_likes(import, &mut report);
    }
}

fn keys_of_likes(import: &Import, report: &mut impl FnMut(&str, &str)) {
    if !import.is_of_likes() {
        if import.unit.is_some() {
            report("unit", "unit is only for the time of likes: remove unit");
        }
        if import.keeps_deleted.is_some() {
            report("keeps_deleted", "keeps_deleted is only for likes: remove keeps_deleted");
        }
    }
    if import.keys.is_some() && import.server.is_some() {
        report("server", "server is only for a query, because keys are read from [redis]: remove server");
    }
}

#[cfg(test)]
mod tests {
    use crate::config::parse;

    const QUERY: &str = "SELECT target, user FROM l WHERE target > :after_target OR (target = :after_target AND \
                         user > :after_user) ORDER BY target, user LIMIT :rows";
    const NUMBERS: &str = "SELECT id AS target, views AS value FROM v WHERE id > :after_target ORDER BY id LIMIT :rows";

    fn found(blocks: &str) -> Vec<String> {
        let daemon = "[kinds]\nvideo = 1\n[metrics]\nlike = 1\nview = 2\nunread = 3\ncomment = 4\n\
                      [[rule]]\nmetric = \"unread\"\nsettable = true\n\
                      [[recount]]\nkind = \"video\"\nmetric = \"comment\"\nquery = \"SELECT 1, 2 WHERE 1 > :after LIMIT :limit\"\n";
        let config = tallyd_base::config::parse(daemon, "test", []).unwrap();
        let server = "[server.elder]\nurl = \"mysql://u@h/old\"\n";
        parse(&format!("{blocks}{server}"), "test", &config).err().map_or_else(Vec::new, |error| error.0)
    }

    fn block(metric: &str, more: &str) -> String {
        format!("[[import]]\nname = \"old\"\nkind = \"video\"\nmetric = \"{metric}\"\n{more}\n")
    }

    #[test]
    fn imports_that_can_be_run_have_no_problems() {
        for (metric, more) in [
            ("like", format!("query = \"{QUERY}\"\nunit = \"ms\"\nkeeps_deleted = true")),
            ("like", format!("query = \"{QUERY}\"\nserver = \"elder\"")),
            ("view", format!("query = \"{NUMBERS}\"")),
            ("view", "keys = \"post:views:{id}\"".to_owned()),
        ] {
            assert_eq!(found(&block(metric, &more)), Vec::<String>::new(), "{more}");
        }
    }

    #[test]
    fn imports_that_can_not_be_run_are_refused() {
        let likes = format!("query = \"{QUERY}\"");
        for (blocks, problem) in [
            (block("like", ""), "[[import]] old: set either query or keys"),
            (
                block("like", "keys = \"likes:{id}\""),
                "keys can't hold likes: write a query that selects target and user",
            ),
            (block("view", "keys = \"views\""), "keys lacks {id}"),
            (
                block("view", &likes),
                "query has the unknown placeholder :after_user; allowed are :after_target and :rows",
            ),
            (block("like", &likes.replace(":rows", "9")), "query lacks :rows"),
            (block("share", &likes.replace("AND user > :after_user", "")), "the metric share is not in [metrics]"),
            (block("unread", "keys = \"unread:{id}\""), "publish a `set` event for each counter"),
            (block("comment", "keys = \"comments:{id}\""), "run `tallyd admin recount` instead"),
            (block("view", "keys = \"views:{id}\"\nunit = \"s\""), "unit is only for the time of likes: remove unit"),
            (
                block("view", "keys = \"views:{id}\"\nkeeps_deleted = true"),
                "keeps_deleted is only for likes: remove keeps_deleted",
            ),
            (block("view", "keys = \"v:{id}\"\nserver = \"elder\""), "server is only for a query"),
            (block("like", &format!("{likes}\nunit = \"min\"")), "unit"),
            (
                block("like", &format!("{likes}\nquery_max = \"10ms\"")),
                "query_max is \"10ms\": write a duration, 1s to 1h",
            ),
            (block("like", &format!("{likes}\nserver = \"eldest\"")), "no [server.eldest] is there; known: elder"),
            (block("like", &likes).repeat(2), "another [[import]] has the same name: rename one"),
        ] {
            let found = found(&blocks);
            assert!(found.len() == 1 && found[0].contains(problem), "{problem}: {found:?}");
        }
    }
}
