//! Makes the schema, step by step, under daemons that write all the while.
//!
//! A statement that changes a table waits for every transaction that has read it, and whoever comes later waits behind it. So it waits for
//! seconds only, lets those behind it through, and tries again. Each step may run again, as a whole: of one that was interrupted MySQL keeps what
//! was done (no DDL is ever rolled back), and the next run does it once more.

use std::time::Duration;

use sqlx::MySqlConnection;
use sqlx::migrate::{MigrateError as Sqlx, Migrator};
use sqlx::mysql::MySqlDatabaseError;
use tallyd_connect::whole::Whole;
use tracing::warn;

use super::schema::{HISTORY, MIGRATIONS, Schema, applied, has_table};
use super::{Context, Result, Store, StoreError};

/// Seconds to wait for another `tallyd migrate`.
const LOCK_WAIT_S: i64 = 30;

/// Seconds that a step may wait for a table, and keep everybody else from it.
const TABLE_WAIT_S: u64 = 2;

/// How long those who waited behind a step have before it is tried again.
const TABLE_REST: Duration = Duration::from_secs(3);

/// How often a step is tried: five minutes in all.
const TABLE_TRIES: u32 = 60;

/// A lock was not had in time.
const LOCK_TIMEOUT: u16 = 1205;

/// The account has no right to the database.
const NO_DATABASE_RIGHT: u16 = 1044;

/// It has no right to the table.
const NO_TABLE_RIGHT: u16 = 1142;

/// Why the schema could not be made.
#[derive(Debug, thiserror::Error)]
pub enum MigrateError {
    /// Another `tallyd migrate` is at it.
    #[error("another `tallyd migrate` has held the lock for {LOCK_WAIT_S} s")]
    Locked,
    /// A newer version has made it.
    #[error("{}", Schema::TooNew.problem().unwrap_or_default())]
    TooNew,
    /// MySQL can't be asked.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// A transaction of somebody else's has kept a table for minutes.
    #[error(
        "another session has kept a table of tallyd's for minutes: end it (information_schema.innodb_trx has it), then run `tallyd migrate` again"
    )]
    TableBusy(#[source] Whole<Sqlx>),
    /// The account is not the one for migrations.
    #[error(
        "this account may not change tables: use the one for migrations, for instance tallyd --config /etc/tallyd/migrate.toml migrate after `tallyd init`"
    )]
    Denied(#[source] Whole<Sqlx>),
    /// A step failed.
    #[error("make the schema")]
    Step(#[source] Whole<Sqlx>),
}

impl Store {
    /// Brings the schema up to this version, under a lock of ours (sqlx's own does nothing on MariaDB). Returns how
    /// many steps were made. One of a newer version, which this one can live with, is left as it is.
    ///
    /// # Errors
    /// The lock is held, a newer version has made the schema, MySQL is away, or a step failed; the steps before it stay and the next run goes on.
    pub async fn migrate(&self) -> std::result::Result<usize, MigrateError> {
        match self.schema().await? {
            Schema::Newer(_) => return Ok(0),
            Schema::TooNew => return Err(MigrateError::TooNew),
            Schema::Current | Schema::Behind(_) => {}
        }
        // Steps may take as long as the table is large: no time limit here. The session is not given back: its settings are its own.
        let connection = &mut self.pool.acquire().await.context("connect to MySQL")?.detach();
        lock(connection).await?;
        let before = applied(connection).await?.len();
        make(connection).await?;
        let after = applied(connection).await?.len();
        sqlx::query("DO RELEASE_LOCK('tallyd-migrate')").execute(connection).await.context("unlock the schema")?;
        Ok(after - before)
    }
}

async fn lock(connection: &mut MySqlConnection) -> std::result::Result<(), MigrateError> {
    let locked: Option<i64> = sqlx::query_scalar("SELECT GET_LOCK('tallyd-migrate', ?)")
        .bind(LOCK_WAIT_S)
        .fetch_one(&mut *connection)
        .await
        .context("lock the schema")?;
    if locked != Some(1) {
        return Err(MigrateError::Locked);
    }
    sqlx::query("SET SESSION lock_wait_timeout = ?")
        .bind(TABLE_WAIT_S)
        .execute(connection)
        .await
        .context("limit how long a step keeps others waiting")?;
    Ok(())
}

async fn make(connection: &mut MySqlConnection) -> std::result::Result<(), MigrateError> {
    let mut migrator = Migrator::with_migrations(MIGRATIONS.iter().cloned().collect());
    migrator.set_locking(false);
    for tries in 1.. {
        forget_interrupted(connection).await?;
        match migrator.run(&mut *connection).await {
            Ok(()) => break,
            Err(error) => match number(&error) {
                Some(LOCK_TIMEOUT) if tries < TABLE_TRIES => {}
                Some(LOCK_TIMEOUT) => return Err(MigrateError::TableBusy(Whole(error))),
                Some(NO_DATABASE_RIGHT | NO_TABLE_RIGHT) => return Err(MigrateError::Denied(Whole(error))),
                _ => return Err(MigrateError::Step(Whole(error))),
            },
        }
        warn!(
            event = "migrate-waits",
            tries,
            "another session keeps a table: trying again in {} s",
            TABLE_REST.as_secs()
        );
        tokio::time::sleep(TABLE_REST).await;
    }
    Ok(())
}

/// Nobody else is at it, and steps may run again.
async fn forget_interrupted(connection: &mut MySqlConnection) -> Result<()> {
    if !has_table(connection, HISTORY).await? {
        return Ok(());
    }
    sqlx::query("DELETE FROM _sqlx_migrations WHERE NOT success")
        .execute(connection)
        .await
        .context("forget a step that was interrupted")?;
    Ok(())
}

/// MySQL's number of what stopped a step.
fn number(error: &Sqlx) -> Option<u16> {
    let (Sqlx::Execute(error) | Sqlx::ExecuteMigration(error, _)) = error else { return None };
    Some(error.as_database_error()?.try_downcast_ref::<MySqlDatabaseError>()?.number())
}
