//! Errors of Redis, and what the daemon must do after each error.

use redis::{ErrorKind, RedisError, ServerErrorKind, Value};
use tallyd_connect::fate::Fate;
use tallyd_connect::tls::TlsFault;
use tallyd_connect::whole::Whole;

use super::link::NO_REPLICAS;
use super::login::tls_fault;

/// An error of Redis, or of the connection. Redis holds only derived data, which MySQL can restore.
#[derive(Debug, thiserror::Error)]
pub enum CacheError {
    #[error("{action}")]
    Command {
        action: &'static str,
        #[source]
        source: Whole<RedisError>,
    },
    #[error(transparent)]
    TlsFault(#[from] TlsFault),
}

impl CacheError {
    pub(crate) fn wrong(action: &'static str, error: String) -> Self {
        let source = RedisError::from((ErrorKind::InvalidClientConfig, "wrong", error));
        Self::Command { action, source: Whole(source) }
    }

    pub fn unexpected(action: &'static str, answer: &Value) -> Self {
        let shown = format!("{answer:?}").chars().take(200).collect();
        let source = RedisError::from((ErrorKind::UnexpectedReturnType, "unexpected answer", shown));
        Self::Command { action, source: Whole(source) }
    }

    pub fn fate(&self) -> Fate {
        let Self::Command { source: Whole(source), .. } = self else { return Fate::Untrusted };
        match source.kind() {
            // The configuration calls the server a node of a Cluster, but the server is not part of a Cluster, or the
            // reverse. Or the sentinels don't know the configured master.
            ErrorKind::InvalidClientConfig => Fate::Misconfigured,
            _ if is_refusal(source) => Fate::Refused,
            _ if source.code() == Some(NO_REPLICAS) => Fate::Passing,
            // A key has the wrong type, or its value is not a number.
            ErrorKind::Extension
            | ErrorKind::UnexpectedReturnType
            | ErrorKind::Server(ServerErrorKind::ResponseError) => Fate::Item,
            _ => Fate::Passing,
        }
    }

    /// Returns true if the script refused the call, or if the key has the wrong type. Retries fail until someone fixes
    /// the key. Services answer with the code ERR, too, for example until a quota is filled again.
    pub(crate) fn is_for_ever(&self) -> bool {
        let Self::Command { source: Whole(source), .. } = self else { return false };
        match source.code() {
            Some("WRONGTYPE") => true,
            // Our own texts begin with the script's name. Redis adds the script to the text of a command's error.
            Some("ERR") => {
                let text = source.detail().unwrap_or_default();
                [".lua: ", "script:", "running script"].iter().any(|part| text.contains(part))
            }
            _ => false,
        }
    }

    pub(crate) fn code(&self) -> Option<&str> {
        match self {
            Self::Command { source, .. } => source.0.code(),
            Self::TlsFault(_) => None,
        }
    }
}

/// The login failed, the account is not allowed to run the command, or the server doesn't know the command.
fn is_refusal(error: &RedisError) -> bool {
    is_wrong_login(error) || error.code() == Some("NOPERM") || is_unknown_command(error)
}

pub(crate) fn is_wrong_login(error: &RedisError) -> bool {
    error.kind() == ErrorKind::AuthenticationFailed || matches!(error.code(), Some("NOAUTH" | "WRONGPASS"))
}

/// The keys of a script are in several slots. Some proxies report that with the code ERR.
pub(crate) fn is_cross_slot(error: &RedisError) -> bool {
    error.kind() == ErrorKind::Server(ServerErrorKind::CrossSlot)
        || error.detail().is_some_and(|text| text.ends_with("in same slot"))
}

pub(crate) fn is_unknown_command(error: &RedisError) -> bool {
    error.detail().is_some_and(|text| text.starts_with("unknown command"))
}

pub type Result<T> = std::result::Result<T, CacheError>;

pub trait Context<T> {
    fn context(self, action: &'static str) -> Result<T>;
}

impl<T, E: Into<RedisError>> Context<T> for std::result::Result<T, E> {
    fn context(self, action: &'static str) -> Result<T> {
        self.map_err(|error| {
            let source = error.into();
            tls_fault(&source).map_or(CacheError::Command { action, source: Whole(source) }, CacheError::from)
        })
    }
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::*;

    #[test]
    fn an_error_has_the_fate_of_its_kind() {
        let fate = |error: RedisError| Err::<(), _>(error).context("ask").unwrap_err().fate();
        let of = |kind: ErrorKind| fate(RedisError::from((kind, "as the test wants")));
        assert_eq!(of(ErrorKind::Io), Fate::Passing);
        assert_eq!(of(ErrorKind::InvalidClientConfig), Fate::Misconfigured);
        assert_eq!(of(ErrorKind::Server(ServerErrorKind::NoPerm)), Fate::Refused);
        assert_eq!(of(ErrorKind::Server(ServerErrorKind::ResponseError)), Fate::Item);
        let server =
            tallyd_connect::tls::Server { name: "Redis", address: "a:1", section: "redis", has_certificate: false };
        let fault = TlsFault::without_tls(server, "begin it with redis://");
        assert_eq!(fate(io::Error::other(fault).into()), Fate::Untrusted);
    }
}
