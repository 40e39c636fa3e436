//! The connections of one API server. All users of this API server share these connections, and record their calls in
//! one history.

use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use redis::aio::MultiplexedConnection;
use tallyd_rabbitmq::{Broker, Publisher};
use tallyd_redis::Cache;
use tallyd_redis::keys::Keys;
use tokio::sync::Mutex;

use crate::history::{Answer, Call, Micros, Recorder, What};
use crate::site::Site;
use tallyd_testkit::gateway::Gateway;
use tallyd_testkit::scripts::ApiServer;

/// Time limit for Redis's answers to calls that do not use the client.
const REDIS_MAX: Duration = Duration::from_secs(2);

pub struct Seat {
    pub client: ApiServer,
    pub gateway: Option<Arc<Gateway>>,
    pub keys: Keys,
    pub broker: Broker,
    /// The channel for messages that can't be applied.
    publisher: Mutex<Option<Arc<Publisher>>>,
    /// The connection for boards of past days.
    redis: Mutex<Option<MultiplexedConnection>>,
    redis_url: String,
    recorder: Arc<Recorder>,
    /// The time when the users began.
    pub began: Micros,
}

impl Seat {
    pub fn new(site: &Site, recorder: Arc<Recorder>) -> Result<Self> {
        let config = &site.config();
        Ok(Self {
            client: ApiServer::new(config),
            gateway: site.gateway(),
            keys: Cache::new(&config.redis, &config.metrics)?.keys.clone(),
            broker: Broker::new(&config.amqp)?,
            publisher: Mutex::default(),
            redis: Mutex::default(),
            redis_url: config.redis.url.expose().to_owned(),
            recorder,
            began: crate::history::now(),
        })
    }

    pub fn note(&self, who: u32, begin: Micros, what: What, answer: Answer) {
        self.recorder.call(Call { begin, end: crate::history::now(), who, what, answer });
    }

    /// Publishes any bytes, as a faulty producer could.
    pub async fn publish(&self, routing_key: &str, body: &[u8]) -> Result<()> {
        let publisher = {
            let mut shared = self.publisher.lock().await;
            match shared.as_ref() {
                Some(publisher) => Arc::clone(publisher),
                None => Arc::clone(shared.insert(Arc::new(self.broker.connect_publisher("letters").await?))),
            }
        };
        let published = publisher.publish(&self.broker.exchange(), routing_key, body).await;
        if published.is_err() {
            *self.publisher.lock().await = None;
        }
        Ok(published?)
    }

    /// Returns the connection to Redis. After an error, drop this connection with [`Seat::drop_redis`].
    pub async fn redis(&self) -> Result<MultiplexedConnection> {
        let mut shared = self.redis.lock().await;
        if let Some(redis) = shared.as_ref() {
            return Ok(redis.clone());
        }
        let config = redis::AsyncConnectionConfig::new()
            .set_connection_timeout(Some(REDIS_MAX))
            .set_response_timeout(Some(REDIS_MAX));
        let client = redis::Client::open(self.redis_url.as_str())?;
        let redis = client.get_multiplexed_async_connection_with_config(&config).await?;
        Ok(shared.insert(redis).clone())
    }

    pub async fn drop_redis(&self) {
        *self.redis.lock().await = None;
    }
}
