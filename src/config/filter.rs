//! `[filter]`: which targets have a Bloom filter of who likes them.

use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::Config;
use super::problem::Faults;
use crate::runtime::cron;

/// Half of the time after which filters are not trusted any more.
pub(crate) const FILTER_GAP_MAX: Duration = Duration::from_secs(1_800);

/// `[filter]`
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Filter {
    /// How many likes a target must have; zero for no filters.
    pub likes_min: u64,
    /// How many of the users who don't like a target look as if they might, at most.
    #[schemars(range(min = 1e-10, max = 0.1))]
    pub false_positive: f64,
    /// When filters are kept up: a cron pattern of five or six fields; empty for never.
    pub cron: String,
}

impl Default for Filter {
    fn default() -> Self {
        Self { likes_min: 0, false_positive: 1e-5, cron: "30 * * * * *".to_owned() }
    }
}

impl Filter {
    /// Whether there are filters.
    pub fn is_on(&self) -> bool {
        self.likes_min > 0
    }

    /// When they are kept up; empty for never.
    pub fn schedule(&self) -> &str {
        if self.is_on() { &self.cron } else { "" }
    }
}

/// Why filters could not be trusted.
pub(super) fn problems(config: &Config, found: &mut Faults) {
    if config.filter.likes_min == 0 {
        return;
    }
    if config.redis.also.is_some() {
        found.at(
            "filter.likes_min",
            "[filter] likes_min must be 0 while there is a [redis.also]: filters are of one layout, and API servers that count in two \
             would ask those that others don't keep up",
        );
    }
    // Empty where another daemon does it.
    let often = |cron: &str| cron::parse(cron).is_ok_and(|cron| cron::longest_gap(&cron) <= FILTER_GAP_MAX);
    let cron = &config.filter.cron;
    if !cron.is_empty() && cron::parse(cron).is_ok() && !often(cron) {
        let text =
            format!("[filter] cron is \"{cron}\", with runs more than half an hour apart: no filter would be trusted");
        found.between(&["filter.cron".into(), "filter.likes_min".into()], text);
    }
}

#[cfg(test)]
mod tests {
    use crate::config::check::tests::found;

    #[test]
    fn filters_that_could_not_be_trusted_are_said() {
        for (text, expected) in [
            ("[filter]\nlikes_min = 9\n[redis.also]\nbucket_bits = 14", "[filter] likes_min must be 0 while"),
            ("[filter]\nlikes_min = 9\ncron = \"0 0 4 * * *\"", "with runs more than half an hour apart"),
            ("[filter]\nfalse_positive = 0.5", "[filter] false_positive is 0.5, allowed are 0.0000000001 to 0.1"),
            ("[filter]\nfalse_positive = 0.0", "[filter] false_positive is 0, allowed"),
            ("[filter]\ncron = \"now\"", "[filter] cron is \"now\""),
        ] {
            let problems = found(text);
            assert!(problems.iter().any(|problem| problem.contains(expected)), "{text}: {problems:?}");
        }
    }
}
