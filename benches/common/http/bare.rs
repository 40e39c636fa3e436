//! The bare HTTP handler. It publishes the events of a request with confirms on one channel, and does not check them. It
//! reads counters with one pipeline, on one connection.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::{Context, Result};
use axum::Router;
use axum::body::Bytes;
use axum::extract::{RawQuery, State};
use axum::http::StatusCode;
use axum::routing::{get, post};
use futures_util::future::join_all;
use hyper::server::conn::http1;
use hyper_util::rt::TokioIo;
use hyper_util::service::TowerToHyperService;
use lapin::options::{BasicPublishOptions, ConfirmSelectOptions};
use lapin::{BasicProperties, Channel, Confirmation, Connection, ConnectionProperties};
use redis::aio::MultiplexedConnection;
use serde::Serialize;
use tallyd_base::config::Config;
use tallyd_core::event::split;
use tallyd_core::keys::LOADED;
use tallyd_core::model::{Kind, Target, TargetId};
use tallyd_rabbitmq::Broker;
use tallyd_redis::Cache;
use tokio::net::TcpListener;

struct Bare {
    channel: Channel,
    exchange: String,
    /// Messages so far. This number is the routing key of the next message, so that messages are spread over the
    /// queues.
    messages: AtomicU64,
    reader: Reader,
}

/// Reads counters with one pipelined HMGET for each target, from the same buckets as tallyd's client.
#[derive(Clone)]
pub struct Reader {
    redis: MultiplexedConnection,
    cache: Cache,
}

#[derive(Serialize)]
struct Counters {
    kind: &'static str,
    counters: Vec<Counter>,
}

#[derive(Serialize)]
struct Counter {
    id: String,
    source: &'static str,
    like: Option<i64>,
}

/// Serves until the process is killed.
pub async fn serve(config: &Config) -> Result<()> {
    let url = config.amqp.url.expose();
    let connection = Connection::connect(url, ConnectionProperties::default()).await.context("connect to RabbitMQ")?;
    let channel = connection.create_channel().await?;
    channel.confirm_select(ConfirmSelectOptions::default()).await?;
    let exchange = Broker::new(&config.amqp)?.exchange();
    let reader = Reader::new(config).await?;
    let bare = Arc::new(Bare { channel, exchange, messages: AtomicU64::new(0), reader });
    let routes = Router::new().route("/v1/events", post(publish)).route("/v1/counters", get(read)).with_state(bare);
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    eprintln!(r#"{{"address":"{}"}}"#, listener.local_addr()?);
    loop {
        let (stream, _) = listener.accept().await?;
        let routes = TowerToHyperService::new(routes.clone());
        tokio::spawn(http1::Builder::new().serve_connection(TokioIo::new(stream), routes));
    }
}

async fn publish(State(bare): State<Arc<Bare>>, body: Bytes) -> StatusCode {
    let published = if body.first() == Some(&b'[') {
        let Ok(events) = split(&body) else { return StatusCode::BAD_REQUEST };
        join_all(events.into_iter().map(|event| bare.send(event.get().as_bytes()))).await.into_iter().collect()
    } else {
        bare.send(&body).await
    };
    if published.is_ok() { StatusCode::ACCEPTED } else { StatusCode::SERVICE_UNAVAILABLE }
}

async fn read(State(bare): State<Arc<Bare>>, RawQuery(query): RawQuery) -> Result<Vec<u8>, StatusCode> {
    let ids = query.as_deref().and_then(|query| query.split_once("ids=")).ok_or(StatusCode::BAD_REQUEST)?.1;
    let ids: Vec<u64> =
        ids.split(',').map(str::parse).collect::<Result<_, _>>().map_err(|_| StatusCode::BAD_REQUEST)?;
    let likes = bare.reader.likes(&ids).await.map_err(|_| StatusCode::SERVICE_UNAVAILABLE)?;
    let counter = |(id, like): (&u64, Option<i64>)| Counter { id: id.to_string(), source: "redis", like };
    let counters = Counters { kind: "video", counters: ids.iter().zip(likes).map(counter).collect() };
    serde_json::to_vec(&counters).map_err(|_| StatusCode::INTERNAL_SERVER_ERROR)
}

impl Reader {
    pub async fn new(config: &Config) -> Result<Self> {
        let client = redis::Client::open(config.redis.url.expose())?;
        let redis = client.get_multiplexed_async_connection().await.context("connect to Redis")?;
        Ok(Self { redis, cache: Cache::new(&config.redis, &config.metrics)? })
    }

    /// Returns the likes of these videos. `None` if Redis does not have the number.
    pub async fn likes(&self, ids: &[u64]) -> Result<Vec<Option<i64>>> {
        let mut pipeline = redis::Pipeline::with_capacity(ids.len());
        for id in ids {
            let bucket = self.cache.keys.bucket(Target { kind: Kind(1), id: TargetId(*id) });
            pipeline.cmd("HMGET").arg(self.cache.keys.counters("video", bucket)).arg(LOADED).arg(*id);
        }
        let found: Vec<(Option<String>, Option<String>)> = pipeline.query_async(&mut self.redis.clone()).await?;
        Ok(found.into_iter().map(|(loaded, like)| loaded.and_then(|_| like?.parse().ok())).collect())
    }
}

impl Bare {
    async fn send(&self, body: &[u8]) -> Result<()> {
        let key = self.messages.fetch_add(1, Ordering::Relaxed).to_string();
        let (exchange, options) = (self.exchange.as_str().into(), BasicPublishOptions::default());
        let properties = BasicProperties::default().with_content_type("application/json".into()).with_delivery_mode(2);
        let sent = self.channel.basic_publish(exchange, key.as_str().into(), options, body, properties);
        let confirmation = sent.await?.await?;
        anyhow::ensure!(matches!(confirmation, Confirmation::Ack(None)), "not confirmed");
        Ok(())
    }
}
