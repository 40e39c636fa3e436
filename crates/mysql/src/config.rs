//! `[mysql]`: the server and its time limits.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use tallyd_connect::address::ServerUrl;
use tallyd_connect::secret::Secret;
use tallyd_connect::tls::Tls;

/// `[mysql]`
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Mysql {
    /// `mysql://user@host:3306/database`. Remote connections use TLS and verify the server, local connections use TLS
    /// if available. `?ssl-mode=VERIFY_IDENTITY` always verifies. `VERIFY_CA` ignores the name (for certificates that
    /// MySQL generated). `DISABLED` is plain text.
    pub url: ServerUrl,
    /// The password. Only the environment sets it.
    #[schemars(skip)]
    pub password: Option<Secret>,
    /// File with the password, not world-readable. A relative path is a systemd credential.
    #[schemars(with = "String")]
    pub password_file: Option<String>,
    /// Trusted authorities (PEM), in addition to the system's. With `ssl-mode=VERIFY_CA` only these authorities are
    /// trusted.
    #[schemars(with = "String")]
    pub tls_ca_file: Option<String>,
    /// Client certificate (PEM), if required.
    #[schemars(with = "String")]
    pub tls_cert_file: Option<String>,
    /// Private key (PEM), without passphrase. A relative path is a systemd credential.
    #[schemars(with = "String")]
    pub tls_key_file: Option<String>,
    /// The contents of these files.
    #[serde(skip)]
    pub tls: Tls,
    /// Time limit of a connect in milliseconds.
    #[schemars(range(min = 100, max = 30_000))]
    pub connect_timeout_ms: u64,
    /// Time limit of one transaction in milliseconds. Then tallyd retries.
    #[schemars(range(min = 1_000, max = 45_000))]
    pub transaction_timeout_ms: u64,
}

impl Default for Mysql {
    fn default() -> Self {
        Self {
            url: ServerUrl::from("mysql://tallyd@127.0.0.1:3306/tally"),
            password: None,
            password_file: None,
            tls_ca_file: None,
            tls_cert_file: None,
            tls_key_file: None,
            tls: Tls::default(),
            connect_timeout_ms: 10_000,
            transaction_timeout_ms: 30_000,
        }
    }
}
