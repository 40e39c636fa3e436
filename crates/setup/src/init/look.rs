//! Checks the servers with the probes of `tallyd config check`, which change nothing. If an administrator's login is
//! given, the probes use it. Otherwise the probes use the daemon's account, which might not exist yet. A server that
//! refuses the login counts as reachable.

use anyhow::{Error, Result};

use super::ask::Addresses;
use super::plan::{Facts, Server, topology};
use crate::check;
use tallyd_base::cli::check::{Check, Status, What};
use tallyd_base::cli::fate_of;
use tallyd_base::config::{Config, Mysql, ServerUrl, ssl_mode};
use tallyd_base::servers::Servers;
use tallyd_connect::fate::Fate;
use tallyd_core::model::Kind;
use tallyd_mysql::{Store, StoreError};
use tallyd_rabbitmq::Broker;
use tallyd_redis::Cache;
use tallyd_redis::topology::Topology;

/// The checks that need no accounts, tables or queues, because `tallyd init` runs before these exist.
const SHOWN: [What; 10] = [
    What::MysqlVersion,
    What::MysqlWritable,
    What::MysqlDurability,
    What::MysqlPacket,
    What::MysqlClock,
    What::RedisVersion,
    What::RedisEviction,
    What::RedisPersistence,
    What::RedisClock,
    What::RedisListpack,
];

pub(super) struct Look {
    pub daemon: Config,
    admin: Config,
    sees_tables: bool,
    /// True if the check of the current server uses an administrator's account. In this case, a refused login is an
    /// error.
    is_admin: bool,
    pub facts: Facts,
}

impl Look {
    pub(super) fn new(daemon: Config) -> Self {
        Self { admin: daemon.clone(), daemon, sees_tables: false, is_admin: false, facts: Facts::default() }
    }

    pub(super) async fn at(&mut self, server: Server, addresses: Addresses) -> Result<()> {
        let Addresses { daemon, admin } = addresses;
        self.is_admin = admin.is_some();
        if server == Server::Mysql {
            self.sees_tables = self.is_admin;
        }
        *server.url_mut(&mut self.admin) = admin.unwrap_or_else(|| daemon.clone());
        *server.url_mut(&mut self.daemon) = daemon;
        match server {
            Server::Rabbitmq => self.rabbitmq().await,
            Server::Mysql => self.mysql().await,
            Server::Redis => self.redis().await,
        }
    }

    pub(super) fn trust(&mut self, server: Server, file: &str, authorities: &str) {
        for config in [&mut self.daemon, &mut self.admin] {
            let (name, tls) = match server {
                Server::Rabbitmq => (&mut config.amqp.login.tls_ca_file, &mut config.amqp.login.tls),
                Server::Mysql => (&mut config.mysql.login.tls_ca_file, &mut config.mysql.login.tls),
                Server::Redis => (&mut config.redis.login.tls_ca_file, &mut config.redis.login.tls),
            };
            *name = Some(file.to_owned());
            tls.authorities = Some(authorities.to_owned());
        }
    }

    async fn rabbitmq(&mut self) -> Result<()> {
        let broker = Broker::new(&self.admin.amqp)?;
        if let Some(link) = self.unless_refused(broker.connect("init").await)? {
            drop(link);
            self.facts.plugin = broker.probe_plugin().await.ok();
        }
        self.facts.rabbitmq = broker.version().await;
        Ok(())
    }

    async fn mysql(&mut self) -> Result<()> {
        let mut store = Store::new(&self.admin.mysql, 1)?;
        let mut settings = self.unless_refused(store.settings().await);
        if settings.as_ref().is_err_and(is_nameless) && self.admin.mysql.login.tls.authorities.is_some() {
            // A certificate that MySQL generated has no host name.
            let urls = (by_authority(&self.daemon.mysql.url), by_authority(&self.admin.mysql.url));
            if let (Some(daemon), Some(admin)) = urls {
                let mysql = Mysql { url: admin, ..self.admin.mysql.clone() };
                store = Store::new(&mysql, 1)?;
                let again = self.unless_refused(store.settings().await);
                if again.is_ok() {
                    (settings, self.admin.mysql, self.daemon.mysql.url) = (again, mysql, daemon);
                }
            }
        }
        if let Some(settings) = settings? {
            self.facts.mysql = Some(settings.version);
            self.facts.mysql_tls = store.tls_version().await.ok().flatten();
        }
        store.close().await;
        Ok(())
    }

    async fn redis(&mut self) -> Result<()> {
        let Some(found) = self.unless_refused(Topology::find(&self.admin.redis).await)? else { return Ok(()) };
        topology(&mut self.daemon, &found).map_err(Error::msg)?;
        topology(&mut self.admin, &found).map_err(Error::msg)?;
        self.facts.topology = found;
        let cache = Cache::new(&self.admin.redis, &self.admin.metrics)?;
        if self.unless_refused(cache.ping().await)?.is_some() {
            self.facts.redis = cache.versions().await.ok().map(|versions| versions.join(", "));
        }
        Ok(())
    }

    /// Returns `None` if the server refuses the daemon's account, because this account might not exist yet.
    fn unless_refused<T, E: Into<Error>>(&self, asked: Result<T, E>) -> Result<Option<T>> {
        match asked.map_err(Into::into) {
            Ok(answer) => Ok(Some(answer)),
            Err(error) if fate(&error) != Some(Fate::Refused) => Err(error),
            Err(error) if self.is_admin => Err(error.context("the server refused the administrator's login")),
            Err(_) => Ok(None),
        }
    }

    pub(super) async fn warnings(&self) -> Result<Vec<Check>> {
        let servers = Servers::new(&self.admin)?;
        let checks = check::ask_servers(&self.admin, &servers).await.into_iter();
        Ok(checks.filter(|check| check.status != Status::Ok && SHOWN.contains(&check.what)).collect())
    }

    /// Reads MySQL's estimate of the number of targets for each of the kinds 1 to `kinds`, and returns the largest
    /// estimate. Returns `None` if the table does not exist or the account can't read it.
    pub(super) async fn targets(&self, kinds: usize) -> Option<u64> {
        let mut mysql = self.admin.mysql.clone();
        let mut url = mysql.url.parts().ok().filter(|_| self.sees_tables)?;
        url.set_path(self.daemon.mysql.url.parts().ok()?.path());
        mysql.url = url.as_str().into();
        let store = Store::new(&mysql, 1).ok()?;
        let mut most = None;
        for code in (1..=u8::MAX).take(kinds) {
            most = most.max(store.estimate_targets(Kind(code)).await.ok().flatten());
        }
        store.close().await;
        most.filter(|targets| *targets > 0)
    }
}

/// Adds to the address an ssl-mode with which the client verifies the certificate's authority, but not the
/// certificate's name. Returns `None` if the address already has an ssl-mode.
fn by_authority(url: &ServerUrl) -> Option<ServerUrl> {
    if ssl_mode(url).is_some() {
        return None;
    }
    let mut url = url.parts().ok()?;
    url.query_pairs_mut().append_pair("ssl-mode", "VERIFY_CA");
    Some(url.as_str().into())
}

/// Returns true if the certificate contains no host name. A certificate with a wrong name can belong to another server,
/// which must not get the password.
fn is_nameless(error: &Error) -> bool {
    let is_nameless = |cause: &(dyn std::error::Error + 'static)| matches!(cause.downcast_ref(), Some(StoreError::TlsFault(fault)) if fault.is_nameless());
    error.chain().any(is_nameless)
}

pub(super) fn is_untrusted(error: &Error) -> bool {
    fate(error) == Some(Fate::Untrusted)
}

fn fate(error: &Error) -> Option<Fate> {
    error.chain().find_map(fate_of)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_that_has_a_mode_for_tls_keeps_it() {
        let of = |url: &str| by_authority(&ServerUrl::from(url)).map(|url| url.expose().to_owned());
        assert_eq!(of("mysql://u@h/t").as_deref(), Some("mysql://u@h/t?ssl-mode=VERIFY_CA"));
        for mode in ["ssl-mode=VERIFY_IDENTITY", "sslmode=verify_identity"] {
            assert_eq!(of(&format!("mysql://u@h/t?{mode}")), None);
        }
    }
}
