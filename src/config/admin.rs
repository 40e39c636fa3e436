//! `[admin]`: the port for those who look after the daemon, and who may ask there.

use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::str::FromStr;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::Secret;
use super::key::Key;
use super::password::read_password;
use super::problem::Faults;

/// `[admin]`
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Admin {
    /// `127.0.0.1:8255`, or `unix:` and the path of a socket; empty for none.
    pub listen: String,
    /// The path of the socket for `tallyd pause`, `resume` and `throttle`; empty for none.
    pub control: String,
    /// Names by which it is called beside `localhost` and addresses.
    pub hosts: Vec<String>,
    /// A file that holds what whoever asks must show; a relative path is one of systemd's credentials.
    #[schemars(with = "String")]
    pub token_file: Option<String>,
    /// The same, from the environment only.
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
    /// The path of the control socket; `None` if there is none.
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

/// In the folder that the unit makes.
const CONTROL: &str = "/run/tallyd/control.sock";

pub const SOCKET: &str = "unix:";

/// Bytes of a socket's path (`sun_path` of unix(7), without its end).
const SOCKET_PATH_MAX: usize = 107;

#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoAddress {
    #[error("write ADDRESS:PORT, for instance 127.0.0.1:8255, or unix:/run/tallyd/admin.sock, or nothing for no port")]
    Unknown,
    /// Where a relative one would be depends on who asks.
    #[error("write the whole path, for instance unix:/run/tallyd/admin.sock")]
    Relative,
    #[error("the path of a socket has {SOCKET_PATH_MAX} bytes at most")]
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

/// Characters of a token at least: nobody guesses 16 that are chosen at random.
const TOKEN_MIN: usize = 16;

pub(super) fn read_token(admin: &mut Admin, found: &mut Faults) {
    if let (None, Some(file)) = (&admin.token, &admin.token_file) {
        match read_password("token_file", file) {
            Ok(token) => admin.token = Some(token),
            Err(problem) => found.at("admin.token_file", format!("[admin] {problem}")),
        }
    }
}

pub(super) fn problems(admin: &Admin, found: &mut Faults) {
    let has_token = admin.token.is_some() || admin.token_file.is_some();
    listen_problems("admin", &admin.listen, &admin.address(), has_token, found);
    token_problems("admin", admin.token.as_ref(), found);
    if admin.control().is_err() {
        let text = format!(
            "[admin] control is \"{}\": write the whole path of a socket, {SOCKET_PATH_MAX} bytes at most, for instance {CONTROL}, or nothing",
            admin.control
        );
        found.at("admin.control", text);
    }
    for (place, host) in admin.hosts.iter().enumerate() {
        if host.is_empty() || host.contains([':', '/', ' ']) {
            let text = format!("[admin] hosts: \"{host}\" is no name: write it without scheme and port");
            found.at(Key::from("admin.hosts").then(place), text);
        }
    }
}

/// Checks where a port listens: other machines must not reach it without a token.
pub(super) fn listen_problems(
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
                "[{section}] listen is \"{listen}\", which others reach: set token_file to a file with a token that they must show, or listen on 127.0.0.1"
            );
            found.between(&[key, Key::from(section).then("token_file")], text);
        }
        Ok(_) => {}
    }
}

pub(super) fn token_problems(section: &str, token: Option<&Secret>, found: &mut Faults) {
    let Some(text) = token.map(Secret::expose) else { return };
    if text.len() < TOKEN_MIN || !text.bytes().all(|byte| byte.is_ascii_graphic()) {
        let text = format!(
            "[{section}] token_file must hold {TOKEN_MIN} or more letters, digits and signs: openssl rand -hex 32"
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
    fn what_can_not_be_listened_on_is_said() {
        let found = |listen: &str, host: &str| {
            let admin = Admin { listen: listen.to_owned(), hosts: vec![host.to_owned()], ..Admin::default() };
            Faults::texts(|found| problems(&admin, found)).join(" ")
        };
        assert_eq!(found("", "tallyd.example.com"), "");
        assert_eq!(found("[::1]:0", "tallyd"), "");
        assert_eq!(found("unix:/run/tallyd/admin.sock", "tallyd"), "");
        assert!(found("unix:admin.sock", "a").contains("[admin] listen is \"unix:admin.sock\": write the whole path"));
        assert!(found("unix:/run/", "a").contains("write the whole path"));
        assert!(found(&format!("unix:/{}", "x".repeat(107)), "a").contains("107 bytes at most"));
        assert!(found("localhost:8255", "a").contains("[admin] listen is \"localhost:8255\""));
        assert!(found("8255", "a").contains("write ADDRESS:PORT"));
        assert!(found("0.0.0.0:8255", "a").contains("which others reach: set token_file"));
        assert!(found("10.0.0.7:8255", "a").contains("or listen on 127.0.0.1"));
        let admin = Admin { control: "control.sock".to_owned(), ..Admin::default() };
        let relative = Faults::texts(|found| problems(&admin, found)).join(" ");
        assert!(relative.contains("[admin] control is \"control.sock\": write the whole path"), "{relative}");
        assert!(found("", "http://a").contains("[admin] hosts: \"http://a\" is no name"));
    }
}
