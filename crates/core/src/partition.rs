//! Partitions: their numbers, names and queues, and how an event's partition is chosen.

use std::collections::BTreeMap;
use std::fmt;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::model::{Target, UserId};

/// The maximum rate of one partition in the busiest hour, in events per second. At this rate the partition can still
/// work off a backlog. See docs/scaling.md, "Bottlenecks by rate".
const EVENTS_OF_ONE: u32 = 62_500;

pub fn suited_partitions(events_per_s: u32) -> u16 {
    u16::try_from(events_per_s.div_ceil(EVENTS_OF_ONE).max(1)).unwrap_or(u16::MAX)
}

/// The number of a map's partition is this number plus the map's number (`[[map]]`). This number is far above the
/// highest number that `[amqp] partitions` allows.
pub const MAPS_FROM: u16 = 60_000;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PartitionName {
    pub number: u16,
    pub map: Option<String>,
}

impl fmt::Display for PartitionName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.map {
            Some(map) => write!(f, "map {map}"),
            None => write!(f, "partition {}", self.number),
        }
    }
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Partitions(BTreeMap<u16, String>);

impl Partitions {
    pub fn count(&self) -> u16 {
        u16::try_from(self.0.len()).unwrap_or(u16::MAX)
    }

    pub fn has(&self, number: u16) -> bool {
        self.0.contains_key(&number)
    }

    pub fn numbers(&self) -> impl Iterator<Item = u16> {
        self.0.keys().copied()
    }

    pub fn queues(&self) -> impl Iterator<Item = (u16, &str)> {
        self.0.iter().map(|(number, queue)| (*number, queue.as_str()))
    }
}

impl FromIterator<(u16, String)> for Partitions {
    fn from_iter<I: IntoIterator<Item = (u16, String)>>(partitions: I) -> Self {
        Self(partitions.into_iter().collect())
    }
}

/// How a like's partition is chosen. The partition of any other event is chosen by the target.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum PartitionBy {
    /// The likes of one target are spread over all partitions.
    User,
    /// All likes of a target go to the same partition.
    Target,
}

impl PartitionBy {
    pub fn routing_key(self, target: Target, user: UserId) -> String {
        match self {
            Self::User => user.to_string(),
            Self::Target => target.id.to_string(),
        }
    }
}

/// Whether a daemon may write to a partition, according to the partition's row in MySQL. The row is locked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Claim {
    Keeps,
    /// The daemon takes over the partition with this epoch.
    Takes(u64),
    /// Another daemon has taken over the partition since this daemon's first batch. This daemon must write nothing.
    TakenOver,
}

impl Claim {
    /// `row` is the epoch in the partition's row. `ours` is the epoch of the session's first batch; `None` before it.
    pub fn of(row: u64, ours: Option<u64>) -> Self {
        match ours {
            Some(ours) if ours == row => Self::Keeps,
            Some(_) => Self::TakenOver,
            None => Self::Takes(row + 1),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{Kind, TargetId};

    #[test]
    fn partitions_suit_the_rates_as_docs_scale_has_them() {
        let table = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/scaling.md")).unwrap();
        let (heads, rows) = table.split_once("/s |\n|---|").unwrap();
        let numbers = |cells: &str| -> Vec<u32> {
            cells.split('|').filter_map(|cell| cell.replace([',', ' '], "").replace("/s", "").parse().ok()).collect()
        };
        let rates = numbers(heads.lines().last().unwrap());
        let partitions = numbers(rows.lines().find(|line| line.starts_with("| partitions |")).unwrap());
        assert_eq!(rates.len(), 3, "docs/scaling.md: {rates:?}");
        let suited: Vec<u32> = rates.into_iter().map(|rate| suited_partitions(rate).into()).collect();
        assert_eq!(suited, partitions);
        assert_eq!([0, u32::MAX].map(suited_partitions), [1, u16::MAX]);
    }

    #[test]
    fn partitions_are_named_and_have_queues_by_number() {
        let name = |map: Option<&str>| PartitionName { number: 7, map: map.map(str::to_owned) }.to_string();
        assert_eq!([name(None), name(Some("site"))], ["partition 7", "map site"]);
        let partitions: Partitions = [(3, "three".to_owned()), (0, "zero".to_owned())].into_iter().collect();
        assert_eq!((partitions.count(), partitions.has(3), partitions.has(1)), (2, true, false));
        assert!(partitions.numbers().eq([0, 3]) && partitions.queues().eq([(0, "zero"), (3, "three")]));
    }

    #[test]
    fn a_like_is_routed_by_its_user_or_by_its_target() {
        let target = Target { kind: Kind(1), id: TargetId(42) };
        let key = |by: PartitionBy| by.routing_key(target, UserId(7));
        assert_eq!([PartitionBy::User, PartitionBy::Target].map(key), ["7", "42"]);
    }

    #[test]
    fn a_daemon_writes_only_with_the_epoch_of_its_first_batch() {
        let claims = [(5, Some(5)), (6, Some(5)), (4, Some(5)), (5, None)].map(|(row, ours)| Claim::of(row, ours));
        assert_eq!(claims, [Claim::Keeps, Claim::TakenOver, Claim::TakenOver, Claim::Takes(6)]);
    }
}
