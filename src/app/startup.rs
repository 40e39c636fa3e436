//! What must be right before tasks are started.

use std::time::Duration;

use anyhow::Result;
use tracing::{info, warn};

use crate::config::{Config, ConfigError, ConfigHandle};
use crate::partitions;
use crate::runtime::retry::Outage;
use crate::runtime::systemd;
use crate::servers::Servers;
use crate::servers::code_registry::{self, Change};
use tallyd_connect::fate::Fate;
use tallyd_mysql::schema::Schema;

/// How long the start waits for Redis: systemd gives up on one that takes minutes.
const REDIS_LOOK_MAX: Duration = Duration::from_secs(5);

/// Looks at MySQL and Redis. One that is away doesn't end the start, but MySQL is waited for: nothing that writes is started before it
/// is known that codes mean in it what they mean here.
///
/// # Errors
/// A schema that is wrong, a code that would change its meaning, a Cluster that is configured as one server, or the other way round.
pub(super) async fn servers_are_ready(servers: &Servers, live: &ConfigHandle) -> Result<()> {
    look_at_redis(servers).await?;
    let Err(error) = look_at_mysql(servers, &live.current()).await else { return Ok(()) };
    if error.is::<ConfigError>() {
        return Err(error);
    }
    warn!(event = "mysql-away", error = format!("{error:#}"), "MySQL is away, starting all the same: {error:#}");
    systemd::ready();
    systemd::status("waiting for MySQL");
    let mut outage = Outage::new("asking MySQL what its codes mean");
    loop {
        match look_at_mysql(servers, &live.current()).await {
            Err(error) if error.is::<ConfigError>() => return Err(error),
            Err(error) => tokio::time::sleep(outage.failed(&format!("{error:#}"))).await,
            Ok(()) => {
                outage.over();
                return Ok(());
            }
        }
    }
}

async fn look_at_mysql(servers: &Servers, config: &Config) -> Result<()> {
    look_at_schema(servers).await?;
    partitions::check_maps(config, &servers.store, &servers.broker).await?;
    let changes = code_registry::agree(&servers.store, config).await?;
    let also = servers.cache.also(&config.redis, &config.metrics)?.map(|also| also.keys.layout().full_name());
    servers.store.note_daemon_layouts(&servers.cache.keys.layout().full_name(), also.as_deref()).await?;
    tell(&changes);
    let (version, warnings) = servers.store.durability().await?;
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
            steps, "a newer tallyd has made {steps} steps of the schema more: this version can work with them"
        );
    }
    Ok(())
}

pub(super) fn tell(changes: &[Change]) {
    if !changes.is_empty() {
        let changes: Vec<String> = changes.iter().map(Change::to_string).collect();
        let changes = changes.join(", ");
        info!(event = "names-noted", changes, "noted in MySQL: {changes}");
    }
}

/// A Cluster that is configured as one server, or the other way round, ends the start; a Redis that is away doesn't.
async fn look_at_redis(servers: &Servers) -> Result<()> {
    match tokio::time::timeout(REDIS_LOOK_MAX, servers.cache.ping()).await {
        Ok(Err(error)) if error.fate() == Fate::Misconfigured => Err(error.into()),
        _ => Ok(()),
    }
}
