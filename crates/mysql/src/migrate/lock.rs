//! The lock of `tallyd migrate`: a lease in a table of its own, which exists before the first step. Some clusters forbid
//! `GET_LOCK`, and others do not share such a lock between their nodes.
//!
//! A step can take hours, so another connection renews the lease meanwhile. A process that freezes can lose the lease
//! within a step. Then both processes can change a table at the same time. This is harmless, because each step allows a
//! repetition, and MySQL runs only one statement at a time that changes a table.

use std::convert::Infallible;
use std::time::Duration;

use super::super::jobs::{LEASE_MAX, TOKEN};
use super::super::schema::has_table;
use super::super::{Context, Result, Store, StoreError};
use super::{LOCK_WAIT_S, MigrateError};

/// A lease ends after this number of seconds unless its owner renews it. If a `tallyd migrate` was killed, the next one
/// waits for longer than this.
const LEASE_S: u64 = 20;

const RENEWED_EVERY: Duration = Duration::from_secs(5);

const LOCK_PAUSE: Duration = Duration::from_millis(500);

pub(super) async fn take(store: &Store) -> std::result::Result<(), MigrateError> {
    create(store).await?;
    let wait = async {
        while !try_take(store).await? {
            tokio::time::sleep(LOCK_PAUSE).await;
        }
        Ok(())
    };
    tokio::time::timeout(Duration::from_secs(LOCK_WAIT_S), wait).await.unwrap_or(Err(MigrateError::Locked))
}

async fn create(store: &Store) -> std::result::Result<(), MigrateError> {
    const SQL: &str = "CREATE TABLE IF NOT EXISTS migrate_lock ( \
        one         TINYINT UNSIGNED NOT NULL COMMENT 'always 1: there is one row', \
        owner       VARCHAR(255)     NOT NULL COMMENT 'account and host', \
        token       BIGINT UNSIGNED  NOT NULL COMMENT 'of the process', \
        lease_until DATETIME(6)      NOT NULL, \
        PRIMARY KEY (one)) ENGINE = InnoDB DEFAULT CHARSET = utf8mb4 COLLATE = utf8mb4_bin ROW_FORMAT = DYNAMIC";
    let connection = &mut store.pool.acquire().await.context("connect to MySQL")?;
    if !has_table(connection, "migrate_lock").await? {
        sqlx::raw_sql(SQL).execute(&mut **connection).await.map_err(|error| super::of_step(error.into()))?;
    }
    Ok(())
}

async fn try_take(store: &Store) -> Result<bool> {
    const ACTION: &str = "acquire the lock of `tallyd migrate`";
    const MAKE: &str = "INSERT INTO migrate_lock (one, owner, token, lease_until) VALUES (1, '', 0, '1970-01-02') \
                        ON DUPLICATE KEY UPDATE one = VALUES(one)";
    // A lease that ends too far in the future was written before MySQL's clock was set back.
    const TAKE: &str = "UPDATE migrate_lock SET owner = USER(), token = ?, lease_until = NOW(6) + INTERVAL ? SECOND \
                        WHERE one = 1 AND lease_until NOT BETWEEN NOW(6) AND NOW(6) + INTERVAL ? SECOND";
    store
        .tried(ACTION, async |connection| {
            sqlx::query(MAKE).execute(&mut *connection).await.context(ACTION)?;
            let take = sqlx::query(TAKE).bind(*TOKEN).bind(LEASE_S).bind(LEASE_MAX.as_secs());
            Ok(take.execute(connection).await.context(ACTION)?.rows_affected() > 0)
        })
        .await
}

/// Renews the lease until another process has taken the lock. If MySQL does not answer, the lease can end, but it is
/// renewed later unless another process has taken the lock.
pub(super) async fn renew(store: &Store) -> Result<Infallible> {
    loop {
        tokio::time::sleep(RENEWED_EVERY).await;
        if let Ok(false) = set_lease(store, LEASE_S).await {
            return Err(StoreError::TakenOver("the lock of `tallyd migrate`".to_owned()));
        }
    }
}

pub(super) async fn release(store: &Store) -> Result<()> {
    set_lease(store, 0).await.map(drop)
}

async fn set_lease(store: &Store, seconds: u64) -> Result<bool> {
    const ACTION: &str = "renew the lock of `tallyd migrate`";
    const SQL: &str = "UPDATE migrate_lock SET lease_until = NOW(6) + INTERVAL ? SECOND WHERE one = 1 AND token = ?";
    store
        .tried(ACTION, async |connection| {
            let renewed = sqlx::query(SQL).bind(seconds).bind(*TOKEN).execute(connection).await.context(ACTION)?;
            Ok(renewed.rows_affected() > 0)
        })
        .await
}
