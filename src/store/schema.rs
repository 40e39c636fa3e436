//! The schema: made by `tallyd migrate`, checked by whatever else starts. The daemon's own account needs no DDL rights.

use sqlx::migrate::{Migrate, Migrator};
use sqlx::{MySqlConnection, Row};

use super::{Lent, Result, Store, StoreError, Tried};

pub(super) static MIGRATIONS: Migrator = sqlx::migrate!("./migrations");

/// Seconds to wait for another `tallyd migrate`.
const LOCK_WAIT_S: i64 = 30;

/// What `tallyd migrate` did, or what a start found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Schema {
    /// As this version needs it.
    Current,
    /// So many steps are missing: `tallyd migrate` makes them.
    Behind(usize),
    /// Made by a newer version.
    Ahead,
}

/// Why the schema could not be made.
#[derive(Debug, thiserror::Error)]
pub enum MigrateError {
    /// Another `tallyd migrate` is at it.
    #[error("another `tallyd migrate` has held the lock for {LOCK_WAIT_S} s")]
    Locked,
    /// MySQL can't be asked.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// A step failed.
    #[error("make the schema")]
    Step(#[from] sqlx::migrate::MigrateError),
}

impl Store {
    /// Brings the schema up to this version, under a lock of ours (sqlx's own does nothing on MariaDB). Returns how
    /// many steps were made.
    ///
    /// # Errors
    /// The lock is held, MySQL is away, or a step failed; the steps before it stay and the next run goes on.
    pub async fn migrate(&self) -> std::result::Result<usize, MigrateError> {
        let mut lent = self.lend().await?;
        // Steps may take as long as the table is large: no time limit here.
        let connection: &mut MySqlConnection = &mut lent.connection;
        let locked: Option<i64> = sqlx::query_scalar("SELECT GET_LOCK('tallyd-migrate', ?)")
            .bind(LOCK_WAIT_S)
            .fetch_one(&mut *connection)
            .await
            .tried("lock the schema")?;
        if locked != Some(1) {
            return Err(MigrateError::Locked);
        }
        let before = applied(connection).await?.len();
        let mut migrator = Migrator::with_migrations(MIGRATIONS.iter().cloned().collect());
        migrator.set_locking(false);
        migrator.run(&mut *connection).await?;
        let after = applied(connection).await?.len();
        sqlx::query("DO RELEASE_LOCK('tallyd-migrate')").execute(connection).await.tried("unlock the schema")?;
        Ok(after - before)
    }

    /// Compares the schema with what this version needs.
    ///
    /// # Errors
    /// MySQL is away.
    pub async fn schema(&self) -> Result<Schema> {
        let mut lent = self.lend().await?;
        let applied = lent.limit("read the schema's version", applied).await?;
        let missing = MIGRATIONS.iter().filter(|step| !applied.contains(&step.version)).count();
        Ok(match missing {
            0 if applied.iter().all(|version| MIGRATIONS.version_exists(*version)) => Schema::Current,
            0 => Schema::Ahead,
            missing => Schema::Behind(missing),
        })
    }

    /// The server's version, and what about its settings could lose what it has acknowledged: one sentence each.
    ///
    /// # Errors
    /// MySQL is away.
    pub async fn durability(&self) -> Result<(String, Vec<String>)> {
        let mut lent: Lent = self.lend().await?;
        let row = lent
            .limit("read the server's settings", |connection| async move {
                sqlx::query("SELECT VERSION(), @@innodb_flush_log_at_trx_commit, @@log_bin, @@sync_binlog")
                    .fetch_one(connection)
                    .await
                    .tried("read the server's settings")
            })
            .await?;
        let number = |index: usize| row.try_get_unchecked::<i64, _>(index).tried("read the server's settings");
        let mut warnings = Vec::new();
        if number(1)? != 1 {
            warnings.push("innodb_flush_log_at_trx_commit is not 1: a crash of the host loses commits".to_owned());
        }
        if number(2)? != 0 && number(3)? != 1 {
            warnings.push("sync_binlog is not 1: a crash of the host loses commits for the replicas".to_owned());
        }
        Ok((row.try_get_unchecked(0).tried("read the server's settings")?, warnings))
    }
}

/// The versions of the steps that are done. None where `tallyd migrate` never ran.
async fn applied(connection: &mut MySqlConnection) -> Result<Vec<i64>> {
    let exists: i64 = sqlx::query_scalar(
        "SELECT COUNT(*) FROM information_schema.tables WHERE table_schema = DATABASE() AND table_name = '_sqlx_migrations'",
    )
    .fetch_one(&mut *connection)
    .await
    .tried("look for the schema")?;
    if exists == 0 {
        return Ok(Vec::new());
    }
    let done = connection.list_applied_migrations("_sqlx_migrations").await;
    Ok(done
        .map_err(|error| StoreError::Sql {
            action: "read the schema's version",
            source: sqlx::Error::Migrate(Box::new(error)),
        })?
        .into_iter()
        .map(|step| step.version)
        .collect())
}
