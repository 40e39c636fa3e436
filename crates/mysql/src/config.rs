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
    /// `mysql://user@host:3306/database`.
    pub url: ServerUrl,
    /// The password. Only the environment sets it.
    #[schemars(skip)]
    pub password: Option<Secret>,
    /// A file with the password. A relative path names a systemd credential.
    #[schemars(with = "String")]
    pub password_file: Option<String>,
    /// A file with trusted authorities' certificates (PEM), in addition to the system's. With `ssl-mode=VERIFY_CA` only
    /// these are trusted.
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
    /// The time limit for connecting, in milliseconds.
    #[schemars(range(min = 100, max = 30_000))]
    pub connect_timeout_ms: u64,
    /// The time limit of one transaction, in milliseconds. After it the connection is closed and the transaction is
    /// retried.
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
