//! `[redis]`: the server, and how counters are laid out in it.

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
    /// Whether it is a node of a Redis Cluster, by which the others are found.
    pub cluster: bool,
    /// Other nodes that are asked for the rest of the Cluster, as `host:port`.
    pub seeds: Vec<String>,
    /// The sentinels that are asked where the master is, as `host:port`; then `url` names no server.
    pub sentinels: Vec<String>,
    /// What the sentinels call it.
    pub sentinel_master: String,
    /// A file that holds the sentinels' own password; a relative path is one of systemd's credentials.
    #[schemars(with = "String")]
    pub sentinel_password_file: Option<String>,
    /// What was read from there.
    #[serde(skip)]
    pub sentinel_password: Option<Secret>,
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
    /// Prefix of every key.
    pub key_prefix: String,
    /// How counters are laid out.
    pub layout: Form,
    /// Each kind has 2^`bucket_bits` buckets: about (targets of the kind) / 122.
    #[schemars(range(min = 0, max = BUCKET_BITS_MAX))]
    pub bucket_bits: u8,
    /// How the keys of the layouts `entity` and `string` are named; empty for the layout's own way.
    pub counter_key: String,
    /// Milliseconds that one pipeline may take.
    #[schemars(range(min = 100, max = 60_000))]
    pub timeout_ms: u64,
    /// A second layout that API servers count in too, while counters move.
    #[schemars(with = "Also")]
    pub also: Option<Also>,
}

/// `[redis.also]`
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Also {
    /// How counters are laid out.
    pub layout: Form,
    /// Each kind has 2^`bucket_bits` buckets.
    #[schemars(range(min = 0, max = BUCKET_BITS_MAX))]
    pub bucket_bits: u8,
    /// How keys are named.
    pub counter_key: String,
}

impl Default for Also {
    fn default() -> Self {
        let Redis { layout, bucket_bits, counter_key, .. } = Redis::default();
        Self { layout, bucket_bits, counter_key }
    }
}

impl Also {
    /// The layout.
    ///
    /// # Errors
    /// A sentence's end that says why `counter_key` can't be used.
    pub fn layout(&self) -> Result<Layout, String> {
        Layout::new(self.layout, self.bucket_bits, &self.counter_key)
    }
}

impl Redis {
    /// The layout.
    ///
    /// # Errors
    /// A sentence's end that says why `counter_key` can't be used.
    pub fn layout(&self) -> Result<Layout, String> {
        Layout::new(self.layout, self.bucket_bits, &self.counter_key)
    }

    /// The other way round: the second layout is the first one.
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
