//! `[admin]`: the port for those who look after the daemon.

use std::net::{AddrParseError, SocketAddr};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::key::Key;
use super::problem::Faults;

/// `[admin]`
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Admin {
    /// `127.0.0.1:9464`; empty for none.
    pub listen: String,
    /// Names by which it is called beside `localhost` and addresses.
    pub hosts: Vec<String>,
}

impl Default for Admin {
    fn default() -> Self {
        Self { listen: "127.0.0.1:9464".to_owned(), hosts: Vec::new() }
    }
}

impl Admin {
    /// Where it listens; none where it doesn't.
    ///
    /// # Errors
    /// `listen` is no address: [`super::load`] has refused that.
    pub fn address(&self) -> Result<Option<SocketAddr>, AddrParseError> {
        if self.listen.is_empty() { Ok(None) } else { self.listen.parse().map(Some) }
    }
}

/// What can't be listened on, or be called so.
pub(super) fn problems(admin: &Admin, found: &mut Faults) {
    if admin.address().is_err() {
        let text = format!(
            "[admin] listen is \"{}\": write ADDRESS:PORT, for instance 127.0.0.1:9464, or nothing for no port",
            admin.listen
        );
        found.at("admin.listen", text);
    }
    for (place, host) in admin.hosts.iter().enumerate() {
        if host.is_empty() || host.contains([':', '/', ' ']) {
            let text = format!("[admin] hosts: \"{host}\" is no name: write it without scheme and port");
            found.at(Key::from("admin.hosts").then(place), text);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_can_not_be_listened_on_is_said() {
        let found = |listen: &str, host: &str| {
            let mut found = Faults::default();
            problems(&Admin { listen: listen.to_owned(), hosts: vec![host.to_owned()] }, &mut found);
            found.texts().join(" ")
        };
        assert_eq!(found("", "tallyd.example.com"), "");
        assert_eq!(found("[::1]:0", "tallyd"), "");
        assert!(found("localhost:9464", "a").contains("[admin] listen is \"localhost:9464\""));
        assert!(found("9464", "a").contains("write ADDRESS:PORT"));
        assert!(found("", "http://a").contains("[admin] hosts: \"http://a\" is no name"));
    }
}
