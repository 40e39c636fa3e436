//! A daemon's health, decided from its telemetry: whether it is ready, and what needs attention. All of it is in one
//! object, for the status page, `GET /v1/status` and `tallyd status`. No task follows these decisions.
//!
//! Times are in microseconds since the epoch. If a daemon of another version does not send a field, the field gets its
//! default.

mod readiness;
mod report;
mod runbook;
mod text;
mod troubles;

use serde::{Deserialize, Serialize};

pub use text::{Text, printable};
pub use troubles::Trouble;

use crate::runtime::waits::Wait;
use crate::telemetry::{ConsumerState, DaemonState, Observed, Point};
use tallyd_core::control::Order;
use tallyd_core::partition::PartitionName;

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Status {
    pub version: String,
    pub owner: String,
    pub started_at: i64,
    /// Time of this status, by the daemon's clock.
    pub now: i64,
    pub state: DaemonState,
    pub ready: bool,
    pub not_ready: Vec<String>,
    pub troubles: Vec<Trouble>,
    pub reload_refused: Option<(i64, String)>,
    pub site_differs: Option<(i64, String)>,
    pub rate: Option<Point>,
    pub events_committed: u64,
    pub memory_bytes: u64,
    #[serde(flatten)]
    pub seen: Observed,
    pub partitions: Vec<Partition>,
    pub mysql_went_back_at: Option<i64>,
    pub waits: Vec<Wait>,
    pub orders: Vec<Order>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Partition {
    pub partition: u16,
    pub map: Option<String>,
    pub queue: String,
    pub standing: ConsumerState,
    pub owner: Option<String>,
    /// How often daemons have acquired the partition. `None` if no daemon has acquired it yet.
    pub epoch: Option<u64>,
    pub taken_at: Option<i64>,
    /// Messages in the queue that no daemon has received. `None` if the broker did not answer.
    pub messages: Option<u64>,
    pub held: u64,
    pub consumers: Option<u64>,
    pub oldest_unacked_s: f64,
}

impl Partition {
    pub fn name(&self) -> PartitionName {
        PartitionName { number: self.partition, map: self.map.clone() }
    }

    pub fn waiting(&self) -> Option<u64> {
        self.messages.map(|messages| messages + self.held)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_status_has_the_fields_that_programs_read_and_no_others() {
        let status = serde_json::to_value(Status::default()).unwrap();
        let fields: Vec<&str> = status.as_object().unwrap().keys().map(String::as_str).collect();
        let expected = "boards dead_letters dead_letters_full events_committed jobs memory_bytes mysql_went_back_at \
             not_ready now observed_at orders outbox_rows owner partitions partitions_in_use rate ready reconciles \
             reload_refused returned servers site_differs started_at state troubles version waits";
        assert_eq!(sorted(fields), expected.split(' ').collect::<Vec<_>>());
        assert_eq!(serde_json::from_value::<Status>(status).unwrap(), Status::default());
    }

    fn sorted(mut fields: Vec<&str>) -> Vec<&str> {
        fields.sort_unstable();
        fields
    }
}
