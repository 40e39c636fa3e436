//! Addresses of servers. An address can contain secrets.

use std::borrow::Cow;
use std::path::PathBuf;
use std::{fmt, fs};

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use secrecy::{ExposeSecret, SecretString};
use serde::{Deserialize, Serialize, Serializer};
use url::Url;

use crate::secret::Secret;

/// A server's address. An address is printed without the user and the password. The configuration check validates the
/// address.
#[derive(Clone, Deserialize)]
#[serde(transparent)]
pub struct ServerUrl {
    text: SecretString,
    #[serde(skip)]
    password_file: Option<PathBuf>,
}

impl ServerUrl {
    /// Returns the whole address with user and password, because the client library needs it to connect.
    pub fn expose(&self) -> &str {
        self.text.expose_secret()
    }

    /// Splits the address into its parts.
    ///
    /// # Errors
    /// Returns an error text that does not quote the address.
    pub fn parts(&self) -> Result<Url, String> {
        Url::parse(self.expose()).map_err(|error| format!("is not an address: {error}"))
    }

    pub fn at(&self, server: &str) -> Result<Self, String> {
        let wrong = || "is not HOST:PORT".to_owned();
        let (host, port) = server.rsplit_once(':').ok_or_else(wrong)?;
        // Without this check, the library would silently cut the host at one of these characters.
        if host.contains(['/', '@', '?', '#']) || (host.contains(':') && !host.starts_with('[')) {
            return Err(wrong());
        }
        let mut url = self.parts()?;
        url.set_host(Some(host)).map_err(|_| wrong())?;
        let port = port.parse().ok().filter(|port| *port != 0).ok_or_else(wrong)?;
        url.set_port(Some(port)).map_err(|()| wrong())?;
        Ok(Self { text: url.to_string().into(), ..self.clone() })
    }

    /// Returns the address with `***` in place of each secret. The user stays readable.
    pub fn masked(&self) -> String {
        const MASK: &str = "***";
        let Ok(mut url) = self.parts() else { return MASK.to_owned() };
        let is_secret = |key: &str| ["pass", "secret", "token", "key"].iter().any(|word| key.contains(word));
        // These calls fail only if the address has no host. Such an address has no user either.
        if url.password().is_some() {
            let _ = url.set_password(Some(MASK));
        } else if url.scheme().starts_with("redis") && !url.username().is_empty() {
            // A Redis user always has a password. If a Redis address has a user and no password, somebody has written
            // the password in the place of the user.
            let _ = url.set_username(MASK);
        }
        let pairs: Vec<(String, String)> = url.query_pairs().into_owned().collect();
        if pairs.iter().any(|(key, _)| is_secret(&key.to_lowercase())) {
            let shown = |(key, value): &(String, String)| {
                let value = if is_secret(&key.to_lowercase()) { MASK } else { value };
                format!("{key}={value}")
            };
            url.set_query(Some(&pairs.iter().map(shown).collect::<Vec<_>>().join("&")));
        }
        url.to_string()
    }

    pub fn set_password(&mut self, password: &Secret) -> Result<(), String> {
        let mut url = self.parts()?;
        // The library does not escape `%`, but the client that reads the address decodes it.
        let escaped = password.expose().replace('%', "%25");
        url.set_password(Some(&escaped)).map_err(|()| "cannot contain a password".to_owned())?;
        self.text = url.to_string().into();
        Ok(())
    }

    /// Names the file from which the password came. New connections read it again.
    pub fn set_password_file(&mut self, file: PathBuf) {
        self.password_file = Some(file);
    }

    /// Returns the password that the file has now, because the file can change while tallyd runs. Returns `None` if the
    /// password came from no file, or if the file can't be read now. Then the address has the last known password.
    pub fn password_now(&self) -> Option<Secret> {
        let text = fs::read_to_string(self.password_file.as_ref()?).ok()?;
        let password = text.trim_end_matches(['\n', '\r']);
        // A file that is being written can be empty.
        (!password.is_empty()).then(|| Secret::new(password.to_owned()))
    }

    /// Returns the address for a new connection, with the password that the file has now.
    #[must_use]
    pub fn now(&self) -> Self {
        let mut url = self.clone();
        if let Some(password) = self.password_now() {
            // This fails only if the address can't have a password, and then it had none before.
            let _ = url.set_password(&password);
        }
        url
    }
}

impl From<&str> for ServerUrl {
    fn from(url: &str) -> Self {
        Self { text: url.into(), password_file: None }
    }
}

impl fmt::Display for ServerUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.parts() {
            Ok(mut url) => {
                // These calls fail only if the address has no host. Such an address has no user either.
                let _ = url.set_password(None);
                let _ = url.set_username("");
                url.set_query(None);
                url.set_fragment(None);
                url.fmt(f)
            }
            Err(_) => f.write_str("(no address)"),
        }
    }
}

impl Serialize for ServerUrl {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl fmt::Debug for ServerUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "\"{self}\"")
    }
}

impl JsonSchema for ServerUrl {
    fn schema_name() -> Cow<'static, str> {
        "ServerUrl".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({ "type": "string" })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_password_comes_out_as_it_went_in() {
        for password in ["a%41b", "p@ss:w/rd#?", "100%", "%25"] {
            let mut url = ServerUrl::from("mysql://user@host/db");
            url.set_password(&Secret::new(password.to_owned())).unwrap();
            let set = url.parts().unwrap().password().unwrap().to_owned();
            assert_eq!(percent_encoding::percent_decode_str(&set).decode_utf8().unwrap(), password);
        }
    }

    #[test]
    fn an_address_moves_to_another_server() {
        let url = ServerUrl::from("mysql://user:p%25@db1:3306/tally?ssl-mode=DISABLED");
        assert_eq!(url.at("[::1]:3307").unwrap().expose(), "mysql://user:p%25@[::1]:3307/tally?ssl-mode=DISABLED");
        for server in
            ["db2", "db2:x", "mysql://db2", "mysql://db2:3306", "user@db2:3306", "fd00::1:3306", "db 2:3306", ":3306"]
        {
            assert!(url.at(server).is_err(), "{server}");
        }
    }

    #[test]
    fn an_address_prints_without_its_secrets() {
        let url = ServerUrl::from("amqp://user:secret@host:5672/%2f?password=secret");
        assert_eq!(format!("{url} {url:?}"), "amqp://host:5672/%2f \"amqp://host:5672/%2f\"");
        assert_eq!(url.masked(), "amqp://user:***@host:5672/%2f?password=***");
        assert_eq!(ServerUrl::from("redis://secret@h/0").masked(), "redis://***@h/0");
        let options = "mysql://u@h/t?ssl-mode=VERIFY_IDENTITY&socket=/a%20b";
        assert_eq!(ServerUrl::from(options).masked(), options);
    }
}
