//! `[retired]`: removed names whose counters MySQL still has.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::key::Key;
use super::problem::Faults;
use super::{Kinds, Metrics};

/// `[retired]`
#[derive(Clone, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Retired {
    /// Names removed from `[kinds]`.
    pub kinds: Vec<String>,
    /// Names removed from `[metrics]`.
    pub metrics: Vec<String>,
}

pub(super) fn problems(retired: &Retired, kinds: &Kinds, metrics: &Metrics, found: &mut Faults) {
    let mut both = |section: &str, names: &[String], known: &dyn Fn(&str) -> bool| {
        for (place, name) in names.iter().enumerate().filter(|(_, name)| known(name)) {
            let key = Key::from("retired").then(section).then(place);
            found.at(
                key,
                format!("[retired] {section} has {name}, which is in [{section}]: remove it from one of them"),
            );
        }
    };
    both("kinds", &retired.kinds, &|name| kinds.0.contains_key(name));
    both("metrics", &retired.metrics, &|name| metrics.0.contains_key(name));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_there_is_not_retired() {
        let retired = Retired { kinds: vec!["video".to_owned()], metrics: vec!["search".to_owned()] };
        let found = Faults::texts(|found| problems(&retired, &Kinds::default(), &Metrics::default(), found));
        assert_eq!(found, ["[retired] kinds has video, which is in [kinds]: remove it from one of them"]);
    }
}
