//! One server: a connection that is shared and pipelined, and thrown away at the first sign that it or its server can't
//! be trusted.

use std::time::Duration;

use redis::aio::MultiplexedConnection;
use redis::io::tcp::TcpSettings;
use redis::{
    AsyncConnectionConfig, Client, ErrorKind, IntoConnectionInfo, Pipeline, RedisError, RedisResult, ServerErrorKind,
    Value,
};
use tokio::sync::Mutex;

use super::text;
use crate::config::ServerUrl;
use crate::vitals::vitals;

/// A connection to one server. Connects when first used.
pub(super) struct Link {
    client: Client,
    timeout: Duration,
    /// Whether it shall be a node of a Cluster.
    node: bool,
    connection: Mutex<Option<MultiplexedConnection>>,
}

impl Link {
    /// A link to that server, of which a pipeline may take `timeout`.
    ///
    /// # Errors
    /// The address can't be used.
    pub(super) fn new(url: &ServerUrl, timeout: Duration, node: bool) -> RedisResult<Self> {
        // What was sent and isn't acknowledged for so long breaks the connection, and not a quarter of an hour later.
        let tcp = TcpSettings::default().set_nodelay(true).set_user_timeout(timeout);
        let info = url.expose().into_connection_info()?.set_tcp_settings(tcp);
        Ok(Self { client: Client::open(info)?, timeout, node, connection: Mutex::default() })
    }

    /// Runs a pipeline once, connecting first if need be, and gives each command's own result. It may take `time`.
    ///
    /// # Errors
    /// The connection failed, or the server can't be written to: the next call makes a new connection.
    pub(super) async fn run(&self, mut pipeline: Pipeline, time: Duration) -> RedisResult<Vec<RedisResult<Value>>> {
        pipeline.ignore_errors();
        let answered = async {
            let mut connection = self.connect().await?;
            pipeline.query_async::<Vec<RedisResult<Value>>>(&mut connection).await
        };
        // The library's own timeouts are set too; this one holds whatever state the connection is in.
        let failed = match tokio::time::timeout(time, answered).await {
            Ok(Ok(results)) => {
                match results.iter().find_map(|result| result.as_ref().err().and_then(|error| self.judge(error))) {
                    None => return Ok(results),
                    Some(error) => error,
                }
            }
            Ok(Err(error)) => error,
            Err(_) => RedisError::from((ErrorKind::Io, "no answer in time")),
        };
        *self.connection.lock().await = None;
        Err(failed)
    }

    /// What an error says of the server or the connection; nothing where it is about the command alone.
    fn judge(&self, error: &RedisError) -> Option<RedisError> {
        match error.kind() {
            ErrorKind::Server(ServerErrorKind::Moved | ServerErrorKind::Ask) if !self.node => Some(wrong_kind(true)),
            _ => is_of_the_server(error).then(|| error.clone()),
        }
    }

    async fn connect(&self) -> RedisResult<MultiplexedConnection> {
        let mut shared = self.connection.lock().await;
        if let Some(connection) = shared.as_ref() {
            return Ok(connection.clone());
        }
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(Some(self.timeout))
            .set_response_timeout(Some(self.timeout));
        let mut connection = self.client.get_multiplexed_async_connection_with_config(&config).await?;
        // An account may have no right to ask; then the first command that is sent elsewhere tells.
        match redis::cmd("INFO").arg("cluster").query_async::<Value>(&mut connection).await {
            Ok(answer) => match text(&answer).and_then(|text| text.split_once("cluster_enabled:")) {
                Some((_, enabled)) if enabled.starts_with('1') != self.node => return Err(wrong_kind(!self.node)),
                _ => {}
            },
            Err(error) if is_of_the_server(&error) => return Err(error),
            Err(_) => {}
        }
        vitals().opened.add("redis", 1);
        *shared = Some(connection.clone());
        Ok(connection)
    }
}

/// It is part of a Cluster, or not, and the configuration says otherwise.
fn wrong_kind(is_node: bool) -> RedisError {
    let what = if is_node {
        "it is a node of a Redis Cluster: set [redis] cluster = true"
    } else {
        "it is not a node of a Redis Cluster: set [redis] cluster = false"
    };
    RedisError::from((ErrorKind::InvalidClientConfig, what))
}

/// About the server or the connection, not about the command: another connection may do better.
fn is_of_the_server(error: &RedisError) -> bool {
    error.is_io_error()
        || error.is_connection_dropped()
        || matches!(
            error.kind(),
            ErrorKind::Server(ServerErrorKind::ReadOnly | ServerErrorKind::BusyLoading | ServerErrorKind::MasterDown)
        )
}
