//! `[mysql]`: the server, and how long it may take.

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
    /// The password, from the environment only.
    #[schemars(skip)]
    pub password: Option<Secret>,
    /// A file that holds the password; a relative path is one of systemd's credentials.
    #[schemars(with = "String")]
    pub password_file: Option<String>,
    /// A file with certificates of authorities (PEM) that are trusted beside the system's own, and alone with
    /// `ssl-mode=VERIFY_CA`.
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
    /// Milliseconds that connecting may take.
    #[schemars(range(min = 100, max = 30_000))]
    pub connect_timeout_ms: u64,
    /// Milliseconds that one transaction may take; then its connection is dropped and it is tried again.
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
