//! How the servers are logged in to: the address of one of them, and what TLS needs.

use std::time::Duration;

use redis::{
    Client, ClientTlsConfig, ErrorKind, IntoConnectionInfo, RedisConnectionInfo, RedisError, RedisResult,
    TlsCertificates,
};
use tallyd_connect::address::ServerUrl;
use tallyd_connect::tls::{self, Identity, Tls, TlsFault};

use super::link::tcp_settings;
use crate::config::Redis;

/// Redis' port, unless an address says otherwise.
pub(super) const PORT: u16 = 6_379;

/// What is said before a [`TlsFault`].
const NO_TLS: &str = "no connection by TLS";

/// Whether it is a [`TlsFault`].
pub(super) fn is_distrust(error: &RedisError) -> bool {
    error.kind() == ErrorKind::AuthenticationFailed && error.to_string().starts_with(NO_TLS)
}

/// A server and how it is logged in to.
#[derive(Clone)]
pub(super) struct Login {
    url: ServerUrl,
    tls: Tls,
    /// How long a pipeline may take there.
    pub timeout: Duration,
}

impl Login {
    /// As the configuration says.
    pub(super) fn new(config: &Redis, timeout: Duration) -> Self {
        Self { url: config.url.clone(), tls: config.tls.clone(), timeout }
    }

    /// The same on another server, given as `host:port`.
    pub(super) fn at(&self, address: &str) -> RedisResult<Self> {
        let wrong = |error| RedisError::from((ErrorKind::InvalidClientConfig, "an address can't be used", error));
        Ok(Self { url: self.url.at(address).map_err(wrong)?, ..self.clone() })
    }

    /// `host:port`.
    pub(super) fn address(&self) -> String {
        let parts = self.url.parts().ok();
        let host = parts.as_ref().and_then(|url| url.host_str()).unwrap_or_default();
        format!("{host}:{}", parts.as_ref().and_then(url::Url::port).unwrap_or(PORT))
    }

    /// Opens nothing yet.
    pub(super) fn client(&self) -> RedisResult<Client> {
        self.client_as(None)
    }

    /// The same, for a server with another account.
    pub(super) fn client_as(&self, account: Option<RedisConnectionInfo>) -> RedisResult<Client> {
        let info = self.url.expose().into_connection_info()?.set_tcp_settings(tcp_settings(self.timeout));
        let info = match account {
            Some(account) => info.set_redis_settings(account),
            None => info,
        };
        if !self.url.parts().is_ok_and(|url| url.scheme() == "rediss") {
            return Client::open(info);
        }
        let client_tls = self.tls.identity.as_ref().map(|Identity { certificate, key }| ClientTlsConfig {
            client_cert: certificate.clone().into_bytes(),
            client_key: key.expose().as_bytes().to_vec(),
        });
        let root_cert = Some(tls::authorities(self.tls.authorities.as_deref()).into_bytes());
        Client::build_with_tls(info, TlsCertificates { client_tls, root_cert })
    }

    /// Says what is wrong with a certificate, in place of the library.
    pub(super) fn told(&self, error: RedisError) -> RedisError {
        let address = self.address();
        let has_certificate = self.tls.identity.is_some();
        let server = tls::Server { name: "Redis", address: &address, section: "redis", has_certificate };
        match TlsFault::of(&error, server) {
            Some(fault) => RedisError::from((ErrorKind::AuthenticationFailed, NO_TLS, fault.to_string())),
            None => error,
        }
    }
}
