//! `[redis]`: the server, and the layout of the counters in it.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use tallyd_connect::address::ServerUrl;
use tallyd_connect::login::Login;
use tallyd_connect::secret::Secret;
use tallyd_core::layout::{BUCKET_BITS_MAX, Form, Layout};

/// `[redis]`
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
#[schemars(extend("additionalProperties" = false))]
pub struct Redis {
    /// `redis://host:6379/0`, or `rediss://` for TLS. For a Redis Cluster: one node, with database 0. With sentinels,
    /// tallyd ignores host and port.
    pub url: ServerUrl,
    /// Whether `url` is a node of a Redis Cluster. All nodes need the same account.
    pub cluster: bool,
    /// Other nodes of the cluster, as `host:port`.
    pub seeds: Vec<String>,
    /// All sentinels, as `host:port`. They need TLS if `url` is `rediss://`.
    pub sentinels: Vec<String>,
    /// The master's name, as in `sentinel monitor NAME ...`.
    pub sentinel_master: String,
    /// File with the sentinels' password, not world-readable. A relative path is a systemd credential.
    #[schemars(with = "String")]
    pub sentinel_password_file: Option<String>,
    /// The content of that file.
    #[serde(skip)]
    pub sentinel_password: Option<Secret>,
    #[serde(flatten)]
    pub login: Login,
    /// Prefix of every key, the same in all clients, without braces.
    pub key_prefix: String,
    /// Layout of the counters. Use `packed` unless the site already has another layout.
    pub layout: Form,
    /// 2^`bucket_bits` buckets per kind: 13 for a million targets, 14 for two million. API servers that call scripts need
    /// the same number. Change it only through `[redis.also]`: a direct change makes all counters unknown until a daemon
    /// reloads them.
    #[schemars(range(min = 0, max = BUCKET_BITS_MAX))]
    pub bucket_bits: u8,
    /// Key names behind `key_prefix`. Empty: `counter:{kind}:{id}` for `entity`, `counter:{id}:{metric}` for `string`.
    pub counter_key: String,
    /// Time limit of one pipeline in milliseconds.
    #[schemars(range(min = 100, max = 60_000))]
    pub timeout_ms: u64,
    /// While `tallyd admin layout migrate` moves counters, API servers also count in this layout. API servers read from
    /// `[redis]`.
    #[schemars(with = "Also")]
    pub also: Option<Also>,
}

/// `[redis.also]`
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Also {
    /// The layout of the counters.
    pub layout: Form,
    /// The number of buckets per kind is 2^`bucket_bits`.
    #[schemars(range(min = 0, max = BUCKET_BITS_MAX))]
    pub bucket_bits: u8,
    /// The name pattern of the keys.
    pub counter_key: String,
}

impl Default for Also {
    fn default() -> Self {
        let Redis { layout, bucket_bits, counter_key, .. } = Redis::default();
        Self { layout, bucket_bits, counter_key }
    }
}

impl Also {
    pub fn layout(&self) -> Result<Layout, String> {
        Layout::new(self.layout, self.bucket_bits, &self.counter_key)
    }
}

impl Redis {
    pub fn layout(&self) -> Result<Layout, String> {
        Layout::new(self.layout, self.bucket_bits, &self.counter_key)
    }

    pub fn addresses(&self) -> Self {
        let Self { layout, bucket_bits, counter_key, also, .. } = Self::default();
        Self { layout, bucket_bits, counter_key, also, ..self.clone() }
    }

    pub fn moved(&self) -> Option<Self> {
        let Also { layout, bucket_bits, counter_key } = self.also.clone()?;
        let first = Also { layout: self.layout, bucket_bits: self.bucket_bits, counter_key: self.counter_key.clone() };
        Some(Self { layout, bucket_bits, counter_key, also: Some(first), ..self.clone() })
    }
}

impl Default for Redis {
    fn default() -> Self {
        Self {
            url: ServerUrl::from("redis://127.0.0.1:6379/0"),
            cluster: false,
            seeds: Vec::new(),
            sentinels: Vec::new(),
            sentinel_master: "mymaster".to_owned(),
            sentinel_password_file: None,
            sentinel_password: None,
            login: Login::default(),
            key_prefix: "tally:".to_owned(),
            layout: Form::Packed,
            bucket_bits: 13,
            counter_key: String::new(),
            timeout_ms: 5_000,
            also: None,
        }
    }
}
