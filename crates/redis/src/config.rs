//! `[redis]`: the server, and the layout of the counters in it.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use tallyd_connect::address::ServerUrl;
use tallyd_connect::secret::Secret;
use tallyd_connect::tls::Tls;
use tallyd_core::layout::{BUCKET_BITS_MAX, Form, Layout};

/// `[redis]`
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Redis {
    /// `redis://host:6379/0` or `rediss://...`.
    pub url: ServerUrl,
    /// Whether `url` is a node of a Redis Cluster. It tells tallyd the other nodes.
    pub cluster: bool,
    /// More nodes of the Cluster that tallyd can ask for the other nodes, as `host:port`.
    pub seeds: Vec<String>,
    /// The sentinels that tallyd asks for the master, as `host:port`. Then the host of `url` is not used.
    pub sentinels: Vec<String>,
    /// The sentinels' name for the master.
    pub sentinel_master: String,
    /// A file that holds the sentinels' own password. A relative path is one of systemd's credentials.
    #[schemars(with = "String")]
    pub sentinel_password_file: Option<String>,
    /// The content of that file.
    #[serde(skip)]
    pub sentinel_password: Option<Secret>,
    /// The password. It comes only from the environment.
    #[schemars(skip)]
    pub password: Option<Secret>,
    /// A file that holds the password. A relative path is one of systemd's credentials.
    #[schemars(with = "String")]
    pub password_file: Option<String>,
    /// A file with certificates of authorities (PEM) to trust in addition to the system's own.
    #[schemars(with = "String")]
    pub tls_ca_file: Option<String>,
    /// A file with the client certificate (PEM), for servers that ask for one.
    #[schemars(with = "String")]
    pub tls_cert_file: Option<String>,
    /// A file with the private key of that certificate (PEM). A relative path is one of systemd's credentials.
    #[schemars(with = "String")]
    pub tls_key_file: Option<String>,
    /// The content of these files.
    #[serde(skip)]
    pub tls: Tls,
    /// The prefix of every key.
    pub key_prefix: String,
    /// The layout of the counters.
    pub layout: Form,
    /// The number of buckets per kind is 2^`bucket_bits`. It should be about (targets of the kind) / 122.
    #[schemars(range(min = 0, max = BUCKET_BITS_MAX))]
    pub bucket_bits: u8,
    /// The name pattern of the keys in the layouts `entity` and `string`. Empty for the layout's default.
    pub counter_key: String,
    /// The timeout of one pipeline, in milliseconds.
    #[schemars(range(min = 100, max = 60_000))]
    pub timeout_ms: u64,
    /// A second layout that API servers also count in while counters move.
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
    /// Returns the layout.
    ///
    /// # Errors
    /// The end of a sentence that says why `counter_key` can't be used.
    pub fn layout(&self) -> Result<Layout, String> {
        Layout::new(self.layout, self.bucket_bits, &self.counter_key)
    }
}

impl Redis {
    /// Returns the layout.
    ///
    /// # Errors
    /// The end of a sentence that says why `counter_key` can't be used.
    pub fn layout(&self) -> Result<Layout, String> {
        Layout::new(self.layout, self.bucket_bits, &self.counter_key)
    }

    /// Swaps the layouts: the second one becomes the first.
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
            password: None,
            password_file: None,
            tls_ca_file: None,
            tls_cert_file: None,
            tls_key_file: None,
            tls: Tls::default(),
            key_prefix: "tally:".to_owned(),
            layout: Form::Packed,
            bucket_bits: 13,
            counter_key: String::new(),
            timeout_ms: 5_000,
            also: None,
        }
    }
}
