//! How tallyd logs in to a server, in each section of the configuration that has an address.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::secret::Secret;
use crate::tls::Tls;

/// The keys beside `url` of `[amqp]`, `[mysql]`, `[redis]` and of servers in move.toml.
#[derive(Clone, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Login {
    /// The password, only from the environment.
    #[schemars(skip)]
    pub password: Option<Secret>,
    /// File with the password, not world-readable. A relative path is a systemd credential.
    #[schemars(with = "String")]
    pub password_file: Option<String>,
    /// Trusted authorities (PEM), in addition to the system's. For MySQL with `ssl-mode=VERIFY_CA`: the only ones.
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
}
