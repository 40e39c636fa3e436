//! Redis, derived from MySQL: every command and key of the daemon stands in this folder.
//!
//! One connection, shared and pipelined. It is thrown away, and the next call makes a new one, at the first sign that
//! it or its server can't be trusted: an I/O error, a timeout, a server that is read-only (a demoted master) or still
//! loading. A command that timed out may still run later: callers send only what may run late, or twice.

pub mod boards;
pub mod counters;
pub mod keys;
pub mod layout;
pub mod missing;
pub mod ranks;
pub mod score;
pub mod snapshots;

use std::io::Write;
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use redis::aio::MultiplexedConnection;
use redis::io::tcp::TcpSettings;
use redis::{
    AsyncConnectionConfig, Client, Cmd, ErrorKind, IntoConnectionInfo, Pipeline, RedisError, ServerErrorKind, Value,
};
use tokio::sync::Mutex;

use crate::config::Redis;
use crate::model::Micros;
use keys::Keys;

/// Commands that one pipeline holds at most: it must be answered within `[redis] timeout_ms`, and live traffic waits
/// behind it.
const PIPELINE_COMMANDS_MAX: usize = 500;

/// An error of Redis, or on the way to it. All of them pass: nothing here is the truth.
#[derive(Debug, thiserror::Error)]
#[error("{action}")]
pub struct CacheError {
    action: &'static str,
    #[source]
    source: RedisError,
}

impl CacheError {
    /// Whether it is about what one key holds (another type, a number that isn't one): the same call will fail again,
    /// calls about other keys may do better.
    pub fn is_of_the_key(&self) -> bool {
        matches!(
            self.source.kind(),
            ErrorKind::Extension | ErrorKind::UnexpectedReturnType | ErrorKind::Server(ServerErrorKind::ResponseError)
        )
    }
}

/// The result of whatever asks Redis.
pub type Result<T> = std::result::Result<T, CacheError>;

/// A connection to Redis. Connects when first used.
#[derive(Clone)]
pub struct Cache {
    client: Client,
    timeout: Duration,
    connection: Arc<Mutex<Option<MultiplexedConnection>>>,
    /// How keys are named.
    pub keys: Keys,
}

/// A Lua script under lua/, with what the server knows it by.
pub(crate) struct Script {
    text: &'static str,
    hash: LazyLock<String>,
}

macro_rules! script {
    ($name:literal) => {
        Script {
            text: include_str!(concat!("../../lua/", $name)),
            hash: LazyLock::new(|| {
                redis::Script::new(include_str!(concat!("../../lua/", $name))).get_hash().to_owned()
            }),
        }
    };
}

pub(crate) static LIKE: Script = script!("like.lua");
pub(crate) static BOARD: Script = script!("board.lua");
static SAMPLE: Script = script!("sample.lua");
static REPAIR: Script = script!("repair.lua");
static LOAD: Script = script!("load.lua");
static BOARD_READ: Script = script!("board_read.lua");
static BOARD_FREEZE: Script = script!("board_freeze.lua");
static BOARD_MERGE: Script = script!("board_merge.lua");
static BOARD_STAY: Script = script!("board_stay.lua");
static BOARD_END: Script = script!("board_end.lua");
static BOARD_MARK: Script = script!("board_mark.lua");
static BOARD_SCAN: Script = script!("board_scan.lua");
static BOARD_FILL: Script = script!("board_fill.lua");
static BOARD_RAISE: Script = script!("board_raise.lua");

/// One call of a script.
pub(crate) struct Call {
    script: &'static Script,
    keys: Vec<String>,
    /// One after the other, because there may be millions of them.
    arguments: Vec<u8>,
    /// Where each ends.
    ends: Vec<usize>,
}

impl Call {
    pub(crate) fn new(script: &'static Script, key: String) -> Self {
        Self { script, keys: vec![key], arguments: Vec::new(), ends: Vec::new() }
    }

    /// One more key, in the same slot as the first.
    pub(crate) fn key(mut self, key: String) -> Self {
        self.keys.push(key);
        self
    }

    pub(crate) fn arg(mut self, argument: impl AsRef<[u8]>) -> Self {
        self.arguments.extend_from_slice(argument.as_ref());
        self.ends.push(self.arguments.len());
        self
    }

    /// A number, in decimal.
    pub(crate) fn number(mut self, number: impl std::fmt::Display) -> Self {
        // A vector can't fail.
        let _ = write!(self.arguments, "{number}");
        self.ends.push(self.arguments.len());
        self
    }

    fn command(&self, with_text: bool) -> Cmd {
        let mut command = Cmd::new();
        if with_text {
            command.arg("EVAL").arg(self.script.text);
        } else {
            command.arg("EVALSHA").arg(self.script.hash.as_str());
        }
        command.arg(self.keys.len()).arg(&self.keys);
        let mut from = 0;
        for end in &self.ends {
            command.arg(self.arguments.get(from..*end).unwrap_or_default());
            from = *end;
        }
        command
    }
}

impl Cache {
    /// A cache of that server.
    ///
    /// # Errors
    /// The address can't be used.
    pub fn new(config: &Redis) -> Result<Self> {
        let failed = |source| CacheError { action: "read [redis] url", source };
        let timeout = Duration::from_millis(config.timeout_ms);
        // What was sent and isn't acknowledged for so long breaks the connection, instead of after a quarter of an hour.
        let tcp = TcpSettings::default().set_nodelay(true).set_user_timeout(timeout);
        let info = config.url.expose().into_connection_info().map_err(failed)?.set_tcp_settings(tcp);
        let client = Client::open(info).map_err(failed)?;
        Ok(Self { client, timeout, connection: Arc::default(), keys: Keys::new(config) })
    }

    /// Whether Redis answers.
    ///
    /// # Errors
    /// It doesn't.
    pub async fn ping(&self) -> Result<()> {
        let mut pipeline = Pipeline::new();
        pipeline.cmd("PING");
        self.run("ping Redis", &pipeline).await.map(drop)
    }

    /// Redis' clock: what an event's `at` and a sample's cut are told by.
    ///
    /// # Errors
    /// Redis is away.
    pub async fn now(&self) -> Result<Micros> {
        const ACTION: &str = "read Redis' clock";
        let mut pipeline = Pipeline::new();
        pipeline.cmd("TIME");
        let answer = self.run(ACTION, &pipeline).await?.pop().unwrap_or(Ok(Value::Nil));
        let (seconds, micros): (i64, i64) = answer
            .and_then(|answer| Ok(redis::from_redis_value(answer)?))
            .map_err(|source| CacheError { action: ACTION, source })?;
        Ok(Micros(seconds * 1_000_000 + micros))
    }

    /// Names the data set that Redis has: another name after a restart, and after a failover or a new replication.
    ///
    /// # Errors
    /// Redis is away.
    pub async fn data_set(&self) -> Result<String> {
        let server = self.info("server", "run_id:").await?;
        Ok(format!("{server} {}", self.info("replication", "master_replid:").await?))
    }

    /// What Redis takes away when memory is short: its `maxmemory-policy`.
    ///
    /// # Errors
    /// Redis is away.
    pub async fn eviction_policy(&self) -> Result<String> {
        self.info("memory", "maxmemory_policy:").await
    }

    /// What follows `name` in a section of INFO; empty where there is no such line.
    async fn info(&self, section: &str, name: &str) -> Result<String> {
        const ACTION: &str = "ask Redis about itself";
        let mut pipeline = Pipeline::new();
        pipeline.cmd("INFO").arg(section);
        let answer = self.run(ACTION, &pipeline).await?.pop().unwrap_or(Ok(Value::Nil));
        let answer = answer.map_err(|source| CacheError { action: ACTION, source })?;
        let line = text(&answer).and_then(|text| text.lines().find_map(|line| line.strip_prefix(name)));
        Ok(line.unwrap_or_default().trim().to_owned())
    }

    /// Runs the calls in order, pipelined in pieces, and gives each one's answer.
    ///
    /// # Errors
    /// Redis is away, or one call failed: those before and after it may have run.
    pub(crate) async fn eval(&self, action: &'static str, calls: &[Call]) -> Result<Vec<Value>> {
        self.eval_each(action, calls).await?.into_iter().collect()
    }

    /// The same, with each call's own failure.
    ///
    /// # Errors
    /// Redis is away: any of them may have run.
    pub(crate) async fn eval_each(&self, action: &'static str, calls: &[Call]) -> Result<Vec<Result<Value>>> {
        let mut answers = Vec::with_capacity(calls.len());
        for piece in calls.chunks(PIPELINE_COMMANDS_MAX) {
            let mut pipeline = Pipeline::with_capacity(piece.len());
            for call in piece {
                pipeline.add_command(call.command(false));
            }
            for (call, answer) in piece.iter().zip(self.run(action, &pipeline).await?) {
                let answer = match answer {
                    // A new server, or SCRIPT FLUSH: this call did not run, and its text makes it known again.
                    Err(error) if error.kind() == ErrorKind::Server(ServerErrorKind::NoScript) => {
                        let mut again = Pipeline::new();
                        again.add_command(call.command(true));
                        self.run(action, &again).await?.pop().unwrap_or(Err(error))
                    }
                    answer => answer,
                };
                answers.push(answer.map_err(|source| CacheError { action, source }));
            }
        }
        Ok(answers)
    }

    /// Runs a pipeline once and gives each command's own result.
    ///
    /// # Errors
    /// The connection failed, or the server can't be written to: the next call makes a new connection.
    pub(crate) async fn run(
        &self,
        action: &'static str,
        pipeline: &Pipeline,
    ) -> Result<Vec<redis::RedisResult<Value>>> {
        let mut pipeline = pipeline.clone();
        pipeline.ignore_errors();
        let failed = |source| CacheError { action, source };
        let mut connection = self.connect().await.map_err(failed)?;
        // The library's own timeout is set too; this one holds whatever state the connection is in.
        let answered =
            tokio::time::timeout(self.timeout, pipeline.query_async::<Vec<redis::RedisResult<Value>>>(&mut connection))
                .await;
        let result = match answered {
            Ok(Ok(results)) => {
                match results.iter().find_map(|result| result.as_ref().err().filter(|error| is_of_the_server(error))) {
                    None => return Ok(results),
                    Some(error) => Err(error.clone()),
                }
            }
            Ok(Err(error)) => Err(error),
            Err(_) => Err(RedisError::from((ErrorKind::Io, "no answer in time"))),
        };
        *self.connection.lock().await = None;
        result.map_err(failed)
    }

    async fn connect(&self) -> redis::RedisResult<MultiplexedConnection> {
        let mut shared = self.connection.lock().await;
        if let Some(connection) = shared.as_ref() {
            return Ok(connection.clone());
        }
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(Some(self.timeout))
            .set_response_timeout(Some(self.timeout));
        let connection = self.client.get_multiplexed_async_connection_with_config(&config).await?;
        *shared = Some(connection.clone());
        Ok(connection)
    }
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

/// An answer that isn't what the script returns.
fn unexpected(action: &'static str, answer: &Value) -> CacheError {
    let shown = format!("{answer:?}").chars().take(200).collect();
    let source = RedisError::from((ErrorKind::UnexpectedReturnType, "unexpected answer", shown));
    CacheError { action, source }
}

/// Text of an answer.
pub(crate) fn text(value: &Value) -> Option<&str> {
    match value {
        Value::BulkString(bytes) => std::str::from_utf8(bytes).ok(),
        Value::SimpleString(text) => Some(text),
        _ => None,
    }
}
