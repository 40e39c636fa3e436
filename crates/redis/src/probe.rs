//! Read-only checks of Redis: the rights of the account, and the settings of the servers.

use redis::{ErrorKind, Pipeline, RedisError, Value};
use tallyd_connect::fate::Fate;
use tallyd_core::model::{Kind, Metric, Micros, Target, TargetId};

use super::error::{is_cross_slot, is_unknown_command};
use super::{Cache, Context, MAY, Result, SCRIPTS, Servers, text};

const ON_BUCKETS: [&str; 8] = ["HGET", "HGETALL", "HMGET", "HKEYS", "HLEN", "HSET", "HDEL", "EXISTS"];

const ON_BOARDS: [&str; 17] = [
    "GET", "SET", "ZCARD", "ZRANGE", "ZINCRBY", "ZADD", "ZSCORE", "ZMSCORE", "ZCOUNT", "ZREVRANK", "ZREM", "ZSCAN",
    "RENAME", "UNLINK", "PERSIST", "EXPIRE", "TTL",
];

const ON_MISSING: [&str; 1] = ["SPOP"];

/// The daemon's commands on the keys that contain the instants up to which reconciles have compared Redis with MySQL, and
/// on the site card.
const ON_NOTES: [&str; 2] = ["GET", "SET"];

const ON_FILTERS: [&str; 9] = ["HSCAN", "SSCAN", "SCARD", "STRLEN", "APPEND", "SETBIT", "SADD", "SREM", "HINCRBY"];

const ON_PLAIN: [&str; 2] = ["INCRBY", "HINCRBY"];

/// An example target. The keys of all other targets have the same name patterns.
const EXAMPLE: Target = Target { kind: Kind(1), id: TargetId(1) };

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Persistence {
    Log,
    Snapshots,
    None,
    Unknown,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scripts {
    All,
    /// Only scripts whose keys are in one slot, because several shards are behind one address.
    OneSlot,
    /// Only scripts that write each key as `KEYS[1]`, `KEYS[2]` and so on.
    LiteralKeys,
    /// The server does not know EVAL.
    None,
}

impl Cache {
    pub async fn scripts(&self) -> Result<Scripts> {
        const ACTION: &str = "run a script";
        let keys = [0, 1].map(|bucket| self.keys.counters("check", bucket));
        let mut scripts = Scripts::All;
        for keys in [&keys[..], &keys[..1]] {
            if keys.len() > 1 && matches!(self.servers, Servers::Cluster(_)) {
                continue;
            }
            let mut pipeline = Pipeline::new();
            pipeline.cmd("EVAL").arg(SCRIPTS.text).arg(keys.len()).arg(keys);
            match self.run(ACTION, &pipeline).await?.pop() {
                Some(Err(error)) if is_cross_slot(&error) => scripts = Scripts::OneSlot,
                Some(Err(error)) if error.to_string().contains("bad lua script") => return Ok(Scripts::LiteralKeys),
                Some(Err(error)) if is_unknown_command(&error) => return Ok(Scripts::None),
                Some(Err(error)) => return Err(error).context(ACTION),
                _ => {}
            }
        }
        Ok(scripts)
    }

    /// Returns the commands that the daemon needs but its account is not allowed to run, or that a server doesn't have.
    /// The check runs none of these commands.
    pub async fn missing_rights(&self, filters: bool) -> Result<Vec<String>> {
        let bucket = self.keys.counters("check", 0);
        let board = self.keys.board("check", "total");
        let mut commands = Vec::new();
        let mut need = |names: &[&str], key: &str| commands.extend(names.iter().map(|name| call(name, key)));
        need(&ON_BUCKETS, &bucket);
        need(&ON_BOARDS, &board);
        need(&ON_MISSING, &self.keys.missing());
        need(&ON_NOTES, &self.keys.compared(0));
        need(&ON_NOTES, &self.keys.site_card());
        if filters {
            need(&ON_FILTERS, &self.keys.filter("check", EXAMPLE)[0]);
        }
        if !self.is_packed() {
            need(&ON_PLAIN, &self.keys.place("check", EXAMPLE, Metric(1)).key);
        }
        let mut command = redis::cmd("EVAL");
        command.arg(MAY.text).arg(0).arg(commands);
        let mut missing = Vec::new();
        for answer in self.ask_all("check the rights of the account", command).await? {
            if let Value::Array(names) = &answer {
                missing.extend(names.iter().filter_map(text).map(str::to_owned));
            }
        }
        missing.sort_unstable();
        missing.dedup();
        Ok(missing)
    }

    pub async fn versions(&self) -> Result<Vec<String>> {
        let valkey = self.info("server", "valkey_version:").await?;
        let redis = self.info("server", "redis_version:").await?;
        let known = |name: &str, versions: std::collections::BTreeSet<String>| {
            versions.into_iter().filter(|it| !it.is_empty()).map(|it| format!("{name} {it}")).collect::<Vec<_>>()
        };
        let valkey = known("Valkey", valkey);
        Ok(if valkey.is_empty() { known("Redis", redis) } else { valkey })
    }

    pub async fn persistence(&self) -> Result<Persistence> {
        if self.info("persistence", "aof_enabled:").await?.iter().all(|enabled| enabled == "1") {
            return Ok(Persistence::Log);
        }
        let mut command = redis::cmd("CONFIG");
        command.arg("GET").arg("save");
        let answers = match self.ask_all("ask for Redis' settings", command).await {
            Err(error) if error.fate() == Fate::Refused => return Ok(Persistence::Unknown),
            answers => answers?,
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

    pub async fn clocks(&self) -> Result<(Micros, Micros)> {
        const ACTION: &str = "read Redis' clock";
        let mut clocks = Vec::new();
        for answer in self.ask_all(ACTION, redis::cmd("TIME")).await? {
            let (seconds, micros): (i64, i64) = redis::from_redis_value(answer).context(ACTION)?;
            clocks.push(Micros(seconds * 1_000_000 + micros));
        }
        let none = RedisError::from((ErrorKind::Io, "no server answers"));
        clocks.iter().min().copied().zip(clocks.iter().max().copied()).ok_or(none).context(ACTION)
    }
}

/// Returns a command with a valid count of arguments, because later versions of Redis 8 refuse to check a command with
/// a wrong count.
fn call(name: &str, key: &str) -> String {
    let arguments: &[&str] = match name {
        "EXISTS" | "UNLINK" | "GET" | "HGETALL" | "HKEYS" | "HLEN" | "PERSIST" | "SCARD" | "STRLEN" | "TTL"
        | "ZCARD" => &[name, key],
        "APPEND" | "HGET" | "INCRBY" | "ZSCORE" => &[name, key, "1"],
        "RENAME" => &[name, key, key],
        name => &[name, key, "1", "1"],
    };
    serde_json::json!(arguments).to_string()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::fs;
    use std::path::{Path, PathBuf};

    use super::*;

    /// The commands that are not checked, because the check itself runs these commands.
    const ASKED_WITH: [&str; 5] = ["PING", "TIME", "EVAL", "EVALSHA", "INFO"];

    /// The scripts of the API servers. These servers use another account.
    const OF_CLIENTS: [&str; 9] = [
        "like.lua",
        "count.lua",
        "take_back.lua",
        "limit.lua",
        "board.lua",
        "filter_has.lua",
        "note_beside.lua",
        "remember.lua",
        "may.lua",
    ];

    /// The repository's folder.
    fn root() -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
    }

    fn read(path: &str) -> String {
        fs::read_to_string(root().join(path)).unwrap()
    }

    fn set<'a>(names: impl IntoIterator<Item = &'a &'a str>) -> BTreeSet<String> {
        names.into_iter().map(|name| (*name).to_owned()).collect()
    }

    /// Returns the words in capitals that follow `before`.
    fn capitals(text: &str, before: &str) -> BTreeSet<String> {
        let words = text.split(before).skip(1);
        let word = |rest: &str| rest.chars().take_while(char::is_ascii_uppercase).collect::<String>();
        words.map(word).filter(|word| !word.is_empty()).collect()
    }

    #[test]
    fn what_is_asked_for_is_what_the_manual_grants() {
        let manual = read("docs/operations/security.md");
        let granted = |pattern: &str| {
            let mut lines = manual.lines().filter_map(|line| line.strip_prefix("ACL SETUSER tallyd "));
            let line = lines.find(|line| line.contains(pattern)).unwrap();
            line.split(' ').filter_map(|word| word.strip_prefix('+')).map(str::to_uppercase).collect::<BTreeSet<_>>()
        };
        assert_eq!(granted("~tally:*"), set(ON_BUCKETS.iter().chain(&ON_BOARDS).chain(&ON_MISSING).chain(&ASKED_WITH)));
        // Only `tallyd admin layout` needs SCAN.
        assert_eq!(granted("+incrby"), set(ON_PLAIN.iter().chain(&["SCAN"])));
        assert_eq!(granted("+setbit"), set(&ON_FILTERS));
    }

    #[test]
    fn what_the_daemons_scripts_run_is_asked_for() {
        let all = set(ON_BUCKETS
            .iter()
            .chain(&ON_BOARDS)
            .chain(&ON_MISSING)
            .chain(&ON_FILTERS)
            .chain(&ON_PLAIN)
            .chain(&ASKED_WITH));
        let mut seen = BTreeSet::new();
        for entry in
            ["lua", "crates/redis/lua"].into_iter().flat_map(|folder| fs::read_dir(root().join(folder)).unwrap())
        {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap().to_str().unwrap();
            if OF_CLIENTS.contains(&name) {
                continue;
            }
            let runs = capitals(&fs::read_to_string(&path).unwrap(), "redis.call('");
            assert!(runs.is_subset(&all), "{name} runs {:?}", runs.difference(&all));
            seen.extend(runs);
        }
        assert!(seen.contains("SET") && seen.contains("HINCRBY"), "{seen:?}");
    }

    #[test]
    fn what_the_daemon_runs_itself_is_asked_for() {
        // These commands are not checked. They drop a layout or all filters, find the nodes of a Cluster, read
        // settings, ask sentinels for the master, or ask the master for its role. Only the client uses SADD, to add to
        // the list of missing buckets.
        let beside = ["SCAN", "CLUSTER", "ASKING", "SADD", "CONFIG", "SENTINEL", "ROLE"];
        let asked = ON_BUCKETS.iter().chain(&ON_BOARDS).chain(&ON_MISSING).chain(&ON_FILTERS).chain(&ON_PLAIN);
        let all = set(asked.chain(&ASKED_WITH).chain(&beside));
        for entry in fs::read_dir(root().join("crates/redis/src")).unwrap() {
            let path = entry.unwrap().path();
            let runs = capitals(&fs::read_to_string(&path).unwrap(), "cmd(\"");
            assert!(runs.is_subset(&all), "{} runs {:?}", path.display(), runs.difference(&all));
        }
    }
}
