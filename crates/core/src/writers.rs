//! The counters that API servers write in Redis, as daemons announce them to clients. Pure.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use crate::kinds::{Kinds, Metrics};
use crate::model::{Kind, Metric, Micros};
use crate::rules::{Rules, Writes};

/// The kinds and metrics with `writer = "api"`: API servers write these counters in Redis. The daemon writes all other
/// counters.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Writers {
    by_api: BTreeSet<(Kind, Metric)>,
}

/// The JSON form: `{"api":["video:like"],"since":1795251385004538}`.
#[derive(Serialize, Deserialize)]
struct Announced {
    api: Vec<String>,
    #[serde(default)]
    since: i64,
}

impl Writers {
    /// Finds out from the rules whether API servers or the daemon write each counter in Redis.
    pub fn new(kinds: &Kinds, metrics: &Metrics, rules: &Rules) -> Self {
        let numbers = pairs(kinds, metrics).map(|(_, number)| number);
        Self { by_api: numbers.filter(|(kind, metric)| rules.of(*kind, *metric).writer == Writes::Api).collect() }
    }

    /// Returns who writes the counters with this kind and metric.
    pub fn of(&self, kind: Kind, metric: Metric) -> Writes {
        if self.by_api.contains(&(kind, metric)) { Writes::Api } else { Writes::Daemon }
    }

    /// `before` is the former list. Returns true if API servers write a counter now, and the daemon wrote this counter
    /// before.
    pub fn hands_to_api(&self, before: &Self, kinds: &Kinds, metrics: &Metrics) -> bool {
        let is_handed = |number: &(Kind, Metric)| self.by_api.contains(number) && !before.by_api.contains(number);
        pairs(kinds, metrics).any(|(_, number)| is_handed(&number))
    }

    /// Adds the counters in the list `other` to this list.
    #[must_use]
    pub fn union(mut self, other: &Self) -> Self {
        self.by_api.extend(&other.by_api);
        self
    }

    /// Returns the text that daemons announce. `since` is the time when the daemon decided on this list. If the
    /// announcements of two daemons differ, the newer list is valid.
    pub fn encode(&self, kinds: &Kinds, metrics: &Metrics, since: Micros) -> String {
        let by_api = pairs(kinds, metrics).filter(|(_, number)| self.by_api.contains(number));
        let announced = Announced { api: by_api.map(|(name, _)| name).collect(), since: since.0 };
        // A list of strings can always be converted to JSON.
        serde_json::to_string(&announced).unwrap_or_default()
    }

    /// Parses a daemon's announcement. Returns `None` if the text is not an announcement. Skips kinds and metrics that
    /// are not in the configuration.
    pub fn decode(text: &str, kinds: &Kinds, metrics: &Metrics) -> Option<Self> {
        let Announced { api, .. } = serde_json::from_str(text).ok()?;
        let known: BTreeMap<String, (Kind, Metric)> = pairs(kinds, metrics).collect();
        Some(Self { by_api: api.iter().filter_map(|name| known.get(name).copied()).collect() })
    }
}

/// Returns the `since` of the announced list, or `None` if the text is not an announcement.
pub fn since(text: &str) -> Option<Micros> {
    let Announced { since, .. } = serde_json::from_str(text).ok()?;
    Some(Micros(since))
}

/// Returns all pairs of a kind and a metric, with names such as `video:like`.
fn pairs(kinds: &Kinds, metrics: &Metrics) -> impl Iterator<Item = (String, (Kind, Metric))> {
    kinds.0.iter().flat_map(move |(kind, kind_code)| {
        let pair =
            move |(metric, code): (&String, &u8)| (format!("{kind}:{metric}"), (Kind(*kind_code), Metric(*code)));
        metrics.0.iter().map(pair)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rules::Rule;
    use proptest::prelude::*;

    fn names() -> (Kinds, Metrics) {
        let codes = |names: &[(&str, u8)]| names.iter().map(|(name, code)| ((*name).to_owned(), *code)).collect();
        (Kinds(codes(&[("article", 2), ("video", 1)])), Metrics(codes(&[("like", 1), ("share", 2)])))
    }

    fn by_api(metric: &str, kind: Option<&str>) -> Rule {
        Rule { writer: Writes::Api, kind: kind.map(str::to_owned), ..Rule::of(metric) }
    }

    fn writers(rules: &[Rule]) -> Writers {
        let (kinds, metrics) = names();
        Writers::new(&kinds, &metrics, &Rules::new(&kinds, &metrics, rules))
    }

    #[test]
    fn a_rule_for_all_kinds_is_announced_for_each_of_them() {
        let (kinds, metrics) = names();
        let announced = |rules: &[Rule]| writers(rules).encode(&kinds, &metrics, Micros(7));
        assert_eq!(announced(&[]), r#"{"api":[],"since":7}"#);
        let rules = [by_api("like", None), by_api("share", Some("video"))];
        assert_eq!(announced(&rules), r#"{"api":["article:like","video:like","video:share"],"since":7}"#);
    }

    #[test]
    fn names_that_a_client_does_not_know_are_left_out() {
        let (kinds, metrics) = names();
        let read = |text: &str| Writers::decode(text, &kinds, &metrics);
        assert_eq!(read(r#"{"api":["post:like","video:like"]}"#), Some(writers(&[by_api("like", Some("video"))])));
        assert_eq!(read(r#"{"api":[],"later":1}"#), Some(Writers::default()));
        for wrong in ["", "null", "[]", "{}", r#"{"api":1}"#] {
            assert_eq!(read(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn only_what_the_daemon_counted_is_handed_to_api_servers() {
        let (kinds, metrics) = names();
        let before = writers(&[by_api("share", None)]);
        let after = writers(&[by_api("like", Some("video")), by_api("share", None)]);
        assert!(after.hands_to_api(&before, &kinds, &metrics));
        assert!(!before.hands_to_api(&after, &kinds, &metrics));
        assert!(!after.hands_to_api(&after, &kinds, &metrics));
        assert!(!after.hands_to_api(&Writers::default().union(&after), &kinds, &metrics));
        let only_articles = Kinds(BTreeMap::from([("article".to_owned(), 2)]));
        assert!(!after.hands_to_api(&before, &only_articles, &metrics), "an unknown kind was handed to API servers");
    }

    proptest! {
        #[test]
        fn what_is_announced_is_read_back(chosen in prop::collection::vec(any::<bool>(), 4), at: i64) {
            let (kinds, metrics) = names();
            let numbers = pairs(&kinds, &metrics).zip(chosen).filter(|(_, is_chosen)| *is_chosen);
            let writers = Writers { by_api: numbers.map(|((_, number), _)| number).collect() };
            let text = writers.encode(&kinds, &metrics, Micros(at));
            prop_assert_eq!(since(&text), Some(Micros(at)));
            prop_assert_eq!(Writers::decode(&text, &kinds, &metrics), Some(writers));
        }

        #[test]
        fn any_text_is_read_or_refused(text in ".{0,80}") {
            let (kinds, metrics) = names();
            let _ = (Writers::decode(&text, &kinds, &metrics), since(&text));
        }
    }
}
