//! `[admin]`: the port for operators, and the clients that have access to it.

use std::fmt;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::key::Key;
use super::load::{Read, in_order, read_file, typed};
use super::password::read_password;
use super::problem::{Faults, Problem};
use super::schema::CONFIG_FILE;
use super::{Config, ConfigError, Secret};

/// `[admin]`
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Admin {
    /// `ADDRESS:PORT`, or `unix:` and a socket's path. Empty: no port. Daemons on one machine need different addresses.
    /// An address reachable from other machines requires a token.
    pub listen: String,
    /// Control socket for `tallyd pause`, `resume` and `admin throttle`, open to the daemon's user and group. Empty: none.
    pub control: String,
    /// Allowed `Host` names besides `localhost` and IP addresses, against DNS rebinding.
    pub hosts: Vec<String>,
    /// File with a token of at least 16 characters, not world-readable. A relative path is a systemd credential.
    /// Requests send `Authorization: Bearer TOKEN`. In browsers, enter any user, and the token as password.
    #[schemars(with = "String")]
    pub token_file: Option<String>,
    /// The token, only from the environment.
    #[schemars(skip)]
    pub token: Option<Secret>,
}

impl Default for Admin {
    fn default() -> Self {
        Self {
            listen: "127.0.0.1:8255".to_owned(),
            control: CONTROL.to_owned(),
            hosts: Vec::new(),
            token_file: None,
            token: None,
        }
    }
}

impl Admin {
    pub fn control(&self) -> Result<Option<PathBuf>, NoAddress> {
        if self.control.is_empty() { Ok(None) } else { socket_path(&self.control).map(Some) }
    }

    pub fn address(&self) -> Result<Option<Listen>, NoAddress> {
        if self.listen.is_empty() { Ok(None) } else { self.listen.parse().map(Some) }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Listen {
    Address(SocketAddr),
    Socket(PathBuf),
}

/// The default control socket, in the folder that the systemd unit creates.
const CONTROL: &str = "/run/tallyd/control.sock";

pub const SOCKET: &str = "unix:";

/// Maximum length of a socket's path, in bytes (`sun_path` of unix(7), without the zero byte at its end).
const SOCKET_PATH_MAX: usize = 107;

#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoAddress {
    #[error(
        "write ADDRESS:PORT, for example 127.0.0.1:8255, or unix:/run/tallyd/admin.sock, or leave it empty to disable the port"
    )]
    Unknown,
    #[error("write the absolute path, for example unix:/run/tallyd/admin.sock")]
    Relative,
    #[error("the path of a socket can have at most {SOCKET_PATH_MAX} bytes: use a shorter path")]
    TooLong,
}

impl FromStr for Listen {
    type Err = NoAddress;

    fn from_str(text: &str) -> Result<Self, NoAddress> {
        let Some(path) = text.strip_prefix(SOCKET) else {
            return text.parse().map(Self::Address).map_err(|_| NoAddress::Unknown);
        };
        socket_path(path).map(Self::Socket)
    }
}

fn socket_path(path: &str) -> Result<PathBuf, NoAddress> {
    match path {
        path if !path.starts_with('/') || path.ends_with('/') => Err(NoAddress::Relative),
        path if path.len() > SOCKET_PATH_MAX => Err(NoAddress::TooLong),
        path => Ok(path.into()),
    }
}

impl fmt::Display for Listen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Address(address) => address.fmt(f),
            Self::Socket(path) => write!(f, "{SOCKET}{}", path.display()),
        }
    }
}

/// Minimum length of a token, in characters. 16 random characters can't be guessed.
const TOKEN_MIN: usize = 16;

/// Reads only `[admin]`, for commands that send a request to a daemon. These commands work without the passwords of the
/// servers, and even if other sections have problems.
pub fn load_admin(path: &Path) -> Result<Admin, ConfigError> {
    let mut read = read_file(path, CONFIG_FILE)?;
    let Config { mut admin, .. } = typed(&mut read);
    let Read { mut faults, origins, problems: mut found, .. } = read;
    read_token("admin", &mut admin.token, admin.token_file.as_deref(), &mut faults);
    problems(&admin, &mut faults);
    found.extend(faults.0.into_iter().map(|fault| Problem::new(fault, &origins)));
    found.retain(|problem| problem.key.as_ref().is_none_or(|key| key.section() == "admin"));
    if found.is_empty() { Ok(admin) } else { Err(in_order(found).into()) }
}

pub fn read_token(section: &str, token: &mut Option<Secret>, file: Option<&str>, found: &mut Faults) {
    if let (None, Some(file)) = (&token, file) {
        match read_password("token_file", file) {
            Ok(read) => *token = Some(read),
            Err(problem) => found.at(Key::from(section).then("token_file"), format!("[{section}] {problem}")),
        }
    }
}

pub(super) fn problems(admin: &Admin, found: &mut Faults) {
    let has_token = admin.token.is_some() || admin.token_file.is_some();
    listen_problems("admin", &admin.listen, &admin.address(), has_token, found);
    token_problems("admin", admin.token.as_ref(), found);
    if admin.control().is_err() {
        let text = format!(
            "[admin] control is \"{}\": write the absolute path of a socket with at most {SOCKET_PATH_MAX} bytes, for example {CONTROL}, or leave it empty",
            admin.control
        );
        found.at("admin.control", text);
    }
    for (place, host) in admin.hosts.iter().enumerate() {
        if host.is_empty() || host.contains([':', '/', ' ']) {
            let text = format!("[admin] hosts: \"{host}\" is not a host name: write it without scheme and port");
            found.at(Key::from("admin.hosts").then(place), text);
        }
    }
}

/// If a port requires no token, checks that other machines can't reach the port.
pub fn listen_problems(
    section: &str,
    listen: &str,
    address: &Result<Option<Listen>, NoAddress>,
    has_token: bool,
    found: &mut Faults,
) {
    let key = Key::from(section).then("listen");
    match address {
        Err(problem) => found.at(key, format!("[{section}] listen is \"{listen}\": {problem}")),
        Ok(Some(Listen::Address(address))) if !address.ip().is_loopback() && !has_token => {
            let text = format!(
                "[{section}] listen is \"{listen}\", which other machines can reach: set token_file to a file with a token, or listen on 127.0.0.1"
            );
            found.between(&[key, Key::from(section).then("token_file")], text);
        }
        Ok(_) => {}
    }
}

pub fn token_problems(section: &str, token: Option<&Secret>, found: &mut Faults) {
    let Some(text) = token.map(Secret::expose) else { return };
    if text.len() < TOKEN_MIN || !text.bytes().all(|byte| byte.is_ascii_graphic()) {
        let text = format!(
            "[{section}] token_file must hold {TOKEN_MIN} or more letters, digits or symbols: create a token with `openssl rand -hex 32`"
        );
        found.between(&["token_file", "token"].map(|name| Key::from(section).then(name)), text);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_that_can_be_guessed_is_refused() {
        let found = |token: &str| {
            let token = Some(Secret::new(token.to_owned()));
            let admin = Admin { listen: "0.0.0.0:1".to_owned(), token, ..Admin::default() };
            Faults::texts(|found| problems(&admin, found)).join(" ")
        };
        assert_eq!(found("0123456789abcdef"), "");
        for token in ["", "0123456789abcde", "0123456789 abcdef", "0123456789abcdef\u{e4}"] {
            assert!(found(token).contains("must hold 16 or more"), "{token}");
        }
    }

    #[test]
    fn what_can_not_be_listened_on_is_reported() {
        let found = |listen: &str, host: &str| {
            let admin = Admin { listen: listen.to_owned(), hosts: vec![host.to_owned()], ..Admin::default() };
            Faults::texts(|found| problems(&admin, found)).join(" ")
        };
        assert_eq!(found("", "tallyd.example.com"), "");
        assert_eq!(found("[::1]:0", "tallyd"), "");
        assert_eq!(found("unix:/run/tallyd/admin.sock", "tallyd"), "");
        assert!(
            found("unix:admin.sock", "a").contains("[admin] listen is \"unix:admin.sock\": write the absolute path")
        );
        assert!(found("unix:/run/", "a").contains("write the absolute path"));
        assert!(found(&format!("unix:/{}", "x".repeat(107)), "a").contains("at most 107 bytes"));
        assert!(found("localhost:8255", "a").contains("[admin] listen is \"localhost:8255\""));
        assert!(found("8255", "a").contains("write ADDRESS:PORT"));
        assert!(found("0.0.0.0:8255", "a").contains("which other machines can reach: set token_file"));
        assert!(found("10.0.0.7:8255", "a").contains("or listen on 127.0.0.1"));
        let admin = Admin { control: "control.sock".to_owned(), ..Admin::default() };
        let relative = Faults::texts(|found| problems(&admin, found)).join(" ");
        assert!(relative.contains("[admin] control is \"control.sock\": write the absolute path"), "{relative}");
        assert!(found("", "http://a").contains("[admin] hosts: \"http://a\" is not a host name"));
    }
}
