//! `[mysql]`: the server and its time limits.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use tallyd_connect::address::ServerUrl;
use tallyd_connect::login::Login;

/// `[mysql]`
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
#[schemars(extend("additionalProperties" = false))]
pub struct Mysql {
    /// `mysql://user@host:3306/database`. Remote connections use TLS and verify the server, local connections use TLS
    /// if available. `?ssl-mode=VERIFY_IDENTITY` always verifies. `VERIFY_CA` ignores the name (for certificates that
    /// MySQL generated). `DISABLED` is plain text.
    pub url: ServerUrl,
    #[serde(flatten)]
    pub login: Login,
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
            login: Login::default(),
            connect_timeout_ms: 10_000,
            transaction_timeout_ms: 30_000,
        }
    }
}
