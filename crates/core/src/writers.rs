//! The counters that API servers write in Redis, as daemons announce them to clients. Pure.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

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

/// An announcement of a daemon. During a handover, all clients change the writers at the same instant.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Announced {
    writers: Arc<Writers>,
    /// The writers from an instant on. Clients compare the instant with their own clocks.
    next: Option<(Micros, Arc<Writers>)>,
}

/// The JSON form: `{"api":["video:like"],"since":1795251385004538}`. During a handover, it also has the writers `next`
/// and the instant `from`: `{"api":[],"since":1795251385004538,"next":["video:like"],"from":1795251396004538}`.
#[derive(Serialize, Deserialize)]
struct Json {
    api: Vec<String>,
    #[serde(default)]
    since: i64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    next: Option<Vec<String>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    from: Option<i64>,
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

    /// Returns the names of the counters that API servers write, such as `video:like`.
    fn names(&self, kinds: &Kinds, metrics: &Metrics) -> Vec<String> {
        let by_api = pairs(kinds, metrics).filter(|(_, number)| self.by_api.contains(number));
        by_api.map(|(name, _)| name).collect()
    }
}

impl Announced {
    /// Announces that `writers` are valid now.
    pub fn now(writers: Writers) -> Self {
        Self { writers: Arc::new(writers), next: None }
    }

    /// Announces that `next` replaces the writers at the instant `from`.
    #[must_use]
    pub fn then(self, from: Micros, next: Writers) -> Self {
        Self { next: Some((from, Arc::new(next))), ..self }
    }

    /// Returns the writers at an instant.
    pub fn at(&self, now: Micros) -> &Arc<Writers> {
        self.next.as_ref().filter(|(from, _)| now >= *from).map_or(&self.writers, |(_, next)| next)
    }

    /// Returns the writers after the announced change.
    pub fn last(&self) -> &Writers {
        self.next.as_ref().map_or(&self.writers, |(_, next)| next)
    }

    /// Returns the text that daemons write to Redis. `since` is the time when the daemon decided on this announcement.
    /// If the announcements of two daemons differ, the newer announcement is valid.
    pub fn encode(&self, kinds: &Kinds, metrics: &Metrics, since: Micros) -> String {
        let (from, next) = self.next.as_ref().map(|(from, next)| (from.0, next.names(kinds, metrics))).unzip();
        let json = Json { api: self.writers.names(kinds, metrics), since: since.0, next, from };
        // Lists of strings and numbers can always be converted to JSON.
        serde_json::to_string(&json).unwrap_or_default()
    }

    /// Parses a daemon's announcement. Returns `None` if the text is not an announcement. Skips kinds and metrics that
    /// are not in the configuration.
    pub fn decode(text: &str, kinds: &Kinds, metrics: &Metrics) -> Option<Self> {
        let Json { api, next, from, .. } = serde_json::from_str(text).ok()?;
        let known: BTreeMap<String, (Kind, Metric)> = pairs(kinds, metrics).collect();
        let writers =
            |names: Vec<String>| Writers { by_api: names.iter().filter_map(|name| known.get(name).copied()).collect() };
        let announced = Self::now(writers(api));
        Some(match from.zip(next) {
            Some((from, next)) => announced.then(Micros(from), writers(next)),
            None => announced,
        })
    }
}

/// Returns the `since` of an announcement, or `None` if the text is not an announcement.
pub fn since(text: &str) -> Option<Micros> {
    let Json { since, .. } = serde_json::from_str(text).ok()?;
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
        let announced = |rules: &[Rule]| Announced::now(writers(rules)).encode(&kinds, &metrics, Micros(7));
        assert_eq!(announced(&[]), r#"{"api":[],"since":7}"#);
        let rules = [by_api("like", None), by_api("share", Some("video"))];
        assert_eq!(announced(&rules), r#"{"api":["article:like","video:like","video:share"],"since":7}"#);
    }

    #[test]
    fn names_that_a_client_does_not_know_are_left_out() {
        let (kinds, metrics) = names();
        let read = |text: &str| Announced::decode(text, &kinds, &metrics);
        let video = writers(&[by_api("like", Some("video"))]);
        assert_eq!(read(r#"{"api":["post:like","video:like"]}"#), Some(Announced::now(video)));
        assert_eq!(read(r#"{"api":[],"later":1}"#), Some(Announced::default()));
        for wrong in ["", "null", "[]", "{}", r#"{"api":1}"#] {
            assert_eq!(read(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn all_clients_change_the_writers_at_the_announced_instant() {
        let (kinds, metrics) = names();
        let (before, after) = (writers(&[]), writers(&[by_api("like", None)]));
        let announced = Announced::now(before.clone()).then(Micros(9), after.clone());
        let text = announced.encode(&kinds, &metrics, Micros(7));
        assert_eq!(text, r#"{"api":[],"since":7,"next":["article:like","video:like"],"from":9}"#);
        let read = Announced::decode(&text, &kinds, &metrics).unwrap();
        assert_eq!((&**read.at(Micros(8)), &**read.at(Micros(9))), (&before, &after));
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
        fn what_is_announced_is_read_back(chosen in prop::collection::vec(any::<bool>(), 8), at: i64, from: Option<i64>) {
            let (kinds, metrics) = names();
            let of = |chosen: &[bool]| {
                let numbers = pairs(&kinds, &metrics).zip(chosen).filter(|(_, is_chosen)| **is_chosen);
                Writers { by_api: numbers.map(|((_, number), _)| number).collect() }
            };
            let now = Announced::now(of(&chosen[..4]));
            let announced = match from {
                Some(from) => now.then(Micros(from), of(&chosen[4..])),
                None => now,
            };
            let text = announced.encode(&kinds, &metrics, Micros(at));
            prop_assert_eq!(since(&text), Some(Micros(at)));
            prop_assert_eq!(Announced::decode(&text, &kinds, &metrics), Some(announced));
        }

        #[test]
        fn any_text_is_read_or_refused(text in ".{0,80}") {
            let (kinds, metrics) = names();
            let _ = (Announced::decode(&text, &kinds, &metrics), since(&text));
        }
    }
}
