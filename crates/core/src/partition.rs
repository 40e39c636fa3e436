//! What chooses the partition that an event goes through.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::model::{Target, UserId};

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
