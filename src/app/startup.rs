//! Checks that must pass before tasks are started.

use std::time::Duration;

use anyhow::Result;
use tracing::{info, warn};

use tallyd_base::config::{Config, ConfigError, ConfigHandle};
use tallyd_base::partitions;
use tallyd_base::runtime::retry::Outage;
use tallyd_base::runtime::systemd;
use tallyd_base::servers::Servers;
use tallyd_base::servers::code_registry::{self, Change};
use tallyd_connect::fate::Fate;
use tallyd_mysql::StoreError;
use tallyd_mysql::schema::Schema;

/// systemd aborts a start that takes minutes.
const REDIS_LOOK_MAX: Duration = Duration::from_secs(5);

/// Waits for MySQL, because codes must have the same meaning there and in the configuration before tasks write. An
/// unreachable Redis is no failure.
///
/// # Errors
/// The schema is wrong, a code would change its meaning, or `[redis] cluster` does not match the server.
pub(super) async fn servers_are_ready(servers: &Servers, live: &ConfigHandle) -> Result<()> {
    // First, because a daemon with wrong settings must not note anything in MySQL.
    look_at_redis(servers).await?;
    let Err(error) = look_at_mysql(servers, &live.current()).await else { return Ok(()) };
    if never_passes(&error) {
        return Err(error);
    }
    warn!(event = "mysql-away", error = format!("{error:#}"), "MySQL is unreachable, starting anyway: {error:#}");
    systemd::ready();
    systemd::status("waiting for MySQL");
    let mut outage = Outage::new("reading the meaning of codes from MySQL");
    loop {
        match look_at_mysql(servers, &live.current()).await {
            Err(error) if never_passes(&error) => return Err(error),
            Err(error) => tokio::time::sleep(outage.failed(&format!("{error:#}"))).await,
            Ok(()) => {
                outage.over();
                return Ok(());
            }
        }
    }
}

/// A person must correct the configuration or the server.
fn never_passes(error: &anyhow::Error) -> bool {
    let is_refused = |cause: &StoreError| cause.fate() == Fate::Misconfigured;
    error.is::<ConfigError>() || error.chain().any(|cause| cause.downcast_ref().is_some_and(is_refused))
}

async fn look_at_mysql(servers: &Servers, config: &Config) -> Result<()> {
    look_at_schema(servers).await?;
    let (version, warnings) = servers.store.durability().await?;
    partitions::check_maps(config, &servers.store, &servers.broker).await?;
    let changes = code_registry::agree(&servers.store, config).await?;
    let also = servers.cache.also(&config.redis, &config.metrics)?.map(|also| also.keys.layout().full_name());
    servers.store.note_daemon_layouts(&servers.cache.keys.layout().full_name(), also.as_deref()).await?;
    log_changes(&changes);
    info!(event = "mysql", version, "MySQL is {version}");
    for warning in warnings {
        warn!(event = "mysql-not-durable", "{warning}");
    }
    Ok(())
}

async fn look_at_schema(servers: &Servers) -> Result<()> {
    if let Schema::Newer(steps) = servers.check_schema().await? {
        info!(
            event = "schema-newer",
            steps, "a newer tallyd has applied {steps} more schema steps: this version can work with them"
        );
    }
    Ok(())
}

pub(super) fn log_changes(changes: &[Change]) {
    if !changes.is_empty() {
        let changes: Vec<String> = changes.iter().map(Change::to_string).collect();
        let changes = changes.join(", ");
        info!(event = "names-noted", changes, "noted in MySQL: {changes}");
    }
}

async fn look_at_redis(servers: &Servers) -> Result<()> {
    match tokio::time::timeout(REDIS_LOOK_MAX, servers.cache.ping()).await {
        Ok(Err(error)) if error.fate() == Fate::Misconfigured => Err(error.into()),
        _ => Ok(()),
    }
}
