//! MySQL, the source of truth. This crate contains every SQL statement of the daemon, one per function.
//!
//! A [`Store`] provides connections with the daemon's session settings (strict mode, READ COMMITTED, UTC). Each error
//! says whether a retry can succeed ([`Fate::Passing`](tallyd_connect::fate::Fate::Passing)) or whether one row is the
//! cause ([`Fate::Item`](tallyd_connect::fate::Fate::Item)). The statements work on MySQL 8 or later, and on MariaDB
//! 10.11 or later. So an upsert uses `VALUES(col)` and no row alias. Only `likes::upsert` needs user variables, which
//! MySQL deprecates. `likes::old_states` is the alternative without user variables.

#![warn(unreachable_pub)]

pub mod applied_events;
pub mod archive_rows;
pub mod boards;
pub mod card;
pub mod changed;
pub mod codes;
pub mod config;
mod conn;
pub mod control;
pub mod counters;
mod error;
pub mod fences;
mod grants;
pub mod jobs;
pub mod letters;
pub mod likes;
mod login;
pub mod maps;
pub mod migrate;
pub mod outbox;
pub mod partitions;
pub mod probe;
pub mod ranges;
pub mod repairs;
mod rows;
pub mod run_state;
pub mod schema;
pub mod sets;
pub mod site_query;
pub mod snapshots;
pub mod status;
mod text;
pub mod watches;

use std::io::ErrorKind;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use sqlx::mysql::MySqlPoolOptions;
use sqlx::{AssertSqlSafe, ConnectOptions, Connection, Executor, MySqlConnection, MySqlPool, Row};
use tallyd_connect::address::ServerUrl;
use tallyd_connect::opened::OPENED;
use tallyd_connect::secret::Secret;
use tallyd_connect::tls::{self, TlsFault};
use tallyd_connect::whole::Whole;
use tallyd_core::model::Micros;
use tokio::sync::Mutex;

pub use self::conn::{Conn, or_rollback};
use self::conn::{is_from_before_a_failover, note_galera, note_no_primary};
pub use self::error::{Context, Result, StoreError};
use self::login::{address, options, unknown_plugin};
pub use self::rows::{TRIPLE_SHAPES, datetime, in_shapes, in_shapes_of, micros, placeholders, target};
pub use self::text::Text;

use crate::config::Mysql;

const CLOSE_MAX: Duration = Duration::from_secs(2);

const REFUSAL_MAX: Duration = Duration::from_millis(500);

/// If no connection is available for this time, an impatient store looks whether the port refuses connections.
const REFUSED_AFTER: Duration = Duration::from_millis(100);

/// How long an impatient store keeps what it saw of the port. MySQL counts connections that end early, and blocks the
/// machine after some of them. So the calls of a store share one look.
const LOOK_KEPT: Duration = Duration::from_secs(1);

type Look = Mutex<Option<(Instant, bool)>>;

/// During a failover, connections to the former primary can stay open, and an API server that only reads does not
/// notice.
const CONNECTION_LIFE_MAX: Duration = Duration::from_secs(60);

/// The server ends a session that is idle for this number of seconds.
pub const WAIT_TIMEOUT_S: u64 = 10;

/// A connection that was idle for longer than this is tested before it is used.
const TESTED_AFTER: Duration = Duration::from_secs(1);

/// A pool of connections. The pool does not connect before its first use, so a daemon can start while MySQL is
/// unreachable.
#[derive(Clone, Debug)]
pub struct Store {
    pool: MySqlPool,
    address: Arc<str>,
    has_certificate: bool,
    /// The last look, if a call fails immediately when the server's port refuses connections.
    look: Option<Arc<Look>>,
    transaction_max: Duration,
    url: ServerUrl,
    password: Arc<std::sync::Mutex<Option<Secret>>>,
}

impl Store {
    pub fn new(config: &Mysql, connections_max: u32) -> Result<Self> {
        Self::with_session(config, connections_max, "")
    }

    /// Creates a store with at most `connections_max` connections. The server ends each read after `read_max`, so that
    /// no read continues after its caller has stopped waiting.
    pub fn of_short_reads(config: &Mysql, connections_max: u32, read_max: Duration) -> Result<Self> {
        // Only MariaDB reads the first comment, and only MySQL reads the second comment.
        let (seconds, ms) = (read_max.as_secs_f32(), read_max.as_millis());
        let limit = format!("SET SESSION /*M! max_statement_time = {seconds} */ /*!80000 max_execution_time = {ms} */");
        Self::with_session(config, connections_max, &limit)
    }

    fn with_session(config: &Mysql, connections_max: u32, begin: &str) -> Result<Self> {
        let begin: Arc<str> = begin.into();
        let pool = MySqlPoolOptions::new()
            .max_connections(connections_max)
            // The pool closes idle connections before the server does (`wait_timeout` in `set_session`).
            .idle_timeout(Duration::from_secs(8))
            .acquire_timeout(Duration::from_millis(config.connect_timeout_ms))
            // After a failover the address can lead to another server, while connections to the former server are still
            // open.
            .max_lifetime(CONNECTION_LIFE_MAX)
            .test_before_acquire(false)
            .before_acquire(|connection, seen| {
                Box::pin(async move {
                    if seen.idle_for > TESTED_AFTER {
                        connection.ping().await?;
                    }
                    Ok(!is_from_before_a_failover(seen.age))
                })
            })
            .after_connect(move |connection, _| {
                let begin = Arc::clone(&begin);
                Box::pin(async move {
                    OPENED.mysql.add_one();
                    set_session(connection).await?;
                    if !begin.is_empty() {
                        connection.execute(sqlx::raw_sql(AssertSqlSafe(begin.to_string()))).await?;
                    }
                    Ok(())
                })
            })
            .connect_lazy_with(options(config)?);
        let (address, has_certificate) = (address(&config.url).into(), config.login.tls.identity.is_some());
        Ok(Self {
            pool,
            address,
            has_certificate,
            look: None,
            transaction_max: Duration::from_millis(config.transaction_timeout_ms),
            url: config.url.clone(),
            password: Arc::default(),
        })
    }

    /// Returns a store whose calls fail immediately if the server's port refuses connections. By default they wait for
    /// `[mysql] connect_timeout_ms`, because the server is possibly restarting.
    #[must_use]
    pub fn impatient(self) -> Self {
        Self { look: Some(Arc::default()), ..self }
    }

    pub fn replicas(config: &Mysql, servers: &[String]) -> std::result::Result<Vec<(String, Self)>, String> {
        let replica = |server: &String| {
            let url = config.url.at(server)?;
            let store = Self::new(&Mysql { url, ..config.clone() }, 1).map_err(|error| error.to_string())?;
            Ok((server.clone(), store))
        };
        servers.iter().map(replica).collect()
    }

    /// Acquires a connection. When the [`Conn`] is dropped, the connection returns to the pool. If its work has not
    /// ended, the connection is closed instead.
    pub async fn acquire(&self) -> Result<Conn> {
        self.renew_password();
        let acquired = tokio::select! {
            acquired = self.pool.acquire() => acquired,
            refused = self.refused() => Err(refused),
        };
        let connection = match acquired {
            Err(sqlx::Error::PoolTimedOut) => Err(self.refusal().await),
            acquired => acquired,
        };
        let connection = connection.map_err(|source| self.explain(source))?;
        Ok(Conn { connection, limit: self.transaction_max, broken: false })
    }

    fn renew_password(&self) {
        let Some(now) = self.url.password_now() else { return };
        let mut last = self.password.lock().unwrap_or_else(PoisonError::into_inner);
        if last.as_ref().map(Secret::expose) != Some(now.expose()) {
            let options = (*self.pool.connect_options()).clone().password(now.expose());
            self.pool.set_connect_options(options);
            *last = Some(now);
        }
    }

    async fn refused(&self) -> sqlx::Error {
        const REFUSED: ErrorKind = ErrorKind::ConnectionRefused;
        let Some(look) = &self.look else { return std::future::pending().await };
        tokio::time::sleep(REFUSED_AFTER).await;
        let mut last = look.lock().await;
        if last.is_none_or(|(begun, _)| begun.elapsed() >= LOOK_KEPT) {
            // This is recorded first, because this call ends early if the pool yields a connection.
            let begun = last.insert((Instant::now(), false)).0;
            let is_refused = matches!(self.refusal().await, sqlx::Error::Io(error) if error.kind() == REFUSED);
            *last = Some((begun, is_refused));
        }
        let is_refused = last.is_some_and(|(_, is_refused)| is_refused);
        drop(last);
        if is_refused { std::io::Error::from(REFUSED).into() } else { std::future::pending().await }
    }

    /// Finds out why no connection was available. If the server refuses connections, the pool retries until the timeout
    /// and does not report the reason.
    async fn refusal(&self) -> sqlx::Error {
        match tokio::time::timeout(REFUSAL_MAX, self.pool.connect_options().connect()).await {
            Ok(Err(error)) => error,
            _ => sqlx::Error::PoolTimedOut,
        }
    }

    fn explain(&self, source: sqlx::Error) -> StoreError {
        let has_certificate = self.has_certificate;
        let server = tls::Server { name: "MySQL", address: &self.address, section: "mysql", has_certificate };
        let lacks_tls =
            matches!(&source, sqlx::Error::Tls(error) if error.to_string().contains("does not support TLS"));
        match TlsFault::of(&source, server) {
            Some(fault) => fault.into(),
            None if lacks_tls => TlsFault::without_tls(server, "write ?ssl-mode=DISABLED").into(),
            None if matches!(source, sqlx::Error::Protocol(_)) => match unknown_plugin(&source) {
                Some(plugin) => StoreError::UnknownPlugin(plugin),
                None => StoreError::Login(Whole(source)),
            },
            None => StoreError::sql("connect to MySQL")(source),
        }
    }

    pub async fn clock(&self) -> Result<(Micros, bool)> {
        const ACTION: &str = "read MySQL's clock";
        let mut conn = self.acquire().await?;
        conn.limit(ACTION, |connection| async move {
            // Some versions of MariaDB return the setting as a word, and all other servers return it as a number.
            let asks = "SELECT CAST(NOW(6) AS DATETIME(6)), CAST(CAST(@@read_only AS CHAR) IN ('0', 'OFF') AS SIGNED)";
            let row = sqlx::query(asks).fetch_one(connection).await.context(ACTION)?;
            let is_writable = row.try_get::<i64, _>(1).context(ACTION)? != 0;
            if !is_writable {
                note_no_primary();
            }
            Ok((micros(row.try_get(0).context(ACTION)?), is_writable))
        })
        .await
    }

    pub async fn threads_running(&self) -> Result<u64> {
        const ACTION: &str = "read MySQL's load";
        let mut conn = self.acquire().await?;
        conn.limit(ACTION, |connection| async move {
            let row =
                sqlx::query("SHOW GLOBAL STATUS LIKE 'Threads_running'").fetch_one(connection).await.context(ACTION)?;
            let threads: String = row.try_get(1).context(ACTION)?;
            Ok(threads.parse().unwrap_or(0))
        })
        .await
    }

    pub async fn close(&self) {
        if tokio::time::timeout(CLOSE_MAX, self.pool.close()).await.is_err() {
            tracing::debug!(event = "close-failed", "MySQL does not answer: its connections were not closed");
        }
    }
}

async fn set_session(connection: &mut MySqlConnection) -> std::result::Result<(), sqlx::Error> {
    // Strict mode is set here because the library does not set it, and without it MySQL silently truncates values.
    // `wait_timeout` is set because a daemon that freezes within a transaction keeps its partition's row locked, by
    // default for eight hours. `autocommit` is set because a server's configuration can switch it off. Without
    // autocommit, MySQL would roll back each statement that runs outside of a transaction. The server's own time limit
    // is switched off, because a job counts a hot target's likes in one statement. Only MariaDB reads the first comment,
    // and only MySQL reads the second comment.
    connection
        .execute(
            "SET SESSION autocommit = 1, sql_mode = 'STRICT_TRANS_TABLES,ERROR_FOR_DIVISION_BY_ZERO,NO_ENGINE_SUBSTITUTION', \
             time_zone = '+00:00', innodb_lock_wait_timeout = 10, wait_timeout = 10 \
             /*M! , max_statement_time = 0 */ /*!80000 , max_execution_time = 0 */",
        )
        .await?;
    connection.execute("SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED").await?;
    let galera = connection.fetch_optional("SHOW SESSION VARIABLES LIKE 'wsrep_on'").await?;
    let state: Option<String> = galera.map(|row| row.try_get(1)).transpose()?;
    if state.as_deref() == Some("ON") {
        note_galera();
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn waiting_calls_open_one_connection_more_and_not_one_each() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("mysql://u@{}/t", listener.local_addr().unwrap());
        let store = Store::new(&Mysql { url: url.as_str().into(), ..Mysql::default() }, 1).unwrap().impatient();
        let mut calls = tokio::task::JoinSet::new();
        for _ in 0..8 {
            let store = store.clone();
            calls.spawn(async move { store.acquire().await.is_err() });
        }
        // The server accepts connections and says nothing. No call ends here: then the pool would connect again.
        let mut silent = Vec::new();
        let mut end = Box::pin(tokio::time::sleep(REFUSED_AFTER * 4));
        loop {
            tokio::select! {
                connection = listener.accept() => silent.push(connection.unwrap()),
                () = &mut end => break,
            }
        }
        assert!(calls.try_join_next().is_none());
        assert_eq!(silent.len(), 2, "one of the pool, and one look");
    }
}
