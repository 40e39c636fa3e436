//! A world per test: a database and a prefix in Redis of its own, on the servers of `dev/up`; the real binary as a child
//! process.

use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use sqlx::{AssertSqlSafe, MySqlPool};
use tallyd::cache::Cache;
use tallyd::config::Config;
use tallyd::store::Store;

/// How long a fact may take to become true on a loaded machine.
pub const DEADLINE: Duration = Duration::from_secs(60);

pub struct World {
    pub name: String,
    pub folder: tempfile::TempDir,
    pub config: Config,
    pub pool: MySqlPool,
    pub cache: Cache,
    admin_url: String,
}

impl World {
    /// A migrated database and nothing in Redis. `settings` is more TOML for the configuration.
    pub async fn new(name: &str, settings: &str) -> Self {
        let name = format!("t_{name}_{}", std::process::id());
        let admin_url = stack("MYSQL_URL");
        let admin = MySqlPool::connect(&format!("{admin_url}mysql")).await.unwrap();
        sqlx::query(AssertSqlSafe(format!("CREATE DATABASE {name}"))).execute(&admin).await.unwrap();
        admin.close().await;
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("config.toml");
        let text = format!(
            "[mysql]\nurl = \"{admin_url}{name}\"\n[redis]\nurl = \"{}\"\nkey_prefix = \"{name}:\"\n{settings}",
            stack("REDIS_URL")
        );
        fs::write(&path, text).unwrap();
        let config = tallyd::config::load(&path).unwrap();
        let pool = MySqlPool::connect(config.mysql.url.expose()).await.unwrap();
        let cache = Cache::new(&config.redis).unwrap();
        Store::new(&config.mysql, 1).unwrap().migrate().await.unwrap();
        Self { name, folder, config, pool, cache, admin_url }
    }

    /// Removes what the test has made. Only after a success: a failure leaves it to be looked at.
    pub async fn close(self) {
        self.pool.close().await;
        let admin = MySqlPool::connect(&format!("{}mysql", self.admin_url)).await.unwrap();
        sqlx::query(AssertSqlSafe(format!("DROP DATABASE {}", self.name))).execute(&admin).await.unwrap();
        let mut redis = self.redis().await;
        let keys: Vec<String> =
            redis::cmd("KEYS").arg(format!("{}:*", self.name)).query_async(&mut redis).await.unwrap();
        for keys in keys.chunks(1_000) {
            let _: i64 = redis::cmd("UNLINK").arg(keys).query_async(&mut redis).await.unwrap();
        }
    }

    pub fn config_path(&self) -> PathBuf {
        self.folder.path().join("config.toml")
    }

    pub fn command(&self) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_tallyd"));
        command.arg("--config").arg(self.config_path()).env_remove("NOTIFY_SOCKET");
        command
    }

    pub async fn redis(&self) -> redis::aio::MultiplexedConnection {
        let client = redis::Client::open(self.config.redis.url.expose()).unwrap();
        client.get_multiplexed_async_connection().await.unwrap()
    }
}

/// A part of the stack's environment, as `dev/up --print-env` gives it.
pub fn stack(name: &str) -> String {
    let variable = format!("TALLYD_STACK_{name}");
    std::env::var(&variable).unwrap_or_else(|_| panic!("{variable} is not set: run the tests with dev/test"))
}

/// Waits until `fact` holds, but no longer than [`DEADLINE`].
pub async fn eventually<F: Future<Output = bool>>(what: &str, fact: impl Fn() -> F) {
    let until = Instant::now() + DEADLINE;
    while !fact().await {
        assert!(Instant::now() < until, "within {} s this did not become true: {what}", DEADLINE.as_secs());
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}
