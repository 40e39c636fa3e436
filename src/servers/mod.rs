//! The three servers as one configuration names them: what the tasks and the commands work with.
//!
//! It opens connections and asks what must be right before anybody writes. It knows of no task.

pub(crate) mod code_registry;
pub(crate) mod control;
pub(crate) mod numbers;
pub mod pace;

use anyhow::Result;

use crate::config::{Config, ConfigError};
use control::Control;
use tallyd_core::job_name::JobName;
use tallyd_mysql::Store;
use tallyd_mysql::schema::Schema;
use tallyd_rabbitmq::Broker;
use tallyd_redis::Cache;

/// Connections to MySQL that the runs of jobs use at once: two of a reconcile, two of an archive, one of the filters, one of a recount.
const CONNECTIONS_OF_RUNS: u32 = 2 + 2 + 1 + 1;

/// Connections that renew leases: one for each job.
const CONNECTIONS_OF_LEASES: u32 = JobName::ALL.len() as u32;

/// One connection of the outbox, one of the clock of snapshots, one that reads what is paused.
const CONNECTIONS_OF_OTHERS: u32 = 3;

/// Connections that are spare, so that a short read never waits for a run.
const CONNECTIONS_SPARE: u32 = 2;

/// What the tasks work with. Nothing is connected before it is used.
#[derive(Clone)]
pub struct Servers {
    pub store: Store,
    pub cache: Cache,
    pub broker: Broker,
    /// This process, for those who find a lock held by it: `host:pid`.
    pub owner: String,
    /// The orders of operators.
    pub(crate) control: Control,
}

impl Servers {
    /// The servers that the configuration names.
    pub fn new(config: &Config) -> Result<Self, ConfigError> {
        let connections = u32::from(config.partitions())
            + CONNECTIONS_OF_RUNS
            + CONNECTIONS_OF_LEASES
            + CONNECTIONS_OF_OTHERS
            + CONNECTIONS_SPARE;
        // Not there where systemd hides it (ProcSubset=pid).
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

    /// The servers, once MySQL is as [`Self::check`] wants it.
    pub async fn checked(config: &Config) -> Result<Self> {
        let servers = Self::new(config)?;
        servers.check(config).await?;
        Ok(servers)
    }

    /// Checks that MySQL has the schema that this version needs, and calls codes what `[kinds]` and `[metrics]` call them.
    pub async fn check(&self, config: &Config) -> Result<()> {
        self.check_schema().await?;
        code_registry::compare(&self.store, config).await.map(drop)
    }

    /// Checks that MySQL has a schema that this version can work with.
    pub async fn check_schema(&self) -> Result<Schema> {
        let schema = self.store.schema().await?;
        schema.problem().map_or(Ok(schema), |problem| Err(ConfigError(vec![problem]).into()))
    }
}
