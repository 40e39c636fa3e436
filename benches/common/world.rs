//! A world: the database, exchange and queues of one measurement, on the servers of `dev/up`.

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use redis::AsyncConnectionConfig;
use redis::aio::MultiplexedConnection;
use sqlx::{AssertSqlSafe, MySqlPool};
use tallyd_base::config::{Config, Consumer, Writes};
use tallyd_core::card::Card;
use tallyd_core::event::encode_fence;
use tallyd_core::fence::Depth;
use tallyd_mysql::Store;
use tallyd_rabbitmq::Broker;
use tallyd_redis::Cache;

/// Limit on a Redis call. The library's default of half a second is too short: when a board of a million members
/// expires, Redis can answer no one for longer than that.
const REDIS_CALL_MAX: Duration = Duration::from_mins(1);

/// Time between two questions for the length of a queue.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// The settings of peers, if they differ from those of tallyd. Other consumers often use smaller batches and a longer
/// linger time (the wait for a full batch).
#[derive(Clone, Copy, Debug, Default)]
pub struct Peers {
    pub batch: Option<usize>,
    pub prefetch: Option<u16>,
    pub linger_ms: Option<u64>,
}

/// The settings of tallyd. Peers get the same values, except those in `peers`.
#[derive(Clone, Copy, Debug)]
pub struct Setup {
    pub partitions: u16,
    pub batch_events_max: usize,
    /// `None`: the default, but at least two batches.
    pub prefetch: Option<u16>,
    pub linger_ms: u64,
    pub peers: Peers,
    pub dead_letters_max: u64,
    /// The writer of the like counters in Redis: the daemon or the API servers.
    pub likes_by: Writes,
    /// Further configuration: the `[metrics]` table and the `[[rule]]` blocks.
    pub metrics: &'static str,
}

impl Default for Setup {
    fn default() -> Self {
        let Consumer { batch_events_max, linger_ms, dead_letters_max, .. } = Config::default().consumer;
        Self {
            partitions: 1,
            batch_events_max,
            prefetch: None,
            linger_ms,
            peers: Peers::default(),
            dead_letters_max,
            likes_by: Writes::Daemon,
            metrics: "",
        }
    }
}

impl Setup {
    fn prefetch(self) -> u16 {
        let least = || u16::try_from(self.batch_events_max * 2).unwrap_or(u16::MAX);
        self.prefetch.unwrap_or_else(|| least().max(Config::default().amqp.prefetch))
    }
}

pub struct World {
    pub name: String,
    pub config: Config,
    pub broker: Broker,
    pub pool: MySqlPool,
    pub setup: Setup,
    folder: tempfile::TempDir,
    admin_url: String,
}

impl World {
    /// Makes a database with tallyd's tables, an exchange and queues. All are empty.
    pub async fn new(name: &str, setup: Setup) -> Result<Self> {
        let name = format!("bench_{}_{}", name.replace('-', "_"), std::process::id());
        let admin_url = stack("MYSQL_URL")?;
        let admin = MySqlPool::connect(&format!("{admin_url}mysql")).await.context("connect to MySQL")?;
        sqlx::query(AssertSqlSafe(format!("CREATE DATABASE {name}"))).execute(&admin).await?;
        admin.close().await;
        let folder = tempfile::tempdir()?;
        let path = folder.path().join("config.toml");
        fs::write(&path, config_text(&name, &admin_url, setup)?)?;
        let config = tallyd_base::config::load(&path).context("load the generated configuration")?;
        let broker = Broker::new(&config.amqp)?;
        let store = Store::new(&config.mysql, 1)?;
        store.migrate().await?;
        store.close().await;
        let pool = MySqlPool::connect(config.mysql.url.expose()).await.context("connect to MySQL")?;
        let link = broker.connect("bench").await?;
        broker.declare_for(&link, broker.partitions()).await?;
        // Not every benchmark runs a daemon, which writes the same card.
        let cache = Cache::new(&config.redis, &config.metrics)?;
        cache.write_site_card(&Card::from(&config).encode()).await?;
        Ok(Self { name, config, broker, pool, setup, folder, admin_url })
    }

    pub fn config_path(&self) -> PathBuf {
        self.folder.path().join("config.toml")
    }

    /// Writes the configuration of a gateway that listens on any free port. Returns the path of this file.
    pub fn gateway_path(&self) -> Result<PathBuf> {
        let Config { amqp, mysql, redis, .. } = &self.config;
        let path = self.folder.path().join("gateway.toml");
        let text = format!(
            "[gateway]\nlisten = \"127.0.0.1:0\"\n[log]\nformat = \"json\"\n[amqp]\nurl = \"{}\"\n[mysql]\nurl = \"{}\"\n\
             [redis]\nurl = \"{}\"\nkey_prefix = \"{}\"\n",
            amqp.url.expose(),
            mysql.url.expose(),
            redis.url.expose(),
            redis.key_prefix
        );
        fs::write(&path, text)?;
        Ok(path)
    }

    /// Opens a connection to Redis.
    pub async fn redis(&self) -> Result<MultiplexedConnection> {
        let client = redis::Client::open(self.config.redis.url.expose())?;
        let config = AsyncConnectionConfig::new().set_response_timeout(Some(REDIS_CALL_MAX));
        client.get_multiplexed_async_connection_with_config(&config).await.context("connect to Redis")
    }

    /// Fails unless every queue is empty. A message that is still in a queue was never acknowledged.
    pub async fn assert_drained(&self) -> Result<()> {
        let publisher = self.broker.connect_publisher("bench").await?;
        for partition in 0..self.broker.partitions() {
            let queue = self.broker.queue(partition);
            let mut fences = 0;
            let left = loop {
                match publisher.depth(&queue).await? {
                    Depth::Known { messages, .. } => break messages.saturating_sub(fences),
                    // RabbitMQ states no fact about a queue without consumers and messages. A daemon drops the fence.
                    Depth::Unknown if fences == 0 => {
                        publisher.publish_behind(&queue, &encode_fence(0)).await?;
                        fences = 1;
                    }
                    Depth::Unknown => tokio::time::sleep(LOOK_EVERY).await,
                }
            };
            ensure!(left == 0, "{left} messages of {queue} were not acknowledged");
        }
        Ok(())
    }

    /// Deletes the keys, because keys that stay in Redis would disturb the next benchmark.
    async fn forget_keys(&self) -> Result<()> {
        let mut redis = self.redis().await?;
        let mut cursor = 0_u64;
        loop {
            let mut scan = redis::cmd("SCAN");
            scan.arg(cursor).arg("MATCH").arg(format!("{}:*", self.name)).arg("COUNT").arg(1_000);
            let (next, keys): (u64, Vec<String>) = scan.query_async(&mut redis).await?;
            if !keys.is_empty() {
                let () = redis::cmd("UNLINK").arg(keys).query_async(&mut redis).await?;
            }
            if next == 0 {
                return Ok(());
            }
            cursor = next;
        }
    }

    /// Deletes everything that this measurement created, also after a failure: leftovers would slow down the next
    /// measurement. Returns the measurement's result.
    ///
    /// # Errors
    /// Returns the measurement's error before an error of the deletion, which it often causes.
    pub async fn close<T>(self, measured: Result<T>) -> Result<T> {
        let removed = self.remove().await;
        let measured = measured?;
        removed.context("delete what the measurement created")?;
        Ok(measured)
    }

    async fn remove(self) -> Result<()> {
        let link = self.broker.connect("bench").await?;
        let queues = (0..self.broker.partitions()).map(|partition| self.broker.queue(partition));
        for queue in queues.chain([format!("{}.returned", self.name)]) {
            link.channel.queue_delete(queue.into(), Default::default()).await?;
        }
        for exchange in ["events", "partitions"] {
            link.channel.exchange_delete(format!("{}.{exchange}", self.name).into(), Default::default()).await?;
        }
        self.forget_keys().await?;
        self.pool.close().await;
        let admin = MySqlPool::connect(&format!("{}mysql", self.admin_url)).await?;
        sqlx::query(AssertSqlSafe(format!("DROP DATABASE {}", self.name))).execute(&admin).await?;
        admin.close().await;
        Ok(())
    }
}

/// Returns the value of a variable that `dev/up --print-env` prints.
pub fn stack(name: &str) -> Result<String> {
    let variable = format!("TALLYD_STACK_{name}");
    std::env::var(&variable).with_context(|| format!("{variable} is not set: run the benchmarks with dev/bench"))
}

fn config_text(name: &str, admin_url: &str, setup: Setup) -> Result<String> {
    let Setup { partitions, batch_events_max, linger_ms, dead_letters_max, likes_by, metrics, .. } = setup;
    let writer = match likes_by {
        Writes::Api => "api",
        Writes::Daemon => "daemon",
    };
    // A message has about 120 bytes. This limit in bytes is so high that the maximum number of events always limits a
    // batch first.
    let bytes_max = (batch_events_max * 256).max(Config::default().consumer.batch_bytes_max);
    Ok(format!(
        "[amqp]\nurl = \"{}\"\nprefix = \"{name}\"\npartitions = {partitions}\nprefetch = {}\n\
         [mysql]\nurl = \"{admin_url}{name}\"\n[redis]\nurl = \"{}\"\nkey_prefix = \"{name}:\"\n\
         [consumer]\nbatch_events_max = {batch_events_max}\nbatch_bytes_max = {bytes_max}\n\
         linger_ms = {linger_ms}\ndead_letters_max = {dead_letters_max}\n\
         [reconcile]\nchanged_cron = \"\"\nfull_cron = \"\"\nwatch_every = \"0s\"\n[archive]\ncron = \"\"\n[admin]\nlisten = \"\"\ncontrol = \"\"\n\
         [log]\nlevel = \"info,tallyd::consumer::session::writing=debug\"\nformat = \"json\"\n\
         [[rule]]\nmetric = \"like\"\nwriter = \"{writer}\"\n[[board]]\nname = \"bench\"\nperiod = \"week\"\narchive_grace = \"0s\"\n{metrics}",
        stack("AMQP_URL")?,
        setup.prefetch(),
        stack("REDIS_URL")?,
    ))
}
