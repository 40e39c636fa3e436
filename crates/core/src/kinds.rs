//! The names of kinds and metrics, with their codes in MySQL.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::model::{Kind, Metric};

/// `[kinds]`
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(transparent)]
#[schemars(transform = codes)]
pub struct Kinds(pub BTreeMap<String, u8>);

impl Default for Kinds {
    fn default() -> Self {
        Self(BTreeMap::from([("video".to_owned(), 1)]))
    }
}

impl Kinds {
    pub fn named(&self, name: &str) -> Option<Kind> {
        self.0.get(name).map(|code| Kind(*code))
    }

    pub fn name(&self, kind: Kind) -> String {
        let name = self.0.iter().find(|(_, code)| **code == kind.0).map(|(name, _)| name.clone());
        name.unwrap_or_else(|| kind.to_string())
    }
}

/// `[metrics]`
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(transparent)]
#[schemars(transform = codes_with_like)]
pub struct Metrics(pub BTreeMap<String, u8>);

impl Default for Metrics {
    fn default() -> Self {
        Self(BTreeMap::from([(LIKE.to_owned(), 1)]))
    }
}

/// The metric of likes. `[metrics]` must contain it.
pub const LIKE: &str = "like";

impl Metrics {
    pub fn named(&self, name: &str) -> Option<Metric> {
        self.0.get(name).map(|code| Metric(*code))
    }

    pub fn codes(&self) -> Vec<Metric> {
        let mut codes: Vec<Metric> = self.0.values().map(|code| Metric(*code)).collect();
        codes.sort_unstable();
        codes
    }

    pub fn name(&self, metric: Metric) -> String {
        let name = self.0.iter().find(|(_, code)| **code == metric.0).map(|(name, _)| name.clone());
        name.unwrap_or_else(|| metric.0.to_string())
    }

    pub fn like(&self) -> Metric {
        Metric(self.0.get(LIKE).copied().unwrap_or(1))
    }
}

fn codes(schema: &mut schemars::Schema) {
    if let Some(code) = schema.get_mut("additionalProperties").and_then(Value::as_object_mut) {
        code.insert("minimum".to_owned(), json!(1));
    }
    schema.insert("propertyNames".to_owned(), json!({ "pattern": "^[a-z0-9_-]{1,32}$" }));
}

fn codes_with_like(schema: &mut schemars::Schema) {
    codes(schema);
    schema.insert("required".to_owned(), json!([LIKE]));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_codes_are_each_found_by_the_other() {
        let codes = |names: [(&str, u8); 2]| names.into_iter().map(|(name, code)| (name.to_owned(), code)).collect();
        let (kinds, metrics) = (Kinds(codes([("video", 7), ("post", 9)])), Metrics(codes([("like", 5), ("view", 3)])));
        assert_eq!([kinds.named("post"), kinds.named("song")], [Some(Kind(9)), None]);
        assert_eq!([kinds.name(Kind(7)), kinds.name(Kind(8))], ["video", "8"]);
        assert_eq!([metrics.named("view"), metrics.named("share")], [Some(Metric(3)), None]);
        assert_eq!([metrics.name(Metric(3)), metrics.name(Metric(4))], ["view", "4"]);
        assert_eq!((metrics.codes(), metrics.like()), (vec![Metric(3), Metric(5)], Metric(5)));
    }

    #[test]
    fn by_default_the_only_metric_is_likes_of_videos() {
        let (Kinds(kinds), Metrics(metrics)) = (Kinds::default(), Metrics::default());
        assert_eq!((kinds.len(), kinds.get("video")), (1, Some(&1)));
        assert_eq!((metrics.len(), metrics.get(LIKE)), (1, Some(&1)));
    }

    #[test]
    fn the_schema_says_which_names_and_codes_are_allowed() {
        let [kinds, metrics] = [schemars::schema_for!(Kinds), schemars::schema_for!(Metrics)].map(|it| it.to_value());
        for schema in [&kinds, &metrics] {
            assert_eq!(schema["additionalProperties"]["minimum"], 1);
            assert_eq!(schema["propertyNames"]["pattern"], "^[a-z0-9_-]{1,32}$");
        }
        assert_eq!((&kinds["required"], &metrics["required"]), (&Value::Null, &json!([LIKE])));
    }
}
