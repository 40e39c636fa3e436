//! Questions to Redis that change nothing: what the account may do, and how the servers are set.

use redis::{ErrorKind, RedisError, ServerErrorKind, Value};

use super::{Cache, CacheError, MAY, Result, text};
use crate::model::{Kind, Metric, Micros, Target, TargetId};

/// What the daemon runs on a bucket of counters.
const ON_BUCKETS: [&str; 8] = ["HGET", "HGETALL", "HMGET", "HKEYS", "HLEN", "HSET", "HDEL", "EXISTS"];

/// What it runs on a board.
const ON_BOARDS: [&str; 15] = [
    "ZCARD", "ZRANGE", "ZINCRBY", "ZADD", "ZSCORE", "ZMSCORE", "ZCOUNT", "ZREVRANK", "ZREM", "ZSCAN", "RENAME",
    "UNLINK", "PERSIST", "EXPIRE", "TTL",
];

/// What it runs on filters.
const ON_FILTERS: [&str; 7] = ["HSCAN", "SSCAN", "SCARD", "STRLEN", "APPEND", "SETBIT", "SREM"];

/// What it runs on the keys of the layouts entity and string.
const ON_PLAIN: [&str; 2] = ["INCRBY", "HINCRBY"];

/// A target whose keys have the names that all keys have.
const EXAMPLE: Target = Target { kind: Kind(1), id: TargetId(1) };

/// Whether what Redis has outlives a restart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Persistence {
    /// Every write is logged.
    Log,
    /// The whole from time to time.
    Snapshots,
    /// Nothing.
    None,
    /// The account may not ask.
    Unknown,
}

impl CacheError {
    /// The account is refused, or may not run the command.
    pub fn is_refusal(&self) -> bool {
        self.source.kind() == ErrorKind::AuthenticationFailed
            || self.source.kind() == ErrorKind::Server(ServerErrorKind::NoPerm)
            || matches!(self.source.code(), Some("NOAUTH" | "WRONGPASS" | "NOPERM"))
    }
}

impl Cache {
    /// Commands that the daemon needs and its account may not run, or that a server doesn't know. None of them is run.
    ///
    /// # Errors
    /// Redis is away, or the account may not run scripts.
    pub async fn missing_rights(&self, filters: bool) -> Result<Vec<String>> {
        let bucket = self.keys.counters("check", 0);
        let board = self.keys.board("check", "total");
        let mut commands = Vec::new();
        let mut need = |names: &[&str], key: &str| commands.extend(names.iter().map(|name| call(name, key)));
        need(&ON_BUCKETS, &bucket);
        need(&ON_BOARDS, &board);
        need(&["SPOP"], &self.keys.missing());
        if filters {
            need(&ON_FILTERS, &self.keys.filter("check", EXAMPLE)[0]);
        }
        if !self.is_packed() {
            need(&ON_PLAIN, &self.keys.place("check", EXAMPLE, Metric(1)).key);
        }
        let mut command = redis::cmd("EVAL");
        command.arg(MAY.text).arg(0).arg(commands);
        let mut missing = Vec::new();
        for answer in self.ask_all("ask what the account may do", command).await? {
            if let Value::Array(names) = &answer {
                missing.extend(names.iter().filter_map(text).map(str::to_owned));
            }
        }
        missing.sort_unstable();
        missing.dedup();
        Ok(missing)
    }

    /// What the servers call themselves: `Redis 7.2.4`, `Valkey 9.0.1`, each once.
    ///
    /// # Errors
    /// Redis is away, or the account may not ask.
    pub async fn versions(&self) -> Result<Vec<String>> {
        let valkey = self.info("server", "valkey_version:").await?;
        let redis = self.info("server", "redis_version:").await?;
        let known = |name: &str, versions: std::collections::BTreeSet<String>| {
            versions.into_iter().filter(|it| !it.is_empty()).map(|it| format!("{name} {it}")).collect::<Vec<_>>()
        };
        let valkey = known("Valkey", valkey);
        Ok(if valkey.is_empty() { known("Redis", redis) } else { valkey })
    }

    /// Whether what the servers have outlives a restart: of the one that keeps the least.
    ///
    /// # Errors
    /// Redis is away, or the account may not ask.
    pub async fn persistence(&self) -> Result<Persistence> {
        if self.info("persistence", "aof_enabled:").await?.iter().all(|enabled| enabled == "1") {
            return Ok(Persistence::Log);
        }
        let mut command = redis::cmd("CONFIG");
        command.arg("GET").arg("save");
        let Ok(answers) = self.ask_all("ask for Redis' settings", command).await else {
            return Ok(Persistence::Unknown);
        };
        let points = |answer: &Value| match answer {
            Value::Array(parts) => parts.get(1).and_then(text).map(str::to_owned),
            Value::Map(pairs) => pairs.first().and_then(|pair| text(&pair.1)).map(str::to_owned),
            _ => None,
        };
        let points: Option<Vec<String>> = answers.iter().map(points).collect();
        Ok(match points {
            None => Persistence::Unknown,
            Some(points) if points.iter().any(String::is_empty) => Persistence::None,
            Some(_) => Persistence::Snapshots,
        })
    }

    /// The clocks that are furthest apart: the slowest, and the fastest. On one server they are the same.
    ///
    /// # Errors
    /// Redis is away, or the account may not ask.
    pub async fn clocks(&self) -> Result<(Micros, Micros)> {
        const ACTION: &str = "read Redis' clock";
        let mut clocks = Vec::new();
        for answer in self.ask_all(ACTION, redis::cmd("TIME")).await? {
            let (seconds, micros): (i64, i64) =
                redis::from_redis_value(answer).map_err(|error| CacheError { action: ACTION, source: error.into() })?;
            clocks.push(Micros(seconds * 1_000_000 + micros));
        }
        let none = || CacheError { action: ACTION, source: RedisError::from((ErrorKind::Io, "no server answers")) };
        clocks.iter().min().copied().zip(clocks.iter().max().copied()).ok_or_else(none)
    }
}

/// A command with as many arguments as show its keys.
fn call(name: &str, key: &str) -> String {
    let arguments: &[&str] = match name {
        // All that follows is keys.
        "EXISTS" | "UNLINK" => &[name, key],
        "RENAME" => &[name, key, key],
        name => &[name, key, "1", "1"],
    };
    serde_json::json!(arguments).to_string()
}
