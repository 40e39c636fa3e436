//! A connection from the pool. After use, the connection normally goes back to the pool. In two cases, the connection
//! is closed: a statement on the connection has not ended, or the MySQL server may no longer be the primary.

use std::future::Future;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use sqlx::pool::PoolConnection;
use sqlx::{MySql, MySqlConnection};
use tallyd_connect::fate::Fate;

use super::{Context, Result, Store, StoreError};

/// If a MySQL server says that it is not the primary, new connections can still reach this server for a while. This is
/// the maximum duration after the last such error.
const FAILOVER_SETTLES: Duration = Duration::from_secs(5);

pub(crate) const TRIES: u32 = 10;

pub struct Conn {
    pub(super) connection: PoolConnection<MySql>,
    pub(super) limit: Duration,
    /// True from the beginning of the work to its end. Meanwhile a statement can still be running.
    pub(super) broken: bool,
}

impl Conn {
    /// Runs `work` on the connection for at most `[mysql] transaction_timeout_ms`. After a timeout, or if the caller is
    /// dropped before the work ends, the connection is closed instead of released.
    pub async fn limit<'c, T, F>(
        &'c mut self,
        action: &'static str,
        work: impl FnOnce(&'c mut MySqlConnection) -> F,
    ) -> Result<T>
    where
        F: Future<Output = Result<T>> + 'c,
    {
        self.broken = true;
        let limit = self.limit;
        let ended = tokio::time::timeout(limit, work(&mut self.connection)).await;
        let ended = ended.unwrap_or(Err(StoreError::Timeout { action, limit }));
        self.broken = spoils(&ended);
        note_failover(&ended);
        ended
    }

    /// Runs `work` without a time limit, for the long reads of a job. Meanwhile another connection renews the job's
    /// lease. If the lease is lost, the job's run ends.
    pub async fn unlimited<'c, T, F>(&'c mut self, work: impl FnOnce(&'c mut MySqlConnection) -> F) -> Result<T>
    where
        F: Future<Output = Result<T>> + 'c,
    {
        self.broken = true;
        let ended = work(&mut self.connection).await;
        self.broken = spoils(&ended);
        note_failover(&ended);
        ended
    }
}

impl Store {
    pub async fn tried<T>(
        &self,
        action: &'static str,
        write: impl AsyncFn(&mut MySqlConnection) -> Result<T>,
    ) -> Result<T> {
        let mut tries = 1;
        loop {
            let mut conn = self.acquire().await?;
            match conn.limit(action, |connection| write(connection)).await {
                Err(error) if (error.is_contention() || error.is_lock_timeout()) && tries < TRIES => tries += 1,
                ended => return ended,
            }
        }
    }
}

impl Drop for Conn {
    fn drop(&mut self) {
        if self.broken {
            self.connection.close_on_drop();
        }
    }
}

pub async fn or_rollback<T>(connection: &mut MySqlConnection, ended: Result<T>) -> Result<T> {
    if ended.is_err() && !spoils(&ended) {
        sqlx::raw_sql("ROLLBACK").execute(connection).await.context("roll back")?;
    }
    ended
}

/// Whether the connection must not be used again. This is true after most errors, because the server is perhaps
/// read-only now, or MySQL's address perhaps leads to another server.
fn spoils<T>(ended: &Result<T>) -> bool {
    ended.as_ref().err().is_some_and(|error| error.fate() != Fate::Item && !error.is_contention())
}

struct Seen {
    /// The time of the last "not the primary" error. Every pool closes older connections, because read-only clients
    /// would otherwise read old data from the former primary.
    no_primary_at: Mutex<Option<Instant>>,
    is_galera: AtomicBool,
}

/// Global, because what one connection sees of MySQL counts for all pools and statements of the process.
static SEEN: Seen = Seen { no_primary_at: Mutex::new(None), is_galera: AtomicBool::new(false) };

pub(super) fn note_galera() {
    SEEN.is_galera.store(true, Ordering::Relaxed);
}

pub(super) fn is_galera() -> bool {
    SEEN.is_galera.load(Ordering::Relaxed)
}

fn note_failover<T>(ended: &Result<T>) {
    if ended.as_ref().err().is_some_and(StoreError::is_of_no_primary) {
        note_no_primary();
    }
}

pub(super) fn note_no_primary() {
    if let Ok(mut at) = SEEN.no_primary_at.lock() {
        *at = Some(Instant::now());
    }
}

pub(super) fn is_from_before_a_failover(age: Duration) -> bool {
    let Some(since) = SEEN.no_primary_at.lock().ok().and_then(|at| at.map(|at| at.elapsed())) else { return false };
    // After the error, the address can still lead to the former primary for a short time. So connections that were
    // opened within this time are closed, too. Because this time is limited, new connections are not closed again and
    // again.
    age > since.checked_sub(FAILOVER_SETTLES).unwrap_or(since)
}
