//! One connection of the pool: closed instead of given back where its work has not ended, or its server may be no primary any more.

use std::future::Future;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use sqlx::pool::PoolConnection;
use sqlx::{MySql, MySqlConnection};
use tallyd_connect::fate::Fate;

use super::{Result, Store, StoreError};

/// Between the last time that a server said it is no primary, and the time when the address surely leads to the next one.
const FAILOVER_SETTLES: Duration = Duration::from_secs(5);

/// How often a transaction is run while others are in its way.
pub(crate) const TRIES: u32 = 10;

/// A connection from the pool.
pub struct Conn {
    pub(super) connection: PoolConnection<MySql>,
    pub(super) limit: Duration,
    /// Work was begun and has not ended: a statement may still be running.
    pub(super) broken: bool,
}

impl Conn {
    /// Runs `work` on the connection for at most `[mysql] transaction_timeout_ms`. Where it doesn't end, by the
    /// timeout or because the caller is dropped, the connection is closed instead of given back.
    ///
    /// # Errors
    /// Those of `work`, and the timeout.
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

    /// Runs `work` for as long as it takes: for the long reads of a job, which ends when its lease, renewed on another
    /// connection, is lost.
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
    /// Runs a transaction again where another one was in its way: a deadlock, or a lock that it waited for too long.
    ///
    /// # Errors
    /// Any other error of `write`, and the tenth of these.
    pub(crate) async fn tried<T>(
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

/// Whether the connection may not be used again. After most errors it isn't: the server may have become read-only, or
/// another one may have taken its address over.
fn spoils<T>(ended: &Result<T>) -> bool {
    ended.as_ref().err().is_some_and(|error| error.fate() != Fate::Item && !error.is_contention())
}

/// When a server last said that it is no primary. Connections that are older are closed instead of lent, in every pool: those that only
/// read would stay on a server that was demoted, and read what is old, for as long as it lets them.
static NO_PRIMARY_AT: Mutex<Option<Instant>> = Mutex::new(None);

fn note_failover<T>(ended: &Result<T>) {
    if ended.as_ref().err().is_some_and(StoreError::is_of_no_primary) {
        note_no_primary();
    }
}

pub(super) fn note_no_primary() {
    if let Ok(mut at) = NO_PRIMARY_AT.lock() {
        *at = Some(Instant::now());
    }
}

pub(super) fn is_from_before_a_failover(age: Duration) -> bool {
    let Some(since) = NO_PRIMARY_AT.lock().ok().and_then(|at| at.map(|at| at.elapsed())) else { return false };
    // The address may have moved only after that: what was opened meanwhile is closed, too, but not again and again until then.
    age > since.checked_sub(FAILOVER_SETTLES).unwrap_or(since)
}
