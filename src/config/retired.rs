//! `[retired]`: names that were taken away although MySQL has numbers of theirs.

use serde::{Deserialize, Serialize};

use super::{Kinds, Metrics};

/// `[retired]`
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Retired {
    /// Names that were in `[kinds]`.
    pub kinds: Vec<String>,
    /// Names that were in `[metrics]`.
    pub metrics: Vec<String>,
}

/// One sentence per problem.
pub(super) fn problems(retired: &Retired, kinds: &Kinds, metrics: &Metrics) -> Vec<String> {
    let both = |section: &'static str, names: &[String], known: &dyn Fn(&str) -> bool| {
        let there = names.iter().filter(|name| known(name));
        there.map(|name| format!("[retired] {section} names {name}, which is in [{section}]")).collect::<Vec<_>>()
    };
    let mut found = both("kinds", &retired.kinds, &|name| kinds.0.contains_key(name));
    found.extend(both("metrics", &retired.metrics, &|name| metrics.0.contains_key(name)));
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_there_is_not_retired() {
        let retired = Retired { kinds: vec!["video".to_owned()], metrics: vec!["search".to_owned()] };
        let found = problems(&retired, &Kinds::default(), &Metrics::default());
        assert_eq!(found, ["[retired] kinds names video, which is in [kinds]"]);
    }
}
