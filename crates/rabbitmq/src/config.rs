//! `[amqp]`: the broker, and how events are spread over its queues.

use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use tallyd_connect::address::ServerUrl;
use tallyd_connect::secret::Secret;
use tallyd_connect::tls::Tls;
use tallyd_core::partition::PartitionBy;

/// How many partitions at most: each costs a queue and a connection to the broker.
pub const PARTITIONS_MAX: u16 = 256;

/// `[amqp]`
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Amqp {
    /// `amqp://user@host:5672/vhost` or `amqps://...`; the vhost `/` is written `%2f`.
    pub url: ServerUrl,
    /// Other nodes of its cluster, as `host:port`: each connection is made to the next one that answers.
    pub seeds: Vec<String>,
    /// The password, from the environment only.
    #[schemars(skip)]
    pub password: Option<Secret>,
    /// A file that holds the password; a relative path is one of systemd's credentials.
    #[schemars(with = "String")]
    pub password_file: Option<String>,
    /// A file with certificates of authorities (PEM) that are trusted beside the system's own.
    #[schemars(with = "String")]
    pub tls_ca_file: Option<String>,
    /// A file with the certificate (PEM) that is shown to a server that asks for one.
    #[schemars(with = "String")]
    pub tls_cert_file: Option<String>,
    /// A file with its private key (PEM); a relative path is one of systemd's credentials.
    #[schemars(with = "String")]
    pub tls_key_file: Option<String>,
    /// What was read from these.
    #[serde(skip)]
    pub tls: Tls,
    /// What every name on the broker starts with: `{prefix}.events`, `{prefix}.partitions`, `{prefix}.returned`.
    pub prefix: String,
    /// How many queues the events are spread over, each with one active consumer.
    #[schemars(range(min = 1, max = PARTITIONS_MAX))]
    pub partitions: u16,
    /// What chooses the partition of a like: a client's routing key.
    pub partition_by: PartitionBy,
    /// The kind of queue.
    pub queue_type: QueueType,
    /// Whether tallyd makes exchanges, queues and bindings; with false they must be there.
    pub declare: bool,
    /// Messages on the way to one partition's consumer that are not acknowledged yet. At least two batches.
    pub prefetch: u16,
    /// Seconds between heartbeats; a dead broker is noticed after twice that.
    #[schemars(range(min = 1, max = 60))]
    pub heartbeat_s: u16,
    /// Milliseconds that one call of the broker may take.
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
    /// The longest that one call of the broker may take.
    pub fn timeout(&self) -> Duration {
        Duration::from_millis(self.timeout_ms)
    }
}

/// The kind of a partition's queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum QueueType {
    /// Replicated and always on disk; also the faster to drain.
    Quorum,
    /// One node's own; for brokers without quorum queues.
    Classic,
}
