//! The demo's data on the three servers. The demo deletes the data at the start, and reads it at the end.

use std::collections::HashMap;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use lapin::options::{ExchangeDeleteOptions, QueueDeleteOptions};
use redis::AsyncConnectionConfig;
use redis::aio::MultiplexedConnection;
use sqlx::{AssertSqlSafe, Connection, MySqlConnection, MySqlPool};
use tallyd_base::config::Config;
use tallyd_core::model::{Kind, Metric, Target, TargetId};
use tallyd_rabbitmq::Broker;
use tallyd_redis::keys::{Keys, NO_TARGET};
use tallyd_redis::{Cache, layout};

use crate::model::TARGETS;
use crate::traffic::{ARTICLE, Site, name};

/// The demo deletes only data with these names. dev/demo writes the names into the configuration.
const NAME: &str = "tallyd_demo";
const QUEUES: &str = "tally";

/// The timeout is long, because one pipeline reads all of Redis, which takes long on a busy machine.
const REDIS_TIMEOUT: Duration = Duration::from_secs(10);

/// The connections for reading the servers.
pub struct Servers {
    pub mysql: MySqlPool,
    pub redis: MultiplexedConnection,
    pub keys: Keys,
}

impl Servers {
    /// Deletes the data of an earlier demo, and connects.
    pub async fn empty(config: &Config) -> Result<Self> {
        let database = config.mysql.url.parts().map_err(anyhow::Error::msg)?.path().to_owned();
        ensure!(
            database == format!("/{NAME}")
                && config.amqp.prefix == QUEUES
                && config.redis.key_prefix == format!("{NAME}:"),
            "the demo deletes its database, keys and queues, so the database must be {NAME}, [redis] key_prefix {NAME}: and [amqp] prefix {QUEUES}"
        );
        empty_mysql(config).await.context("empty the demo's database")?;
        empty_rabbitmq(config).await.context("delete the demo's queues")?;
        let timeouts = AsyncConnectionConfig::new()
            .set_connection_timeout(Some(REDIS_TIMEOUT))
            .set_response_timeout(Some(REDIS_TIMEOUT));
        let client = redis::Client::open(config.redis.url.expose()).context("read [redis] url")?;
        let mut redis =
            client.get_multiplexed_async_connection_with_config(&timeouts).await.context("connect to Redis")?;
        empty_redis(&mut redis).await.context("delete the demo's keys")?;
        let mysql = MySqlPool::connect(config.mysql.url.expose()).await.context("connect to MySQL")?;
        Ok(Self { mysql, redis, keys: Cache::new(&config.redis, &config.metrics)?.keys })
    }

    /// Returns the number of likes of each target in Redis.
    pub async fn redis_likes(&self, kind: Kind) -> Result<HashMap<u64, i64>> {
        let mut pipeline = redis::pipe();
        for bucket in 0..self.keys.buckets() {
            pipeline.cmd("HGETALL").arg(self.keys.counters(name(kind), bucket));
        }
        let buckets: Vec<HashMap<String, String>> =
            pipeline.query_async(&mut self.redis.clone()).await.context("read all counters from Redis")?;
        let fields = buckets.iter().flatten().filter(|(field, _)| !field.starts_with(NO_TARGET));
        fields
            .map(|(field, value)| {
                let likes = layout::value(value, Metric(1));
                let likes = likes.with_context(|| format!("Redis has \"{value}\" as the counters of {field}"))?;
                Ok((field.parse().with_context(|| format!("Redis has a field \"{field}\""))?, likes))
            })
            .collect()
    }

    /// Returns how many articles' counters in Redis differ from the clicks. The gate is closed during the comparison.
    pub async fn drifted(&self, site: &Site) -> Result<u64> {
        let _closed = site.gate.write().await;
        self.different(site, ARTICLE).await
    }

    /// Returns how many counters of this kind in Redis differ from the clicks.
    pub async fn different(&self, site: &Site, kind: Kind) -> Result<u64> {
        let redis = self.redis_likes(kind).await?;
        let model = site.model();
        let is_wrong =
            |id: &u64| redis.get(id).copied().unwrap_or_default() != model.likes_of(Target { kind, id: TargetId(*id) });
        Ok((1..=TARGETS.into()).filter(is_wrong).count() as u64)
    }
}

async fn empty_mysql(config: &Config) -> Result<()> {
    let mut address = config.mysql.url.parts().map_err(anyhow::Error::msg)?;
    address.set_path("/mysql");
    let mut connection = MySqlConnection::connect(address.as_str()).await?;
    for statement in ["DROP DATABASE IF EXISTS", "CREATE DATABASE"] {
        sqlx::raw_sql(AssertSqlSafe(format!("{statement} {NAME}"))).execute(&mut connection).await?;
    }
    Ok(connection.close().await?)
}

async fn empty_rabbitmq(config: &Config) -> Result<()> {
    let broker = Broker::new(&config.amqp)?;
    let link = broker.connect("demo").await?;
    let queues = (0..broker.partitions()).map(|partition| broker.queue(partition));
    for queue in queues.chain([format!("{QUEUES}.returned")]) {
        let delete = link.channel.queue_delete(queue.into(), QueueDeleteOptions::default());
        link.call("delete a queue", delete).await?;
    }
    for exchange in ["events", "partitions"] {
        let delete =
            link.channel.exchange_delete(format!("{QUEUES}.{exchange}").into(), ExchangeDeleteOptions::default());
        link.call("delete an exchange", delete).await?;
    }
    Ok(())
}

async fn empty_redis(redis: &mut MultiplexedConnection) -> Result<()> {
    let mut cursor = 0_u64;
    loop {
        let mut scan = redis::cmd("SCAN");
        scan.arg(cursor).arg("MATCH").arg(format!("{NAME}:*")).arg("COUNT").arg(1_000);
        let (next, keys): (u64, Vec<String>) = scan.query_async(redis).await?;
        if !keys.is_empty() {
            let () = redis::cmd("UNLINK").arg(keys).query_async(redis).await?;
        }
        if next == 0 {
            return Ok(());
        }
        cursor = next;
    }
}
