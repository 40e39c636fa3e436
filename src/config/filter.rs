//! `[filter]`: which targets have a Bloom filter of who likes them.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// `[filter]`
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Filter {
    /// How many likes a target must have; zero for no filters.
    pub likes_min: u64,
    /// How many of the users who don't like a target look as if they might, at most.
    #[schemars(range(min = 1e-10, max = 0.1))]
    pub false_positive: f64,
    /// When filters are kept up: six fields, seconds first, UTC; empty for never.
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
