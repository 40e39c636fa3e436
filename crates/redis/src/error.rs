//! What can go wrong with Redis, and what becomes of the work then.

use redis::{ErrorKind, RedisError, ServerErrorKind, Value};
use tallyd_connect::fate::Fate;
use tallyd_connect::tls::TlsFault;
use tallyd_connect::whole::Whole;

use super::link::NO_REPLICAS;
use super::login::tls_fault;

/// An error of Redis, or on the way to it. Nothing here is the truth: all that is lost can be read from MySQL.
#[derive(Debug, thiserror::Error)]
pub enum CacheError {
    /// Redis said no, or nothing.
    #[error("{action}")]
    Command {
        /// What was tried.
        action: &'static str,
        /// Why it failed.
        #[source]
        source: Whole<RedisError>,
    },
    /// The server can't be believed to be the one that is meant, or doesn't believe us.
    #[error(transparent)]
    TlsFault(#[from] TlsFault),
}

impl CacheError {
    /// A setting can't be used.
    pub(crate) fn wrong(action: &'static str, error: String) -> Self {
        let source = RedisError::from((ErrorKind::InvalidClientConfig, "wrong", error));
        Self::Command { action, source: Whole(source) }
    }

    /// An answer that isn't what the script returns.
    pub(crate) fn unexpected(action: &'static str, answer: &Value) -> Self {
        let shown = format!("{answer:?}").chars().take(200).collect();
        let source = RedisError::from((ErrorKind::UnexpectedReturnType, "unexpected answer", shown));
        Self::Command { action, source: Whole(source) }
    }

    /// What becomes of the work.
    pub fn fate(&self) -> Fate {
        let Self::Command { source: Whole(source), .. } = self else { return Fate::Untrusted };
        match source.kind() {
            // A Cluster where the configuration says one server, or the other way round; no such sentinel, or master.
            ErrorKind::InvalidClientConfig => Fate::Misconfigured,
            _ if is_refusal(source) => Fate::Refused,
            _ if source.code() == Some(NO_REPLICAS) => Fate::Passing,
            // A key has another type, or holds a number that isn't one.
            ErrorKind::Extension
            | ErrorKind::UnexpectedReturnType
            | ErrorKind::Server(ServerErrorKind::ResponseError) => Fate::Item,
            _ => Fate::Passing,
        }
    }

    /// Whether it did not run, because its keys are on two nodes of a Cluster while their slot moves.
    pub fn is_of_a_moving_slot(&self) -> bool {
        self.code() == Some("TRYAGAIN")
    }

    /// Whether a script refused it, or the key is of another type: no later try would do better, until somebody mends the key.
    pub(crate) fn is_for_ever(&self) -> bool {
        matches!(self.code(), Some("ERR" | "WRONGTYPE"))
    }

    fn code(&self) -> Option<&str> {
        match self {
            Self::Command { source, .. } => source.0.code(),
            Self::TlsFault(_) => None,
        }
    }
}

/// The account is refused or may not run the command, or the server has none of that name.
fn is_refusal(error: &RedisError) -> bool {
    error.kind() == ErrorKind::AuthenticationFailed
        || matches!(error.code(), Some("NOAUTH" | "WRONGPASS" | "NOPERM"))
        || error.detail().is_some_and(|text| text.starts_with("unknown command"))
}

/// The result of whatever asks Redis.
pub type Result<T> = std::result::Result<T, CacheError>;

/// Says what was tried, where an error is born.
pub(crate) trait Context<T> {
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
