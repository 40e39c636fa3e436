//! Gives each test its own world: a database, a prefix on the broker and a prefix in Redis, on the servers of `dev/up`.
//! A world runs the real binary as a child process (decision 0060). A model computes the expected result.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test ends at the first error")]

pub mod accounts;
mod api;
pub mod browser;
pub mod clicker;
mod daemon;
pub mod dice;
mod drained;
pub mod first_day;
pub mod gateway;
mod jobs;
mod leftovers;
mod model;
mod numbers;
pub mod ports;
pub mod private;
pub mod proxy;
pub mod scripts;
pub mod servers;
mod settings;
mod signal;
pub mod site;
pub mod size;

use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use accounts::Accounts;
pub use api::{client_of, event_of, grouping_client_of, limited_client_of, stranger_of};
pub use daemon::Daemon;
pub use dice::Dice;
use futures_util::{StreamExt, stream};
use leftovers::Leftovers;
pub use model::{Model, body, target};
pub use scripts::ApiServer;
pub use settings::{as_api, stack};
use settings::{may_do_all, write, written};
pub use signal::signal;
use sqlx::mysql::MySqlDatabaseError;
use sqlx::{AssertSqlSafe, MySqlPool, Row};
use tallyd_base::config::{Amqp, Config, Redis};
use tallyd_client::{Client, READ_TARGETS_MAX, Source};
use tallyd_core::model::{Kind, Metric, Target, TargetId, UserId};
use tallyd_mysql::Store;
use tallyd_rabbitmq::{Broker, Publisher};
use tallyd_redis::Cache;

/// How long a test waits for an expected state. The time is long, because the machine can be under heavy load.
pub const DEADLINE: Duration = Duration::from_secs(180);

const IN_FLIGHT: usize = 1_000;

static STARTED: AtomicU32 = AtomicU32::new(0);

/// The environment variables that the systemd unit sets for the daemon. A build without optimization needs a larger
/// stack for each level of a message's headers.
pub fn unit_environment() -> [(&'static str, String); 2] {
    let stack_bytes: usize = if cfg!(debug_assertions) { 512 << 20 } else { 128 << 20 };
    [("RUST_MIN_STACK", stack_bytes.to_string()), ("MALLOC_ARENA_MAX", "2".to_owned())]
}

pub struct World {
    pub name: String,
    pub folder: tempfile::TempDir,
    pub config: Config,
    pub api: Config,
    pub pool: MySqlPool,
    pub cache: Cache,
    pub broker: Broker,
    admin_url: String,
    /// The accounts of the world's daemons and commands. `None` on a test's own servers, where daemons and commands
    /// have all rights.
    pub accounts: Option<Accounts>,
    is_hurried: bool,
    _leftovers: Leftovers,
}

impl World {
    /// Creates a migrated database. The world's prefixes on the broker and in Redis have no data yet. `settings` is
    /// TOML that overrides the default configuration. In `settings`, `{world}` stands for the world's name. Programs in the world use the accounts of ops/. The test itself
    /// uses `config`, which has all rights.
    pub async fn new(name: &str, settings: &str) -> Self {
        Accounts::make_in_rabbitmq();
        Self::with(stack("MYSQL_URL"), name, settings, |world, number| Some(Accounts::new(world, number))).await
    }

    /// Like [`World::new`], but on another MySQL. `admin_url` has an account with all rights and no database name.
    pub async fn on(admin_url: String, name: &str, settings: &str) -> Self {
        Self::with(admin_url, name, settings, |_, _| None).await
    }

    async fn with(
        admin_url: String,
        name: &str,
        settings: &str,
        accounts: impl FnOnce(&str, u32) -> Option<Accounts>,
    ) -> Self {
        // Two tests of a process can give the same name, if `cargo test` runs them.
        let number = STARTED.fetch_add(1, Ordering::Relaxed);
        let name = format!("t_{name}_{number}_{}", std::process::id());
        assert!(name.len() <= 64, "{name} is too long for MySQL");
        let accounts = accounts(&name, number);
        let admin = MySqlPool::connect(&format!("{admin_url}mysql")).await.expect("connect to MySQL");
        sqlx::query(AssertSqlSafe(format!("CREATE DATABASE {name}"))).execute(&admin).await.expect("create database");
        if let Some(accounts) = &accounts {
            accounts.make_in_mysql(&admin).await;
        }
        admin.close().await;
        let folder = tempfile::tempdir().unwrap();
        let (config, api) = written(folder.path(), &name, &admin_url, accounts.as_ref(), settings);
        let pool = MySqlPool::connect(config.mysql.url.expose()).await.unwrap();
        let cache = patient_cache(&config);
        let amqp = Amqp { timeout_ms: DEADLINE.as_millis() as u64, ..config.amqp.clone() };
        let broker = Broker::new(&amqp).unwrap();
        let mysql = accounts.clone().map(|accounts| (admin_url.clone(), accounts));
        let leftovers = Leftovers { world: name.clone(), amqp: config.amqp.clone(), mysql };
        let world = Self {
            name,
            folder,
            config,
            api,
            pool,
            cache,
            broker,
            admin_url,
            accounts,
            is_hurried: false,
            _leftovers: leftovers,
        };
        world.migrate().await;
        world
    }

    async fn migrate(&self) {
        let mut mysql = self.config.mysql.clone();
        if let Some(accounts) = &self.accounts {
            mysql.url = accounts.of_migration(mysql.url.expose()).as_str().into();
        }
        Store::new(&mysql, 1).unwrap().migrate().await.expect("create the schema");
    }

    /// Changes the settings of programs that start from now on. The servers stay the same.
    pub fn set(&mut self, settings: &str) {
        let accounts = self.accounts.as_ref();
        (self.config, self.api) = written(self.folder.path(), &self.name, &self.admin_url, accounts, settings);
        self.cache = patient_cache(&self.config);
    }

    pub fn write(&self, settings: &str) {
        write(self.folder.path(), &self.name, &self.admin_url, self.accounts.as_ref(), settings);
    }

    pub fn config_path(&self) -> PathBuf {
        self.folder.path().join("config.toml")
    }

    pub fn tallyd(&self, arguments: &[&str]) -> Output {
        let mut command = self.command();
        if let (["migrate"], Some(accounts)) = (arguments, &self.accounts) {
            command.env("TALLYD__MYSQL__URL", accounts.of_migration(self.config.mysql.url.expose()));
        }
        command.args(arguments).output().unwrap()
    }

    pub fn command(&self) -> Command {
        let mut command = Command::new(program());
        command.arg("--config").arg(self.config_path()).env_remove("NOTIFY_SOCKET");
        command.envs(unit_environment());
        if self.is_hurried {
            command.env("TALLYD_TEST_PACE", size::pace().to_string());
        } else {
            command.env_remove("TALLYD_TEST_PACE");
        }
        command
    }

    pub fn daemon(&self) -> Daemon {
        self.daemon_with(&[])
    }

    pub fn daemon_with(&self, environment: &[(&str, &str)]) -> Daemon {
        let started = STARTED.fetch_add(1, Ordering::Relaxed);
        let log_path = self.log_path(started);
        let log = File::create(&log_path).unwrap();
        let environment = environment.iter().map(|(name, value)| (*name, self.as_daemon(name, value)));
        let child = self.command().arg("run").envs(environment).stdin(Stdio::null()).stderr(log).spawn().unwrap();
        Daemon::new(child, log_path)
    }

    /// Starts a daemon, and waits until it consumes.
    pub async fn consuming(&self) -> Daemon {
        self.consuming_with(&[]).await
    }

    pub async fn consuming_with(&self, environment: &[(&str, &str)]) -> Daemon {
        let daemon = self.daemon_with(environment);
        daemon.logged("\"consuming\"").await;
        daemon
    }

    fn log_path(&self, number: u32) -> PathBuf {
        self.folder.path().join(format!("daemon-{number}.log"))
    }

    /// Returns the value of an environment variable for the daemon. An address (for example, of a proxy) can contain
    /// the account that has all rights. In that case, this function puts the daemon's account into the address.
    fn as_daemon(&self, name: &str, value: &str) -> String {
        match &self.accounts {
            Some(accounts) if name.ends_with("__URL") && may_do_all(value, &self.admin_url) => {
                accounts.of_daemon(value)
            }
            _ => value.to_owned(),
        }
    }

    fn as_api(&self, name: &str, value: &str) -> String {
        match &self.accounts {
            Some(accounts) if name.ends_with("__URL") && may_do_all(value, &self.admin_url) => accounts.of_api(value),
            _ => value.to_owned(),
        }
    }

    pub async fn redis(&self) -> redis::aio::MultiplexedConnection {
        patient(self.config.redis.url.expose()).await
    }

    pub async fn publisher(&self) -> Publisher {
        let link = self.broker.connect("test").await.unwrap();
        self.broker.declare_for(&link, self.broker.partitions()).await.unwrap();
        self.broker.connect_publisher("test").await.unwrap()
    }

    pub async fn publish(&self, publisher: &Publisher, bodies: &[(UserId, Vec<u8>)]) {
        let exchange = self.broker.exchange();
        stream::iter(bodies)
            .map(|(user, body)| {
                let exchange = &exchange;
                async move { publisher.publish(exchange, &user.to_string(), body).await.unwrap() }
            })
            .buffered(IN_FLIGHT)
            .collect::<Vec<()>>()
            .await;
    }

    pub async fn count(&self, sql: &'static str) -> i64 {
        let until = Instant::now() + DEADLINE;
        loop {
            match sqlx::query_scalar(sql).fetch_one(&self.pool).await {
                // MySQL refuses the list of sessions while a statement of any of them has bytes that are no text.
                Err(error) if is_number(&error, 3854) && Instant::now() < until => {}
                counted => return counted.unwrap(),
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    pub async fn counters(&self) -> BTreeMap<Target, i64> {
        sqlx::query(
            "SELECT kind, target_id, CAST(SUM(value) AS SIGNED) FROM counter WHERE metric = 1 GROUP BY kind, target_id",
        )
        .fetch_all(&self.pool)
        .await
        .unwrap()
        .iter()
        .map(|row| (Target { kind: Kind(row.get(0)), id: TargetId(row.get(1)) }, row.get(2)))
        .collect()
    }
}

/// Connects to Redis. The library's default timeouts are too short for a machine that runs other tests.
async fn patient(url: &str) -> redis::aio::MultiplexedConnection {
    let config = redis::AsyncConnectionConfig::new();
    let config = config.set_connection_timeout(Some(DEADLINE)).set_response_timeout(Some(DEADLINE));
    let client = redis::Client::open(url).unwrap();
    client.get_multiplexed_async_connection_with_config(&config).await.unwrap()
}

/// Returns the test's own access to Redis. Like the test's access to the broker, it waits longer than a program, because
/// the machine can be under heavy load.
fn patient_cache(config: &Config) -> Cache {
    let redis = Redis { timeout_ms: DEADLINE.as_millis() as u64, ..config.redis.clone() };
    Cache::new(&redis, &config.metrics).unwrap()
}

/// Returns an environment variable for servers that a test starts itself. With `TALLYD_STACK_SYNC=no`, neither these
/// servers nor the servers of dev/up wait for the disk.
pub fn without_disk() -> Option<(&'static str, std::ffi::OsString)> {
    std::env::var_os("TALLYD_STACK_PRELOAD").map(|library| ("LD_PRELOAD", library))
}

pub fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap()
}

/// Returns the path of the tallyd binary. If a test belongs to the package tallyd, Cargo and nextest tell the test this
/// path. Other programs find the binary in the folder of their own build.
pub fn program() -> PathBuf {
    if let Some(named) = std::env::var_os("CARGO_BIN_EXE_tallyd") {
        return named.into();
    }
    let own = std::env::current_exe().unwrap();
    let folder = own.parent().unwrap();
    folder.parent().filter(|_| folder.ends_with("deps")).unwrap_or(folder).join("tallyd")
}

/// Whether the server gave this error number.
pub fn is_number(error: &sqlx::Error, number: u16) -> bool {
    let error = error.as_database_error().and_then(|error| error.try_downcast_ref::<MySqlDatabaseError>());
    error.is_some_and(|error| error.number() == number)
}

pub async fn eventually<F: Future<Output = bool>>(what: &str, fact: impl Fn() -> F) {
    eventually_each(Duration::from_millis(20), what, fact).await;
}

/// Does the same as [`eventually`], with a longer pause between two looks. A look that starts a process takes much CPU
/// time.
pub async fn eventually_each<F: Future<Output = bool>>(pause: Duration, what: &str, fact: impl Fn() -> F) {
    let until = Instant::now() + DEADLINE;
    while !fact().await {
        assert!(Instant::now() < until, "after {} s this is still not true: {what}", DEADLINE.as_secs());
        tokio::time::sleep(pause).await;
    }
}

/// Changes a counter in Redis directly, so that the daemon does not know of the change.
pub async fn drift(world: &World, target: Target, by: i64) {
    let key = world.cache.keys.counters("video", world.cache.keys.bucket(target));
    let mut redis = world.redis().await;
    let script = "local v = tonumber(redis.call('HGET', KEYS[1], ARGV[1]) or 0) + ARGV[2] \
                  redis.call('HSET', KEYS[1], ARGV[1], v) return v";
    let _: i64 = redis::Script::new(script).key(key).arg(target.id.0).arg(by).invoke_async(&mut redis).await.unwrap();
}

pub async fn lose(world: &World) {
    let mut redis = world.redis().await;
    for bucket in 0..world.cache.keys.buckets() {
        let key = world.cache.keys.counters("video", bucket);
        let _: i64 = redis::cmd("UNLINK").arg(key).query_async(&mut redis).await.unwrap();
    }
}

pub fn stdout(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

pub fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

pub async fn redis_likes(client: &Client, targets: &[Target]) -> Vec<Option<i64>> {
    let mut likes = Vec::with_capacity(targets.len());
    for some in targets.chunks(READ_TARGETS_MAX) {
        let numbers = client.read(some).await.unwrap();
        let known = numbers.iter().map(|it| it.get(Metric(1)).filter(|likes| likes.source == Source::Redis));
        likes.extend(known.map(|likes| likes.map(|likes| likes.value)));
    }
    likes
}
