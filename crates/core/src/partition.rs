//! What chooses the partition that an event goes through.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::model::{Target, UserId};

/// Events a second that one partition takes in the busiest hour, with room to catch up: docs/scale.md, "What is full first".
const EVENTS_OF_ONE: u32 = 62_500;

/// How many partitions suit this many events a second.
pub fn suited_partitions(events_per_s: u32) -> u16 {
    u16::try_from(events_per_s.div_ceil(EVENTS_OF_ONE).max(1)).unwrap_or(u16::MAX)
}

/// What chooses the partition of a like. Of any other number the target does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum PartitionBy {
    /// The user: what many do with one target is spread over all partitions.
    User,
    /// The target: all that is done with it goes through one partition, and a batch has few targets.
    Target,
}

impl PartitionBy {
    /// The routing key of that user's like of that target.
    pub fn routing_key(self, target: Target, user: UserId) -> String {
        match self {
            Self::User => user.to_string(),
            Self::Target => target.id.to_string(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn partitions_suit_the_rates_as_docs_scale_has_them() {
        let table = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/scale.md")).unwrap();
        let row = table.lines().find(|line| line.starts_with("| partitions | 1 | 2 | 16 |"));
        assert!(row.is_some(), "docs/scale.md has other figures");
        let suited = [0, 10_000, 100_000, 1_000_000, u32::MAX].map(suited_partitions);
        assert_eq!(suited, [1, 1, 2, 16, u16::MAX]);
    }
}
