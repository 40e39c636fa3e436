//! `[amqp]`: the broker, and how its queues share the events.

use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use tallyd_connect::address::ServerUrl;
use tallyd_connect::secret::Secret;
use tallyd_connect::tls::Tls;
use tallyd_core::partition::PartitionBy;

/// The largest number of partitions: each costs a queue and a connection to the broker.
pub const PARTITIONS_MAX: u16 = 256;

/// `[amqp]`
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Amqp {
    /// `amqp://user@host:5672/vhost` or `amqps://...`. Write the vhost `/` as `%2f`.
    pub url: ServerUrl,
    /// Other nodes of the cluster, as `host:port`. Each connection goes to the next node that answers.
    pub seeds: Vec<String>,
    /// The password. Only the environment sets it.
    #[schemars(skip)]
    pub password: Option<Secret>,
    /// A file with the password. A relative path names a systemd credential.
    #[schemars(with = "String")]
    pub password_file: Option<String>,
    /// A file with trusted authorities' certificates (PEM), in addition to the system's.
    #[schemars(with = "String")]
    pub tls_ca_file: Option<String>,
    /// A file with the client certificate (PEM), for a server that requests one.
    #[schemars(with = "String")]
    pub tls_cert_file: Option<String>,
    /// A file with the private key (PEM). A relative path names a systemd credential.
    #[schemars(with = "String")]
    pub tls_key_file: Option<String>,
    /// The contents of these files.
    #[serde(skip)]
    pub tls: Tls,
    /// The prefix of every name on the broker: `{prefix}.events`, `{prefix}.partitions`, `{prefix}.returned`.
    pub prefix: String,
    /// The number of queues that share the events. Each has one active consumer.
    #[schemars(range(min = 1, max = PARTITIONS_MAX))]
    pub partitions: u16,
    /// How a like's partition is chosen. Clients use it as the routing key.
    pub partition_by: PartitionBy,
    /// The type of the queues.
    pub queue_type: QueueType,
    /// Whether tallyd declares exchanges, queues and bindings. If false, they must already exist.
    pub declare: bool,
    /// The maximum number of unacknowledged messages that one partition's consumer holds. At least two batches.
    pub prefetch: u16,
    /// Seconds between heartbeats. A dead broker is detected after twice this time.
    #[schemars(range(min = 1, max = 60))]
    pub heartbeat_s: u16,
    /// The time limit of one call to the broker, in milliseconds.
    #[schemars(range(min = 100, max = 60_000))]
    pub timeout_ms: u64,
}

impl Default for Amqp {
    fn default() -> Self {
        Self {
            url: ServerUrl::from("amqp://tallyd@127.0.0.1:5672/%2f"),
            seeds: Vec::new(),
            password: None,
            password_file: None,
            tls_ca_file: None,
            tls_cert_file: None,
            tls_key_file: None,
            tls: Tls::default(),
            prefix: "tally".to_owned(),
            partitions: 1,
            partition_by: PartitionBy::User,
            queue_type: QueueType::Quorum,
            declare: true,
            prefetch: 20_000,
            heartbeat_s: 5,
            timeout_ms: 10_000,
        }
    }
}

impl Amqp {
    /// The time limit of one call to the broker.
    pub fn timeout(&self) -> Duration {
        Duration::from_millis(self.timeout_ms)
    }
}

/// The type of a partition's queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum QueueType {
    /// Replicated and always on disk. It also drains faster.
    Quorum,
    /// On one node only, for brokers without quorum queues.
    Classic,
}
