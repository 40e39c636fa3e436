//! A connection to one server, or to the master that sentinels name. All calls share the connection and use pipelines.
//! The connection is dropped at the first sign of a problem with the connection or the server.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, Cmd, ErrorKind, Pipeline, RedisError, RedisResult, ServerErrorKind, Value};
use tallyd_connect::opened::OPENED;
use tokio::sync::Mutex;

use super::error::is_cross_slot;
use super::login::Login;
use super::sentinel::Sentinels;
use super::text;

/// A master's error code when it refuses a write because it has too few replicas (`min-replicas-to-write`).
pub(super) const NO_REPLICAS: &str = "NOREPLICAS";

/// The interval at which a link asks sentinels for the current master while the link is used.
const ASK_EVERY: Duration = Duration::from_secs(1);

/// If a link was not used for this time, the next call first waits for the sentinels' answer, because another server
/// may be the master now.
const REST: Duration = Duration::from_secs(3);

/// If a node of a Cluster did not answer in time, its commands fail immediately for this time. Otherwise each pipeline
/// would wait for this node, and the commands for the other nodes would wait, too.
const SILENCE: Duration = Duration::from_secs(1);

pub(super) struct Link {
    server: Server,
    timeout: Duration,
    silent_since: std::sync::Mutex<Option<Instant>>,
    node: bool,
    login: Login,
    connection: Arc<Mutex<Option<Connected>>>,
    /// Whether the server has refused a script because its keys are in several slots.
    is_sharded: AtomicBool,
}

enum Server {
    Known,
    Watched(Arc<Sentinels>),
}

#[derive(Clone)]
struct Connected {
    connection: MultiplexedConnection,
    master: Option<String>,
    asked: Instant,
}

impl Link {
    pub(super) fn new(login: Login, node: bool) -> RedisResult<Self> {
        // Each connection makes its own client, because the password can change. This one only checks the address.
        login.client()?;
        let (server, timeout, silent_since) = (Server::Known, login.timeout, std::sync::Mutex::default());
        let is_sharded = AtomicBool::default();
        Ok(Self { server, timeout, silent_since, node, login, connection: Arc::default(), is_sharded })
    }

    pub(super) fn watched(sentinels: Sentinels, login: Login) -> Self {
        let (server, timeout) = (Server::Watched(Arc::new(sentinels)), login.timeout);
        let (silent_since, is_sharded) = (std::sync::Mutex::default(), AtomicBool::default());
        Self { server, timeout, silent_since, node: false, login, connection: Arc::default(), is_sharded }
    }

    pub(super) async fn master(&self) -> Option<String> {
        self.connection.lock().await.as_ref().and_then(|connected| connected.master.clone())
    }

    pub(super) fn is_sharded(&self) -> bool {
        self.is_sharded.load(Ordering::Relaxed)
    }

    pub(super) async fn run(&self, mut pipeline: Pipeline, time: Duration) -> RedisResult<Vec<RedisResult<Value>>> {
        if self.silent_since().is_some_and(|since| since.elapsed() < SILENCE) {
            return Err(RedisError::from((ErrorKind::Io, "it did not answer in time a moment ago")));
        }
        let began = Instant::now();
        pipeline.ignore_errors();
        let answered = async {
            let mut connection = self.connect().await?;
            pipeline.query_async::<Vec<RedisResult<Value>>>(&mut connection).await
        };
        // The library has its own timeouts, but they don't apply in all states of the connection. So this timeout is
        // also needed.
        let failed = match tokio::time::timeout(time, answered).await {
            Ok(Ok(results)) => {
                if results.iter().any(|result| result.as_ref().err().is_some_and(is_cross_slot)) {
                    self.is_sharded.store(true, Ordering::Relaxed);
                }
                match results.iter().find_map(|result| result.as_ref().err().and_then(|error| self.judge(error))) {
                    None => return Ok(results),
                    Some(error) => error,
                }
            }
            // A server can refuse tallyd's certificate even after the handshake.
            Ok(Err(error)) => self.login.explain(error),
            Err(_) => RedisError::from((ErrorKind::Io, "it did not answer in time")),
        };
        if self.node && began.elapsed() > self.timeout / 2 {
            *self.silent_since() = Some(Instant::now());
        }
        *self.connection.lock().await = None;
        Err(failed)
    }

    pub(super) async fn ask(&self, command: Cmd, time: Duration) -> RedisResult<Value> {
        let mut pipeline = Pipeline::new();
        pipeline.add_command(command);
        self.run(pipeline, time).await?.pop().unwrap_or(Ok(Value::Nil))
    }

    /// Returns the error if the server or the connection caused it. Returns `None` if the command caused the error.
    fn judge(&self, error: &RedisError) -> Option<RedisError> {
        match error.kind() {
            ErrorKind::Server(ServerErrorKind::Moved | ServerErrorKind::Ask) if !self.node => Some(wrong_kind(true)),
            // The master has lost its replicas, so another server may be the master now.
            _ if self.is_watched() && error.code() == Some(NO_REPLICAS) => Some(error.clone()),
            _ => is_of_the_server(error).then(|| error.clone()),
        }
    }

    /// If the link was used recently, asks the sentinels in the background and returns false; otherwise waits for their
    /// answer.
    async fn is_left(&self, shared: &mut Option<Connected>) -> bool {
        let (Server::Watched(sentinels), Some(connected)) = (&self.server, shared) else { return false };
        let Some(master) = connected.master.clone() else { return false };
        let rest = connected.asked.elapsed();
        if rest < ASK_EVERY {
            return false;
        }
        connected.asked = Instant::now();
        if rest >= REST {
            return sentinels.have_left(&master).await;
        }
        let (sentinels, connection) = (Arc::clone(sentinels), Arc::clone(&self.connection));
        tokio::spawn(async move {
            if sentinels.have_left(&master).await {
                connection.lock().await.take_if(|connected| connected.master.as_ref() == Some(&master));
            }
        });
        false
    }

    fn silent_since(&self) -> MutexGuard<'_, Option<Instant>> {
        self.silent_since.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_watched(&self) -> bool {
        matches!(self.server, Server::Watched(_))
    }

    async fn connect(&self) -> RedisResult<MultiplexedConnection> {
        let mut shared = self.connection.lock().await;
        if self.is_left(&mut shared).await {
            *shared = None;
        }
        if let Some(connected) = shared.as_ref() {
            return Ok(connected.connection.clone());
        }
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(Some(self.timeout))
            .set_response_timeout(Some(self.timeout));
        let (mut connection, master) = match &self.server {
            Server::Known => (self.login.client()?.get_multiplexed_async_connection_with_config(&config).await?, None),
            Server::Watched(sentinels) => {
                let (connection, master) = sentinels.connect(&config).await?;
                (connection, Some(master))
            }
        };
        // If the account lacks the right to run INFO, the check is skipped. If `cluster` is then set wrongly, the first
        // redirected command fails.
        match redis::cmd("INFO").arg("cluster").query_async::<Value>(&mut connection).await {
            Ok(answer) => match text(&answer).and_then(|text| text.split_once("cluster_enabled:")) {
                Some((_, enabled)) if enabled.starts_with('1') != self.node => return Err(wrong_kind(!self.node)),
                _ => {}
            },
            Err(error) if is_of_the_server(&error) => return Err(error),
            Err(_) => {}
        }
        OPENED.redis.add_one();
        *shared = Some(Connected { connection: connection.clone(), master, asked: Instant::now() });
        Ok(connection)
    }
}

/// The error of a server that belongs to a Cluster, if the configuration says otherwise.
const NODE: &str = "it is a node of a Redis Cluster: set [redis] cluster = true";

pub(super) fn is_node(error: &RedisError) -> bool {
    error.kind() == ErrorKind::InvalidClientConfig && error.to_string().contains(NODE)
}

fn wrong_kind(is_node: bool) -> RedisError {
    let what = if is_node { NODE } else { "it is not a node of a Redis Cluster: set [redis] cluster = false" };
    RedisError::from((ErrorKind::InvalidClientConfig, what))
}

/// Returns true if the server or the connection caused the error. In this case another connection may succeed.
fn is_of_the_server(error: &RedisError) -> bool {
    error.is_io_error()
        || error.is_connection_dropped()
        || matches!(
            error.kind(),
            ErrorKind::Server(ServerErrorKind::ReadOnly | ServerErrorKind::BusyLoading | ServerErrorKind::MasterDown)
        )
}
