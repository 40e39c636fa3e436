//! Creates or upgrades the schema in steps, while daemons write.
//!
//! A statement that changes a table waits for every transaction that has read the table, and all later statements on
//! the table wait for it. So a step waits only a few seconds, pauses so that the others can run, and tries again. MySQL
//! never rolls DDL back, so an interrupted step stays partly done: the next run repeats it, and each step allows that
//! (decision 0059).

mod lock;

use std::time::Duration;

use sqlx::MySqlConnection;
use sqlx::migrate::{MigrateError as Sqlx, Migrator};
use sqlx::mysql::MySqlDatabaseError;
use tallyd_connect::whole::Whole;
use tracing::warn;

use super::schema::{HISTORY, MIGRATIONS, Schema, applied, has_table};
use super::{Context, Result, Store, StoreError};

const LOCK_WAIT_S: u64 = 30;

/// A step waits for a table at most this number of seconds. While the step waits, other statements on this table are
/// blocked.
const TABLE_WAIT_S: u64 = 2;

/// The pause before a step is retried. During this pause, statements that waited for the step can run.
const TABLE_REST: Duration = Duration::from_secs(3);

/// The maximum number of attempts for a step. All attempts together take five minutes.
const TABLE_TRIES: u32 = 60;

const LOCK_TIMEOUT: u16 = 1205;

/// MySQL's error number if an account lacks a right to the database.
const NO_DATABASE_RIGHT: u16 = 1044;

/// MySQL's error number if an account lacks a right to the table.
const NO_TABLE_RIGHT: u16 = 1142;

#[derive(Debug, thiserror::Error)]
pub enum MigrateError {
    #[error(
        "another `tallyd migrate` has held the lock for {LOCK_WAIT_S} s: wait until it ends, then run `tallyd migrate` again"
    )]
    Locked,
    #[error("{}", Schema::TooNew.problem().unwrap_or_default())]
    TooNew,
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error(
        "another session has locked one of tallyd's tables for minutes: end that session (see information_schema.innodb_trx), then run `tallyd migrate` again"
    )]
    TableBusy(#[source] Whole<Sqlx>),
    #[error(
        "this account has no right to change tables: use the account for migrations, for example tallyd --config /etc/tallyd/migrate.toml migrate after `tallyd init`"
    )]
    Denied(#[source] Whole<Sqlx>),
    #[error("create the schema")]
    Step(#[source] Whole<Sqlx>),
}

impl Store {
    /// Uses tallyd's own lock, because sqlx's lock does nothing on MariaDB. A newer schema that this version works with
    /// stays. After a failed step the completed steps stay, and the next run continues after them.
    pub async fn migrate(&self) -> std::result::Result<usize, MigrateError> {
        match self.schema().await? {
            Schema::Current | Schema::Newer(_) => return Ok(0),
            Schema::TooNew => return Err(MigrateError::TooNew),
            Schema::Behind(_) => {}
        }
        self.durability().await?;
        lock::take(self).await?;
        let made = tokio::select! {
            made = self.make() => made,
            lost = lock::renew(self) => match lost? {},
        };
        let released = lock::release(self).await;
        let steps = made?;
        released?;
        Ok(steps)
    }

    async fn make(&self) -> std::result::Result<usize, MigrateError> {
        // There is no time limit, because a step on a large table takes long. The connection is not released to the
        // pool, because its session has other settings.
        let connection = &mut self.pool.acquire().await.context("connect to MySQL")?.detach();
        sqlx::query("SET SESSION lock_wait_timeout = ?")
            .bind(TABLE_WAIT_S)
            .execute(&mut *connection)
            .await
            .context("limit how long a step blocks others")?;
        let before = applied(connection).await?.len();
        let mut migrator = Migrator::with_migrations(MIGRATIONS.iter().cloned().collect());
        migrator.set_locking(false);
        for tries in 1.. {
            forget_interrupted(connection).await?;
            match migrator.run(&mut *connection).await {
                Ok(()) => break,
                Err(error) if tries < TABLE_TRIES && number(&error) == Some(LOCK_TIMEOUT) => {}
                Err(error) => return Err(of_step(error)),
            }
            warn!(
                event = "migrate-waits",
                tries,
                "another session has locked a table: retrying in {} s",
                TABLE_REST.as_secs()
            );
            tokio::time::sleep(TABLE_REST).await;
        }
        Ok(applied(connection).await?.len() - before)
    }
}

fn of_step(error: Sqlx) -> MigrateError {
    let error = Whole(error);
    match number(&error.0) {
        Some(LOCK_TIMEOUT) => MigrateError::TableBusy(error),
        Some(NO_DATABASE_RIGHT | NO_TABLE_RIGHT) => MigrateError::Denied(error),
        _ => MigrateError::Step(error),
    }
}

/// Deletes the record of an interrupted step, so the step runs again. The lock ensures that no other `tallyd migrate`
/// is running.
async fn forget_interrupted(connection: &mut MySqlConnection) -> Result<()> {
    if !has_table(connection, HISTORY).await? {
        return Ok(());
    }
    sqlx::query("DELETE FROM _sqlx_migrations WHERE NOT success")
        .execute(connection)
        .await
        .context("delete the record of an interrupted step")?;
    Ok(())
}

fn number(error: &Sqlx) -> Option<u16> {
    let (Sqlx::Execute(error) | Sqlx::ExecuteMigration(error, _)) = error else { return None };
    Some(error.as_database_error()?.try_downcast_ref::<MySqlDatabaseError>()?.number())
}
