//! The login to a server: the server's address, the account, and the TLS settings.

use std::error::Error;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use redis::io::tcp::TcpSettings;
use redis::{
    Client, ClientTlsConfig, ErrorKind, IntoConnectionInfo, RedisConnectionInfo, RedisError, RedisResult,
    TlsCertificates,
};
use tallyd_connect::address::ServerUrl;
use tallyd_connect::tls::{self, Identity, Tls, TlsFault};

use crate::config::Redis;

pub(super) const PORT: u16 = 6_379;

pub(super) fn tls_fault(error: &RedisError) -> Option<TlsFault> {
    let inner: &Arc<dyn Error + Send + Sync> = error.source()?.downcast_ref()?;
    inner.downcast_ref::<io::Error>()?.get_ref()?.downcast_ref().cloned()
}

/// Returns settings with which a connection is closed if the server does not acknowledge sent data within the timeout.
/// Linux's default timeout is about 15 minutes.
fn tcp_settings(timeout: Duration) -> TcpSettings {
    TcpSettings::default().set_nodelay(true).set_user_timeout(timeout)
}

#[derive(Clone)]
pub(super) struct Login {
    url: ServerUrl,
    tls: Tls,
    pub timeout: Duration,
}

impl Login {
    pub(super) fn new(config: &Redis, timeout: Duration) -> Self {
        Self { url: config.url.clone(), tls: config.login.tls.clone(), timeout }
    }

    pub(super) fn at(&self, address: &str) -> RedisResult<Self> {
        let wrong = |error| RedisError::from((ErrorKind::InvalidClientConfig, "the address is invalid", error));
        Ok(Self { url: self.url.at(address).map_err(wrong)?, ..self.clone() })
    }

    pub(super) fn address(&self) -> String {
        let parts = self.url.parts().ok();
        let host = parts.as_ref().and_then(|url| url.host_str()).unwrap_or_default();
        format!("{host}:{}", parts.as_ref().and_then(url::Url::port).unwrap_or(PORT))
    }

    pub(super) fn client(&self) -> RedisResult<Client> {
        self.client_as(None)
    }

    pub(super) fn client_as(&self, account: Option<RedisConnectionInfo>) -> RedisResult<Client> {
        let info = self.url.now().expose().into_connection_info()?.set_tcp_settings(tcp_settings(self.timeout));
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

    /// If a certificate or a TLS setting caused the error, replaces this error with a message that says what is wrong.
    pub(super) fn explain(&self, error: RedisError) -> RedisError {
        let address = self.address();
        let has_certificate = self.tls.identity.is_some();
        let server = tls::Server { name: "Redis", address: &address, section: "redis", has_certificate };
        match TlsFault::of(&error, server) {
            Some(fault) => io::Error::other(fault).into(),
            None => error,
        }
    }
}
