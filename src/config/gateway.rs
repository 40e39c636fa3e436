//! `[gateway]`: the HTTP port of `tallyd gateway`. The daemon does not use it.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::admin::{Listen, NoAddress, listen_problems, token_problems};
use super::password::read_password;
use super::problem::Faults;
use super::{ConfigError, Secret};

/// `[gateway]`
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Gateway {
    /// `ADDRESS:PORT`, or `unix:` and a socket's path. An address reachable from other machines requires a token.
    pub listen: String,
    /// File with a token of at least 16 characters, not world-readable. A relative path is a systemd credential.
    /// Requests to /v1 send the token as `Authorization: Bearer TOKEN`.
    #[schemars(with = "String")]
    pub token_file: Option<String>,
    /// The token, only from the environment.
    #[schemars(skip)]
    pub token: Option<Secret>,
    /// Maximum requests in flight. Further requests get 503, and clients can retry.
    #[schemars(range(min = 1, max = 10_000))]
    pub requests_max: usize,
    /// Maximum open connections. Others wait.
    #[schemars(range(min = 1, max = 100_000))]
    pub connections_max: usize,
}

impl Default for Gateway {
    fn default() -> Self {
        Self {
            listen: "127.0.0.1:9191".to_owned(),
            token_file: None,
            token: None,
            requests_max: 512,
            connections_max: 10_000,
        }
    }
}

impl Gateway {
    pub fn address(&self) -> Result<Listen, NoAddress> {
        self.listen.parse()
    }

    /// Returns the token that requests need. Only the gateway reads the file, because the daemon might not have access
    /// to it.
    ///
    /// # Errors
    /// Fails if the file can't be read, or if its token is too short.
    pub fn read_token(&self) -> Result<Option<Secret>, ConfigError> {
        let wrong = |problem: String| ConfigError(vec![problem]);
        let token = match (&self.token, &self.token_file) {
            (None, Some(file)) => {
                let read = read_password("token_file", file);
                Some(read.map_err(|problem| wrong(format!("[gateway] {problem}")))?)
            }
            (token, _) => token.clone(),
        };
        let mut found = Faults::default();
        token_problems("gateway", token.as_ref(), &mut found);
        found.0.into_iter().next().map_or(Ok(token), |fault| Err(wrong(fault.text)))
    }
}

pub(super) fn problems(gateway: &Gateway, found: &mut Faults) {
    let has_token = gateway.token.is_some() || gateway.token_file.is_some();
    listen_problems("gateway", &gateway.listen, &gateway.address().map(Some), has_token, found);
    token_problems("gateway", gateway.token.as_ref(), found);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gateway_that_others_reach_must_have_a_token() {
        let found = |gateway: &Gateway| Faults::texts(|found| problems(gateway, found)).join(" ");
        let listens = |listen: &str| Gateway { listen: listen.to_owned(), ..Gateway::default() };
        assert_eq!(found(&listens("unix:/run/tallyd-gateway/http.sock")), "");
        assert!(
            found(&listens("0.0.0.0:9191"))
                .contains("[gateway] listen is \"0.0.0.0:9191\", which other machines can reach")
        );
        assert!(found(&listens("")).contains("[gateway] listen is \"\""));
        let short = Gateway { token: Some(Secret::new("short".to_owned())), ..listens("0.0.0.0:9191") };
        assert!(found(&short).contains("[gateway] token_file must hold 16 or more"));
        assert!(short.read_token().unwrap_err().to_string().contains("must hold 16 or more"));
    }
}
