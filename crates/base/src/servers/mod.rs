//! The three servers of a configuration, for the tasks and the commands.
//!
//! This module opens connections, and checks that the servers are ready for writes. The module does not depend on the
//! tasks.

pub mod code_registry;
pub mod control;
pub mod numbers;
pub mod pace;

use anyhow::Result;

use crate::config::{Config, ConfigError};
use control::Control;
use tallyd_mysql::Store;
use tallyd_mysql::schema::Schema;
use tallyd_rabbitmq::Broker;
use tallyd_redis::Cache;

/// Three for a reconcile, three for an archive run, one each for a filter run and a recount.
const CONNECTIONS_OF_RUNS: u32 = 3 + 3 + 1 + 1;

/// Number of connections that renew leases: one for each job.
pub const CONNECTIONS_OF_LEASES: u32 = 4;

/// One connection for the outbox, one for the snapshot clock, and one for the orders of operators.
const CONNECTIONS_OF_OTHERS: u32 = 3;

/// Number of spare connections, so that a short read never waits for a run.
const CONNECTIONS_SPARE: u32 = 2;

#[derive(Clone)]
pub struct Servers {
    pub store: Store,
    pub cache: Cache,
    pub broker: Broker,
    /// The name of this process as the owner of locks: `host:pid`.
    pub owner: String,
    pub control: Control,
}

impl Servers {
    pub fn new(config: &Config) -> Result<Self, ConfigError> {
        let connections = u32::from(config.partitions())
            + CONNECTIONS_OF_RUNS
            + CONNECTIONS_OF_LEASES
            + CONNECTIONS_OF_OTHERS
            + CONNECTIONS_SPARE;
        // The file is missing if systemd hides the file (ProcSubset=pid).
        let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_else(|_| "localhost".to_owned());
        let wrong = |error: anyhow::Error| ConfigError(vec![format!("{error:#}")]);
        Ok(Self {
            store: Store::new(&config.mysql, connections).map_err(|error| wrong(error.into()))?,
            cache: Cache::new(&config.redis, &config.metrics).map_err(|error| wrong(error.into()))?,
            broker: Broker::new(&config.amqp).map_err(|error| wrong(error.into()))?,
            owner: format!("{}:{}", host.trim(), std::process::id()),
            control: Control::default(),
        })
    }

    /// Returns the servers after [`Self::check`] has passed. If MySQL's port refuses connections, fails immediately.
    pub async fn checked(config: &Config) -> Result<Self> {
        let servers = Self::new(config)?;
        servers.clone().impatient().check(config).await?;
        Ok(servers)
    }

    /// For short commands, because a person waits. Long commands and the daemon wait longer for a MySQL that restarts.
    pub fn impatient(self) -> Self {
        Self { store: self.store.impatient(), ..self }
    }

    pub async fn check(&self, config: &Config) -> Result<()> {
        self.check_schema().await?;
        code_registry::compare(&self.store, config).await.map(drop)
    }

    pub async fn check_schema(&self) -> Result<Schema> {
        let schema = self.store.schema().await?;
        schema.problem().map_or(Ok(schema), |problem| Err(ConfigError(vec![problem]).into()))
    }
}
