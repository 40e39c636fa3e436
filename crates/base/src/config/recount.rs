//! `[[recount]]`: another table determines the counters of a metric.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::key::Key;
use super::problem::Faults;
use super::{Config, LIKE, Pause, Rules};
use crate::runtime::cron;
use tallyd_core::site_query::{OF_RECOUNT, Query};

/// A metric of one kind, and the query that returns its correct values.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Recount {
    /// A name of `[kinds]`.
    pub kind: String,
    /// A name of `[metrics]`: not `like`, not settable.
    pub metric: String,
    /// SELECT of target id and number, for up to `:limit` ids above `:after`, in id order. The query can use any
    /// database that the account of `[mysql]` can read.
    pub query: String,
    /// When to run. Empty: only with `tallyd admin recount`.
    #[serde(default)]
    pub cron: String,
    /// Targets per query. Fewer targets make each query faster.
    #[serde(default = "ten_thousand")]
    #[schemars(range(min = 1, max = 1_000_000))]
    pub page_targets: usize,
    /// Longest time of one query before the run fails.
    #[schemars(extend("x-minimum" = "1s", "x-maximum" = "1h"))]
    #[serde(default = "half_a_minute")]
    pub query_max: Pause,
}

impl Recount {
    pub fn name(&self) -> String {
        format!("{}:{}", self.kind, self.metric)
    }
}

fn ten_thousand() -> usize {
    10_000
}

fn half_a_minute() -> Pause {
    Pause::from_secs(30)
}

pub(super) fn problems(config: &Config, found: &mut Faults) {
    let rules = Rules::from(config);
    for (place, recount) in config.recounts.iter().enumerate() {
        let Recount { kind, metric, query, cron, .. } = recount;
        let block = Key::from("recount").then(place);
        let mut report =
            |key: &str, problem: &str| found.at(block.then(key), format!("[[recount]] of {kind} {metric}: {problem}"));
        let (kind_code, metric_code) = (config.kinds.named(kind), config.metrics.named(metric));
        if kind_code.is_none() {
            report("kind", "the kind is not in [kinds]");
        }
        if metric == LIKE {
            report(
                "metric",
                "likes can't be recounted here, because each full reconcile recounts them from like_record: remove the block",
            );
        } else if metric_code.is_none() {
            report("metric", "the metric is not in [metrics]");
        }
        if let (Some(kind), Some(metric)) = (kind_code, metric_code)
            && rules.of(kind, metric).settable
        {
            report(
                "metric",
                "its [[rule]] is settable, so no other table determines it: remove the block, or remove settable",
            );
        }
        if let Err(problem) = Query::parse(query, OF_RECOUNT) {
            report("query", &problem);
        }
        if !cron.is_empty()
            && let Err(error) = cron::parse(cron)
        {
            report("cron", &format!("cron is \"{cron}\": {error:#}"));
        }
        if config.recounts.iter().take(place).any(|other| (&other.kind, &other.metric) == (kind, metric)) {
            report("metric", "it is configured twice: remove one block");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::parse;

    #[test]
    fn recounts_that_can_not_be_are_reported() {
        let found = |blocks: &str| {
            let names = "[kinds]\nvideo = 1\n[metrics]\nlike = 1\ncomment = 2\nunread = 3\n\
                         [[rule]]\nmetric = \"unread\"\nsettable = true\n";
            match parse(&format!("{names}{blocks}"), "test", []) {
                Ok(config) => Faults::texts(|found| problems(&config, found)),
                Err(error) => error.0,
            }
        };
        let block = |kind: &str, metric: &str, more: &str| {
            let query = "SELECT video_id, 1 FROM c WHERE video_id > :after LIMIT :limit";
            format!("[[recount]]\nkind = \"{kind}\"\nmetric = \"{metric}\"\nquery = \"{query}\"\n{more}\n")
        };
        assert_eq!(found(&block("video", "comment", "cron = \"0 0 5 * * *\"")), Vec::<String>::new());
        for (blocks, problem) in [
            (block("post", "comment", ""), "[[recount]] of post comment: the kind is not in [kinds]"),
            (block("video", "like", ""), "likes can't be recounted here"),
            (block("video", "share", ""), "the metric is not in [metrics]"),
            (block("video", "unread", ""), "its [[rule]] is settable"),
            (block("video", "comment", "").replace(":after", "0"), "query lacks :after"),
            (block("video", "comment", "cron = \"daily\""), "cron is \"daily\""),
            (block("video", "comment", "page_targets = 0"), "page_targets is 0, allowed are 1 to 1000000"),
            (block("video", "comment", "query_max = \"500ms\""), "query_max is \"500ms\": write a duration, 1s to 1h"),
            (block("video", "comment", "").repeat(2), "it is configured twice"),
        ] {
            let found = found(&blocks);
            assert!(found.len() == 1 && found[0].contains(problem), "{found:?}");
        }
    }
}
