//! `[admin]`: the port for those who look after the daemon.

use std::net::{AddrParseError, SocketAddr};

use serde::{Deserialize, Serialize};

/// `[admin]`
#[derive(Clone, Debug, Serialize, Deserialize)]
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

/// One sentence per problem.
pub(super) fn problems(admin: &Admin) -> Vec<String> {
    let mut found = Vec::new();
    if admin.address().is_err() {
        found.push(format!(
            "[admin] listen is \"{}\": write ADDRESS:PORT, for instance 127.0.0.1:9464, or nothing for no port",
            admin.listen
        ));
    }
    for host in admin.hosts.iter().filter(|host| host.is_empty() || host.contains([':', '/', ' '])) {
        found.push(format!("[admin] hosts: \"{host}\" is no name: write it without scheme and port"));
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_can_not_be_listened_on_is_said() {
        let found = |listen: &str, host: &str| {
            problems(&Admin { listen: listen.to_owned(), hosts: vec![host.to_owned()] }).join(" ")
        };
        assert_eq!(found("", "tallyd.example.com"), "");
        assert_eq!(found("[::1]:0", "tallyd"), "");
        assert!(found("localhost:9464", "a").contains("[admin] listen is \"localhost:9464\""));
        assert!(found("9464", "a").contains("write ADDRESS:PORT"));
        assert!(found("", "http://a").contains("[admin] hosts: \"http://a\" is no name"));
    }
}
