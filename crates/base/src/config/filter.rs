//! `[filter]`: which targets have a Bloom filter of the users who like them.

use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::Config;
use super::problem::Faults;
use crate::runtime::cron;

/// The longest allowed interval between filter runs. Readers stop trusting filters after twice this time.
pub const FILTER_GAP_MAX: Duration = Duration::from_secs(1_800);

/// `[filter]`
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Filter {
    /// Likes that a target needs for a filter. 0: no filters. All daemons need the same number.
    pub likes_min: u64,
    /// Whether clients ask the filters before MySQL. Set it when all daemons have `likes_min` and `tallyd admin filters rebuild`
    /// has ended.
    pub asked: bool,
    /// Largest share of wrong "yes" answers for users without a like. At 0.00001 a filter takes 3 to 6 bytes per like.
    #[schemars(range(min = 1e-10, max = 0.1))]
    pub false_positive: f64,
    /// When to update filters: at least every half hour. Empty if another daemon updates filters.
    pub cron: String,
}

impl Default for Filter {
    fn default() -> Self {
        Self { likes_min: 0, asked: false, false_positive: 1e-5, cron: "30 * * * * *".to_owned() }
    }
}

impl Filter {
    pub fn is_on(&self) -> bool {
        self.likes_min > 0
    }

    /// Returns the cron pattern of filter runs. The pattern is empty if this daemon starts no filter runs.
    pub fn schedule(&self) -> &str {
        if self.is_on() { &self.cron } else { "" }
    }
}

pub(super) fn problems(config: &Config, found: &mut Faults) {
    if config.filter.likes_min == 0 {
        if config.filter.asked {
            let text = "[filter] asked must be false while likes_min is 0, because no filter exists: set likes_min, or \
                        asked = false";
            found.between(&["filter.asked".into(), "filter.likes_min".into()], text.to_owned());
        }
        return;
    }
    if config.redis.also.is_some() {
        found.at(
            "filter.likes_min",
            "[filter] likes_min must be 0 while [redis.also] exists, because filters support only one layout: set likes_min = 0, or remove \
             [redis.also]",
        );
    }
    // The pattern is empty if another daemon updates the filters.
    let often = |cron: &str| cron::parse(cron).is_ok_and(|cron| cron::longest_gap(&cron) <= FILTER_GAP_MAX);
    let cron = &config.filter.cron;
    if !cron.is_empty() && cron::parse(cron).is_ok() && !often(cron) {
        let text = format!(
            "[filter] cron is \"{cron}\", with more than half an hour between runs: schedule runs at least every half hour, or readers ignore all filters"
        );
        found.between(&["filter.cron".into(), "filter.likes_min".into()], text);
    }
}

#[cfg(test)]
mod tests {
    use crate::config::check::tests::found;

    #[test]
    fn filters_that_could_not_be_trusted_are_reported() {
        for (text, expected) in [
            ("[filter]\nasked = true", "[filter] asked must be false while likes_min is 0"),
            ("[filter]\nlikes_min = 9\n[redis.also]\nbucket_bits = 14", "[filter] likes_min must be 0 while"),
            ("[filter]\nlikes_min = 9\ncron = \"0 0 4 * * *\"", "with more than half an hour between runs"),
            ("[filter]\nfalse_positive = 0.5", "[filter] false_positive is 0.5, allowed are 0.0000000001 to 0.1"),
            ("[filter]\nfalse_positive = 0.0", "[filter] false_positive is 0, allowed"),
            ("[filter]\ncron = \"now\"", "[filter] cron is \"now\""),
        ] {
            let problems = found(text);
            assert!(problems.iter().any(|problem| problem.contains(expected)), "{text}: {problems:?}");
        }
    }
}
