//! The daemon's access to Redis, which holds data derived from MySQL. This crate contains all commands that the daemon
//! sends and all keys that it uses.
//!
//! Each server has one connection. All calls share this connection and use pipelines. The crate drops the connection
//! after an I/O error or a timeout, or if the server is a demoted master or is still loading its data. The next call
//! connects again. A command that timed out can still run later. So callers send only commands that are harmless if
//! they run late or twice. This crate never resends a command that may have run.
//!
//! On a Redis Cluster, the commands of one pipeline go to many nodes. Commands for different slots can run in any
//! order.

#![warn(unreachable_pub)]

pub mod apply;
pub mod boards;
mod card;
mod cluster;
mod compared;
pub mod config;
pub mod counters;
pub mod erase;
mod error;
pub mod feed;
pub mod filters;
mod found;
pub mod freezes;
mod link;
pub mod load;
mod login;
pub mod missing;
pub mod probe;
pub mod read;
pub mod recent;
pub mod refused;
pub mod repairs;
pub mod replies;
pub mod scan;
mod sentinel;
mod slots;
pub mod snapshots;
pub mod space;
pub mod topology;

use std::collections::BTreeSet;
use std::hash::{BuildHasher, RandomState};
use std::io::Write;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use redis::{Cmd, ErrorKind, Pipeline, RedisResult, ServerErrorKind, Value};
use tallyd_connect::fault;
use tallyd_core::keys::Keys;
use tallyd_core::kinds::Metrics;
use tallyd_core::layout::Layout;
use tallyd_core::model::Micros;

pub use tallyd_core::{bloom, keys, layout, ranks, score, template};

pub use self::error::{CacheError, Result};
use crate::config::Redis;
use cluster::Cluster;
pub use error::Context;
use found::Found;
use link::Link;
use login::Login;
use sentinel::Sentinels;

/// The maximum number of commands in one pipeline. Redis must answer the pipeline within `[redis] timeout_ms`, and live
/// traffic waits for this answer.
pub const PIPELINE_COMMANDS_MAX: usize = 500;

#[derive(Clone)]
pub struct Cache {
    servers: Servers,
    timeout: Duration,
    /// A random number of this process. Runs of two processes can have the same run number, and the random number then
    /// distinguishes these runs.
    nonce: u64,
    pub keys: Keys,
}

#[derive(Clone)]
enum Servers {
    One(Arc<Link>),
    Cluster(Arc<Cluster>),
    /// One server, or a Cluster. The first calls find out which.
    Found(Arc<Found>),
}

pub struct Script {
    text: &'static str,
    hash: OnceLock<String>,
}

impl Script {
    pub const fn new(text: &'static str) -> Self {
        Self { text, hash: OnceLock::new() }
    }

    fn hash(&self) -> &str {
        self.hash.get_or_init(|| redis::Script::new(self.text).get_hash().to_owned())
    }
}

pub static LIMIT: Script = Script::new(include_str!("../../../lua/limit.lua"));
pub(crate) static BOARD: Script = Script::new(include_str!("../../../lua/board.lua"));
static SAMPLE: Script = Script::new(include_str!("../lua/sample.lua"));
static SAMPLE_PLAIN: Script = Script::new(include_str!("../../../lua/sample_plain.lua"));
static REPAIR: Script = Script::new(include_str!("../lua/repair.lua"));
static REPAIR_PLAIN: Script = Script::new(include_str!("../lua/repair_plain.lua"));
static COUNT_NUMBERS: Script = Script::new(include_str!("../lua/count_numbers.lua"));
static LOAD: Script = Script::new(include_str!("../lua/load.lua"));
static APPLY: Script = Script::new(include_str!("../lua/apply.lua"));
static APPLY_PLAIN: Script = Script::new(include_str!("../lua/apply_plain.lua"));
pub(crate) static FILTER_HAS: Script = Script::new(include_str!("../../../lua/filter_has.lua"));
static FILTER_NOTE: Script = Script::new(include_str!("../lua/filter_note.lua"));
static BOARD_CLAIM: Script = Script::new(include_str!("../lua/board_claim.lua"));
static BOARD_READ: Script = Script::new(include_str!("../../../lua/board_read.lua"));
static BOARD_FREEZE: Script = Script::new(include_str!("../lua/board_freeze.lua"));
static BOARD_MERGE: Script = Script::new(include_str!("../lua/board_merge.lua"));
static BOARD_STAY: Script = Script::new(include_str!("../lua/board_stay.lua"));
static BOARD_ERASE: Script = Script::new(include_str!("../lua/board_erase.lua"));
static BOARD_END: Script = Script::new(include_str!("../lua/board_end.lua"));
static BOARD_MARK: Script = Script::new(include_str!("../lua/board_mark.lua"));
static BOARD_SCAN: Script = Script::new(include_str!("../lua/board_scan.lua"));
static BOARD_FILL: Script = Script::new(include_str!("../lua/board_fill.lua"));
static BOARD_RAISE: Script = Script::new(include_str!("../lua/board_raise.lua"));
static SCRIPTS: Script = Script::new(include_str!("../lua/scripts.lua"));
static MAY: Script = Script::new(include_str!("../lua/may.lua"));

pub struct Call {
    script: &'static Script,
    keys: Vec<String>,
    /// All arguments, in one buffer because there may be millions of arguments.
    arguments: Vec<u8>,
    /// The position in the buffer at which each argument ends.
    ends: Vec<usize>,
}

impl Call {
    pub fn new(script: &'static Script, key: String) -> Self {
        Self { script, keys: vec![key], arguments: Vec::new(), ends: Vec::new() }
    }

    /// Adds a key. The key must be in the same slot as the first key.
    pub fn key(mut self, key: String) -> Self {
        self.keys.push(key);
        self
    }

    pub fn arg(mut self, argument: impl AsRef<[u8]>) -> Self {
        self.arguments.extend_from_slice(argument.as_ref());
        self.ends.push(self.arguments.len());
        self
    }

    pub fn number(mut self, number: impl std::fmt::Display) -> Self {
        // Writing to a vector can't fail.
        let _ = write!(self.arguments, "{number}");
        self.ends.push(self.arguments.len());
        self
    }

    fn command(&self, with_text: bool) -> Cmd {
        let mut command = Cmd::new();
        if with_text {
            command.arg("EVAL").arg(self.script.text);
        } else {
            command.arg("EVALSHA").arg(self.script.hash());
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
    pub fn new(config: &Redis, metrics: &Metrics) -> Result<Self> {
        let timeout = Duration::from_millis(config.timeout_ms);
        let login = Login::new(config, timeout);
        let servers = if config.cluster {
            Cluster::new(config, login).map(|cluster| Servers::Cluster(Arc::new(cluster)))
        } else if config.sentinels.is_empty() {
            Link::new(login, false).map(|link| Servers::One(Arc::new(link)))
        } else {
            Sentinels::new(config, login.clone())
                .map(|sentinels| Servers::One(Arc::new(Link::watched(sentinels, login))))
        };
        let servers = servers.context("read [redis] url")?;
        let layout = config.layout().map_err(|error| CacheError::wrong("read [redis] counter_key", error))?;
        let nonce = RandomState::new().hash_one(std::process::id());
        Ok(Self { servers, timeout, nonce, keys: Keys::new(&config.key_prefix, metrics, layout) })
    }

    /// Makes a client that needs only the addresses and `key_prefix` of `config`: it finds out whether the server
    /// belongs to a Cluster. The names of the keys are those of the default layout.
    pub fn found(config: &Redis) -> Result<Self> {
        let config = config.addresses();
        let cache = Self::new(&config, &Metrics::default())?;
        if config.cluster || !config.sentinels.is_empty() {
            return Ok(cache);
        }
        let found = Found::new(&config, Login::new(&config, cache.timeout)).context("read [redis] url")?;
        Ok(Self { servers: Servers::Found(Arc::new(found)), ..cache })
    }

    #[must_use]
    pub fn in_layout(&self, metrics: &Metrics, layout: Layout) -> Self {
        Self { keys: self.keys.in_layout(metrics, layout), ..self.clone() }
    }

    #[must_use]
    pub fn named(&self, metrics: &Metrics) -> Self {
        Self { keys: self.keys.named(metrics), ..self.clone() }
    }

    pub fn also(&self, config: &Redis, metrics: &Metrics) -> Result<Option<Self>> {
        let Some(also) = &config.also else { return Ok(None) };
        let layout = also.layout().map_err(|error| CacheError::wrong("read [redis.also] counter_key", error))?;
        Ok(Some(Self { keys: Keys::new(&config.key_prefix, metrics, layout), ..self.clone() }))
    }

    pub async fn ping(&self) -> Result<()> {
        self.ask_all("ping Redis", redis::cmd("PING")).await.map(drop)
    }

    pub async fn master(&self) -> Option<String> {
        match &self.servers {
            Servers::One(link) => link.master().await,
            Servers::Cluster(_) | Servers::Found(_) => None,
        }
    }

    /// This clock sets an event's `at` and a sample's cut. On a Cluster, the slowest master's, so that each event that
    /// is counted after this call has a later `at`.
    pub async fn now(&self) -> Result<Micros> {
        const ACTION: &str = "read Redis' clock";
        let read = |answer| -> RedisResult<Micros> {
            let (seconds, micros): (i64, i64) = redis::from_redis_value(answer)?;
            Ok(Micros(seconds * 1_000_000 + micros))
        };
        let clocks: RedisResult<Vec<Micros>> =
            self.ask_all(ACTION, redis::cmd("TIME")).await?.into_iter().map(read).collect();
        let clocks = clocks.context(ACTION)?;
        clocks.into_iter().min().ok_or_else(|| CacheError::unexpected(ACTION, &Value::Nil))
    }

    /// Returns a name of the data set in Redis. The name changes when a server restarts, fails over or begins a new
    /// replication. On a Cluster, the name changes if this happens to any master.
    pub async fn data_set(&self) -> Result<String> {
        let mut name = self.info("server", "run_id:").await?;
        name.extend(self.info("replication", "master_replid:").await?);
        Ok(name.into_iter().collect::<Vec<_>>().join(" "))
    }

    pub async fn eviction_policies(&self) -> Result<BTreeSet<String>> {
        self.info("memory", "maxmemory_policy:").await
    }

    pub async fn evicts_boards(&self) -> Result<bool> {
        Ok(self.eviction_policies().await?.iter().any(|policy| policy.starts_with("allkeys-")))
    }

    async fn info(&self, section: &str, name: &str) -> Result<BTreeSet<String>> {
        let mut command = redis::cmd("INFO");
        command.arg(section);
        let answers = self.ask_all("read INFO of Redis", command).await?;
        let line = |answer: &Value| {
            let line = text(answer).and_then(|text| text.lines().find_map(|line| line.strip_prefix(name)));
            line.unwrap_or_default().trim().to_owned()
        };
        Ok(answers.iter().map(line).collect())
    }

    pub async fn eval(&self, action: &'static str, calls: &[Call]) -> Result<Vec<Value>> {
        self.eval_each(action, calls).await?.into_iter().collect()
    }

    pub async fn eval_each(&self, action: &'static str, calls: &[Call]) -> Result<Vec<Result<Value>>> {
        let mut answers = Vec::with_capacity(calls.len());
        for piece in calls.chunks(PIPELINE_COMMANDS_MAX) {
            let mut pipeline = Pipeline::with_capacity(piece.len());
            for call in piece {
                pipeline.add_command(call.command(false));
            }
            if fault::strikes("script") {
                // The first answer is lost, so the scripts run twice.
                let _lost = self.run(action, &pipeline).await?;
            }
            for (call, answer) in piece.iter().zip(self.run(action, &pipeline).await?) {
                let answer = match answer {
                    // The call did not run, because the server is new or SCRIPT FLUSH ran. The next command is EVAL
                    // with the script's text. EVAL also loads the script again.
                    Err(error) if error.kind() == ErrorKind::Server(ServerErrorKind::NoScript) => {
                        let mut again = Pipeline::new();
                        again.add_command(call.command(true));
                        self.run(action, &again).await?.pop().unwrap_or(Err(error))
                    }
                    answer => answer,
                };
                answers.push(answer.context(action));
            }
        }
        Ok(answers)
    }

    pub async fn run(&self, action: &'static str, pipeline: &Pipeline) -> Result<Vec<RedisResult<Value>>> {
        let results = match &self.servers {
            Servers::One(link) => link.run(pipeline.clone(), self.timeout).await,
            Servers::Cluster(cluster) => cluster.run(pipeline).await,
            Servers::Found(found) => found.run(pipeline, self.timeout).await,
        };
        results.context(action)
    }

    /// Returns whether the keys of each script must be in one slot. One address can lead to several shards without being
    /// a Cluster, and the first refused script shows that.
    fn needs_one_slot(&self) -> bool {
        match &self.servers {
            Servers::One(link) => link.is_sharded(),
            Servers::Cluster(_) => true,
            Servers::Found(_) => false,
        }
    }

    async fn ask_all(&self, action: &'static str, command: Cmd) -> Result<Vec<Value>> {
        let answers = match &self.servers {
            Servers::One(link) => link.ask(command, self.timeout).await.map(|answer| vec![answer]),
            Servers::Cluster(cluster) => cluster.ask_all(&command).await,
            Servers::Found(found) => found.ask_all(command, self.timeout).await,
        };
        answers.context(action)
    }
}

pub fn text(value: &Value) -> Option<&str> {
    match value {
        Value::BulkString(bytes) => std::str::from_utf8(bytes).ok(),
        Value::SimpleString(text) => Some(text),
        _ => None,
    }
}
