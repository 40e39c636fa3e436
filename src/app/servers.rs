//! What the tasks and the commands stand on, and one run of each job under its lock.

use std::time::Duration;

use tokio_util::sync::CancellationToken;

use crate::broker::Broker;
use crate::cache::Cache;
use crate::code_registry;
use crate::config::{Config, ConfigError, Recount};
use crate::jobs::archive::{self, Archiver, Scope};
use crate::jobs::fence;
use crate::jobs::filters::{self, Filters};
use crate::jobs::reconcile::{self, Reconciler, RunOptions};
use crate::jobs::recount::{self, Recounter};
use crate::jobs::runner::{self, Job, Ran};
use crate::jobs::snapshots::{self, Restore, Snapshots};
use crate::runtime::progress::ProgressSink;
use crate::store::Store;
use crate::store::schema::Schema;
use anyhow::Result;

/// How long runs of jobs are kept that come every minute.
const OFTEN_KEEP: Duration = Duration::from_secs(7 * 86_400);

/// Connections to MySQL beside one per partition: two for a reconcile, two for an archive, one for filters, one for a recount, one for the
/// lease of each, one for the clock of snapshots, one for the outbox, and spare ones.
const CONNECTIONS_FOR_JOBS: u32 = 14;

/// What the tasks stand on. Nothing is connected before it is used.
#[derive(Clone)]
pub struct Servers {
    /// MySQL.
    pub store: Store,
    /// Redis.
    pub cache: Cache,
    /// RabbitMQ.
    pub broker: Broker,
    /// This process, for whoever finds a lock held by it: `host:pid`.
    pub owner: String,
}

impl Servers {
    /// As the configuration names them.
    ///
    /// # Errors
    /// An address or a certificate can't be used.
    pub fn new(config: &Config) -> Result<Self, ConfigError> {
        let connections = u32::from(config.amqp.partitions) + CONNECTIONS_FOR_JOBS;
        // Not there where systemd hides it (ProcSubset=pid).
        let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_else(|_| "localhost".to_owned());
        let wrong = |error: anyhow::Error| ConfigError(vec![format!("{error:#}")]);
        Ok(Self {
            store: Store::new(&config.mysql, connections).map_err(|error| wrong(error.into()))?,
            cache: Cache::new(&config.redis, &config.metrics).map_err(|error| wrong(error.into()))?,
            broker: Broker::new(&config.amqp).map_err(wrong)?,
            owner: format!("{}:{}", host.trim(), std::process::id()),
        })
    }

    /// One reconcile, under the job's lock, shown to whoever it is.
    ///
    /// # Errors
    /// The run's.
    pub async fn reconcile(
        &self,
        config: &Config,
        options: &RunOptions,
        to: ProgressSink,
        stop: &CancellationToken,
    ) -> Result<Ran<reconcile::report::Report>> {
        fence::knows_all(&self.store, &self.broker).await?;
        let cache = self.cache.named(&config.metrics);
        let reconciler = Reconciler::new(config, self.store.clone(), cache, self.broker.clone())?;
        let job = Job {
            name: reconcile::JOB,
            mode: options.mode.name(),
            owner: &self.owner,
            keep: config.reconcile.repair_keep.0,
        };
        runner::run_once(&self.store, job, |run| async move { reconciler.run(run, options, to, stop).await }).await
    }

    /// One archive, under the job's lock.
    ///
    /// # Errors
    /// The run's.
    pub async fn archive(
        &self,
        config: &Config,
        scope: &Scope,
        to: ProgressSink,
        stop: &CancellationToken,
    ) -> Result<Ran<archive::Report>> {
        let archiver = Archiver::new(config, self.store.clone(), self.cache.clone());
        let job =
            Job { name: archive::JOB, mode: scope.mode(), owner: &self.owner, keep: config.reconcile.repair_keep.0 };
        runner::run_once(&self.store, job, |run| async move { archiver.run_now(run, scope, to, stop).await }).await
    }

    /// Snapshots of boards, under the same lock: of those in `scope`, or of all that are due.
    ///
    /// # Errors
    /// The run's.
    pub async fn snapshot(
        &self,
        config: &Config,
        scope: Option<&Scope>,
        force: bool,
        to: ProgressSink,
        stop: &CancellationToken,
    ) -> Result<Ran<archive::Report>> {
        let snapshots = Snapshots::new(config, self.store.clone(), self.cache.clone());
        let job = Job { name: archive::JOB, mode: snapshots::SNAPSHOT_MODE, owner: &self.owner, keep: OFTEN_KEEP };
        let work = |run| async move { snapshots.save_now(run, scope, force, to, stop).await };
        runner::run_once(&self.store, job, work).await
    }

    /// One period of a board is put back into Redis, under the same lock.
    ///
    /// # Errors
    /// The run's.
    pub async fn restore(
        &self,
        config: &Config,
        board: (&str, &str),
        how: Restore,
        to: ProgressSink,
        stop: &CancellationToken,
    ) -> Result<Ran<archive::Report>> {
        let snapshots = Snapshots::new(config, self.store.clone(), self.cache.clone());
        let job = Job {
            name: archive::JOB,
            mode: snapshots::RESTORE_MODE,
            owner: &self.owner,
            keep: config.reconcile.repair_keep.0,
        };
        let (now, _) = self.store.clock().await?;
        let work = |run| async move { snapshots.restore(run, board, how, now, to, stop).await };
        runner::run_once(&self.store, job, work).await
    }

    /// Bloom filters built and kept up, under the job's lock.
    ///
    /// # Errors
    /// The run's.
    pub async fn filters(&self, config: &Config, stop: &CancellationToken) -> Result<Ran<filters::report::Report>> {
        fence::knows_all(&self.store, &self.broker).await?;
        let cache = self.cache.named(&config.metrics);
        let filters = Filters::new(config, self.store.clone(), cache, self.broker.clone());
        let job = Job { name: filters::JOB, mode: filters::MODE, owner: &self.owner, keep: OFTEN_KEEP };
        runner::run_once(&self.store, job, |run| async move { filters.run(run, stop).await }).await
    }

    /// One `[[recount]]`, under the job's lock.
    ///
    /// # Errors
    /// The run's.
    pub async fn recount(
        &self,
        config: &Config,
        recount: &Recount,
        options: recount::RunOptions,
        to: ProgressSink,
        stop: &CancellationToken,
    ) -> Result<Ran<recount::report::Report>> {
        fence::knows_all(&self.store, &self.broker).await?;
        let recounter = Recounter::new(config, recount, self.store.clone(), self.broker.clone())?;
        let mode = recount.name();
        let job = Job { name: recount::JOB, mode: &mode, owner: &self.owner, keep: config.reconcile.repair_keep.0 };
        runner::run_once(&self.store, job, |run| async move { recounter.run(run, options, to, stop).await }).await
    }

    /// Whether MySQL has the schema that this version needs, and calls codes what `[kinds]` and `[metrics]` call them.
    ///
    /// # Errors
    /// [`ConfigError`] when it hasn't; MySQL's.
    pub async fn check(&self, config: &Config) -> Result<()> {
        self.check_schema().await?;
        code_registry::compare(&self.store, config).await.map(drop)
    }

    /// Whether MySQL has a schema that this version can work with.
    ///
    /// # Errors
    /// [`ConfigError`] when it hasn't; MySQL's.
    pub async fn check_schema(&self) -> Result<Schema> {
        let schema = self.store.schema().await?;
        schema.problem().map_or(Ok(schema), |problem| Err(ConfigError(vec![problem]).into()))
    }
}
