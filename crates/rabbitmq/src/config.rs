//! `[amqp]`: the broker, and how its queues share the events.

use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use tallyd_connect::address::ServerUrl;
use tallyd_connect::login::Login;
use tallyd_core::partition::PartitionBy;

/// The largest number of partitions. Each partition costs a queue and a connection to the broker.
pub const PARTITIONS_MAX: u16 = 256;

/// `[amqp]`
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
#[schemars(extend("additionalProperties" = false))]
pub struct Amqp {
    /// `amqp://user@host:5672/vhost`, or `amqps://` for TLS. Write the vhost `/` as `%2f`, and in a password #, @ and %
    /// as %23, %40 and %25. With `?auth_mechanism=external` the client certificate is the login.
    pub url: ServerUrl,
    /// Other nodes of the cluster, as `host:port`. Leave it empty behind a load balancer.
    pub seeds: Vec<String>,
    #[serde(flatten)]
    pub login: Login,
    /// Prefix of every name on the broker, for example `{prefix}.events`.
    pub prefix: String,
    /// Queues that share the events, each with one active consumer. Several queues need the plugin
    /// rabbitmq_consistent_hash_exchange.
    #[schemars(range(min = 1, max = PARTITIONS_MAX))]
    pub partitions: u16,
    /// Routing key of likes. Clients and the gateway read it from the site card. Use `target` if MySQL is sharded by
    /// target.
    pub partition_by: PartitionBy,
    /// Type of new queues. Existing queues keep their type.
    pub queue_type: QueueType,
    /// Whether tallyd declares exchanges, queues and bindings. If false, they must exist.
    pub declare: bool,
    /// Limit on the unacknowledged messages of all partitions: at least two batches (`[consumer] batch_events_max`).
    /// Each partition has an equal share, but at least 2,500. Large messages lower this number.
    pub prefetch: u16,
    /// Seconds between heartbeats. After two silent intervals RabbitMQ ends the connection, and another daemon gets its
    /// partitions.
    #[schemars(range(min = 1, max = 60))]
    pub heartbeat_s: u16,
    /// Time limit of one call in milliseconds.
    #[schemars(range(min = 100, max = 60_000))]
    pub timeout_ms: u64,
}

impl Default for Amqp {
    fn default() -> Self {
        Self {
            url: ServerUrl::from("amqp://tallyd@127.0.0.1:5672/%2f"),
            seeds: Vec::new(),
            login: Login::default(),
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
    pub fn timeout(&self) -> Duration {
        Duration::from_millis(self.timeout_ms)
    }
}

/// The type of a partition's queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum QueueType {
    /// A replicated queue, always on disk, faster to drain.
    Quorum,
    /// On one node, for brokers without quorum queues.
    Classic,
}
