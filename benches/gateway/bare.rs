//! The bare HTTP handler. The handler reads the request's body and publishes the body's events with confirms on one
//! channel. The handler does not check the events.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::{Context, Result};
use axum::Router;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::StatusCode;
use axum::routing::post;
use futures_util::future::join_all;
use hyper::server::conn::http1;
use hyper_util::rt::TokioIo;
use hyper_util::service::TowerToHyperService;
use lapin::options::{BasicPublishOptions, ConfirmSelectOptions};
use lapin::{BasicProperties, Channel, Confirmation, Connection, ConnectionProperties};
use tallyd::config::Config;
use tallyd_core::event::split;
use tallyd_rabbitmq::Broker;
use tokio::net::TcpListener;

struct Bare {
    channel: Channel,
    exchange: String,
    /// Messages so far. This number is the routing key of the next message, so that messages are spread over the
    /// queues.
    messages: AtomicU64,
}

/// Serves until the process is killed.
pub async fn serve(config: &Config) -> Result<()> {
    let url = config.amqp.url.expose();
    let connection = Connection::connect(url, ConnectionProperties::default()).await.context("connect to RabbitMQ")?;
    let channel = connection.create_channel().await?;
    channel.confirm_select(ConfirmSelectOptions::default()).await?;
    let exchange = Broker::new(&config.amqp)?.exchange();
    let bare = Arc::new(Bare { channel, exchange, messages: AtomicU64::new(0) });
    let routes = Router::new().route("/v1/events", post(publish)).with_state(bare);
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
