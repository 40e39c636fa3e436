//! RabbitMQ: connections, the topology, confirmed publishing. A connection that consumes never publishes. During a
//! memory alarm, the broker stops reading from connections that publish. If such a connection also consumed messages,
//! the broker would not read its acknowledgements either.
//!
//! This crate does not reconnect. The caller drops a [`Link`] after the first error and opens a new link. The library's
//! own recovery is switched off, because after some errors a recovered consumer would wait forever. The library's calls
//! have no time limit, so this crate sets a time limit for each call.

#![warn(unreachable_pub)]

pub mod config;
mod error;
mod frames;
mod lower;
mod maps;
mod nodes;
pub mod probe;
mod topology;
mod witnesses;

use std::error::Error;
use std::future::Future;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use lapin::message::BasicGetMessage;
use lapin::options::{
    BasicGetOptions, BasicNackOptions, BasicPublishOptions, ConfirmSelectOptions, QueueDeclareOptions,
};
use lapin::tcp::{OwnedIdentity, OwnedTLSConfig};
use lapin::types::{AMQPValue, FieldTable};
use lapin::uri::AMQPScheme;
use lapin::{BasicProperties, Channel, Confirmation, Connection, ConnectionProperties, Queue};

use frames::FrameLimit;
use nodes::{Node, Nodes};
use witnesses::Witnesses;

use tallyd_connect::fault;
use tallyd_connect::opened::OPENED;
use tallyd_connect::tls::{self, Identity, TlsFault};
use tallyd_connect::whole::Whole;
use tallyd_core::fence::Depth;
use tallyd_core::partition::Partitions;
use tallyd_core::traceparent::HEADER;

pub use self::error::{BrokerError, Result};
pub use self::maps::MapQueue;
use crate::config::Amqp;

const PERSISTENT: u8 = 2;

#[derive(Clone)]
pub struct Broker {
    config: Amqp,
    nodes: Arc<Nodes>,
    frames: Arc<FrameLimit>,
    witnesses: Arc<Witnesses>,
    vhost: String,
    tls: OwnedTLSConfig,
}

/// One connection with one channel. When the link is dropped, the connection and the channel close, and the broker
/// requeues unacknowledged messages.
pub struct Link {
    pub channel: Channel,
    /// The node's `host:port`.
    pub node: String,
    /// Dropping this field closes the connection.
    connection: Connection,
    frames: Arc<FrameLimit>,
    timeout: Duration,
}

pub struct Publisher(Link);

impl Broker {
    pub fn new(config: &Amqp) -> Result<Self> {
        let nodes = Nodes::new(config)?;
        let uri = nodes.all().first().map(|node| node.uri.clone()).unwrap_or_default();
        let tls = match uri.scheme {
            AMQPScheme::AMQP => OwnedTLSConfig::default(),
            AMQPScheme::AMQPS => OwnedTLSConfig {
                identity: config.login.tls.identity.as_ref().map(|Identity { certificate, key }| {
                    OwnedIdentity::PKCS8 {
                        pem: certificate.clone().into_bytes(),
                        key: key.expose().as_bytes().to_vec(),
                    }
                }),
                // The library adds the system's authorities.
                cert_chain: config.login.tls.authorities.clone(),
            },
        };
        Ok(Self {
            config: config.clone(),
            nodes: Arc::new(nodes),
            frames: Arc::default(),
            witnesses: Arc::default(),
            vhost: uri.vhost,
            tls,
        })
    }

    pub fn vhost(&self) -> &str {
        &self.vhost
    }

    pub fn partitions(&self) -> u16 {
        self.config.partitions
    }

    pub async fn connect(&self, purpose: &str) -> Result<Link> {
        let mut failed = Vec::new();
        for node in self.nodes.in_turn() {
            match self.connect_to(node, purpose).await {
                Ok(link) => {
                    self.nodes.note(failed, Some(node));
                    return Ok(link);
                }
                Err(error) => failed.push((node, error)),
            }
        }
        let none = || BrokerError::Config("[amqp] url contains no host".to_owned());
        Err(self.nodes.note(failed, None).unwrap_or_else(none))
    }

    async fn connect_to(&self, node: &Node, purpose: &str) -> Result<Link> {
        let timeout = self.config.timeout();
        let properties = ConnectionProperties::default().with_connection_name(format!("tallyd {purpose}").into());
        let mut uri = node.uri.clone();
        if let Some(password) = self.config.url.password_now() {
            password.expose().clone_into(&mut uri.authority.userinfo.password);
        }
        self.frames.set(&mut uri);
        let connecting = async {
            let runtime = lapin::runtime::default_runtime()?;
            Connection::connect_uri_with_config(uri, properties, self.tls.clone(), runtime).await
        };
        let connected = limit(timeout, "connect to RabbitMQ", connecting).await;
        let connection = connected.map_err(|error| self.explain(node, error))?;
        OPENED.rabbitmq.add_one();
        let channel = limit(timeout, "open a channel", connection.create_channel()).await?;
        let node = node.name.clone();
        Ok(Link { channel, node, connection, frames: Arc::clone(&self.frames), timeout })
    }

    fn explain(&self, node: &Node, error: BrokerError) -> BrokerError {
        let BrokerError::Call { source: Whole(source), .. } = &error else { return error };
        let has_certificate = self.config.login.tls.identity.is_some();
        let server = tls::Server { name: "RabbitMQ", address: &node.name, section: "amqp", has_certificate };
        match TlsFault::of(source, server) {
            Some(fault) => fault.into(),
            // The server reports the reason only after the handshake. Often the connection is already closed at that
            // time, and the reason is lost.
            None if node.uri.scheme == AMQPScheme::AMQPS && was_ended(source) => error.about(format!(
                "RabbitMQ at {} closes the connection immediately: see RabbitMQ's log. Perhaps RabbitMQ requires a client certificate from an authority that it trusts ([amqp] tls_cert_file)",
                node.name
            )),
            None => error,
        }
    }

    pub async fn connect_publisher(&self, purpose: &str) -> Result<Publisher> {
        let link = self.connect(purpose).await?;
        link.call("enable publisher confirms", link.channel.confirm_select(ConfirmSelectOptions::default())).await?;
        Ok(Publisher(link))
    }
}

impl Link {
    /// Opens another channel. A call needs its own channel if an error of the call closes the channel.
    async fn another_channel(&self) -> Result<Channel> {
        limit(self.timeout, "open a channel", self.connection.create_channel()).await
    }

    pub async fn call<T>(&self, action: &'static str, call: impl Future<Output = lapin::Result<T>>) -> Result<T> {
        let call = async { call.await.inspect_err(|error| self.note(error)) };
        limit(self.timeout, action, call).await
    }

    /// Learns from an error of the library: after a frame that exceeded the limit, new links of this broker accept
    /// larger frames. [`Link::call`] does so itself.
    pub fn note(&self, error: &lapin::Error) {
        self.frames.note(error);
    }

    pub async fn depth(&self, queue: &str) -> Result<Depth> {
        let passive = QueueDeclareOptions::durable().passive();
        let declare = self.channel.queue_declare(queue.into(), passive, FieldTable::default());
        let asked = self.call("read the queue's length", declare).await;
        asked.map(|found| depth_of(&found)).map_err(|error| error.about(format!("queue {queue}")))
    }

    /// If the depth is unknown, gets a message and returns it, which only a leader with a quorum can answer. The broker
    /// counts each return, so this call is not for a loop.
    pub async fn count(&self, queue: &str) -> Result<u32> {
        if let Depth::Known { messages, .. } = self.depth(queue).await? {
            return Ok(messages);
        }
        let Some(message) = self.get(queue).await? else { return Ok(0) };
        let back = message.delivery.acker.nack(BasicNackOptions { requeue: true, ..BasicNackOptions::default() });
        self.call("return a message", back).await?;
        Ok(message.message_count + 1)
    }

    pub async fn get(&self, queue: &str) -> Result<Option<BasicGetMessage>> {
        let get = self.channel.basic_get(queue.into(), BasicGetOptions::default());
        self.call("get a message", get).await.map_err(|error| error.about(format!("queue {queue}")))
    }
}

impl Publisher {
    /// After any error but a rejection it is unknown whether the message arrived. The caller can publish it again,
    /// because applying an event twice changes nothing.
    pub async fn publish(&self, exchange: &str, routing_key: &str, body: &[u8]) -> Result<()> {
        self.publish_with(exchange, routing_key, body, BasicProperties::default()).await
    }

    /// RabbitMQ 4.3 delivers by priority, and treats a message without one as priority 4: it would overtake messages
    /// that clients send with priority 0.
    pub async fn publish_behind(&self, queue: &str, body: &[u8]) -> Result<()> {
        self.publish_with("", queue, body, BasicProperties::default().with_priority(0)).await
    }

    pub async fn publish_with(
        &self,
        exchange: &str,
        routing_key: &str,
        body: &[u8],
        properties: BasicProperties,
    ) -> Result<()> {
        let published = self.0.call("publish", self.send(exchange, routing_key, body, properties)).await?;
        confirmed(published)
    }

    pub async fn publish_traced(
        &self,
        exchange: &str,
        routing_key: &str,
        body: &[u8],
        traceparent: Option<&str>,
    ) -> Result<()> {
        self.publish_with(exchange, routing_key, body, traced(traceparent)).await
    }

    async fn send(
        &self,
        exchange: &str,
        routing_key: &str,
        body: &[u8],
        properties: BasicProperties,
    ) -> lapin::Result<Confirmation> {
        let properties = properties.with_content_type("application/json".into()).with_delivery_mode(PERSISTENT);
        let options = BasicPublishOptions { mandatory: true, ..BasicPublishOptions::default() };
        let channel = &self.0.channel;
        channel.basic_publish(exchange.into(), routing_key.into(), options, body, properties).await?.await
    }

    pub async fn answers(&self) -> Result<()> {
        let select = self.0.channel.confirm_select(ConfirmSelectOptions::default());
        self.0.call("check that RabbitMQ answers", select).await
    }

    pub async fn depth(&self, queue: &str) -> Result<Depth> {
        self.0.depth(queue).await
    }

    pub async fn count(&self, queue: &str) -> Result<u32> {
        self.0.count(queue).await
    }

    pub async fn waiting(&self, partitions: &Partitions) -> Result<Option<u64>> {
        let mut waiting = 0;
        for (_, queue) in partitions.queues() {
            let Depth::Known { messages, .. } = self.depth(queue).await? else { return Ok(None) };
            waiting += u64::from(messages);
        }
        Ok(Some(waiting))
    }
}

fn depth_of(found: &Queue) -> Depth {
    if fault::strikes("depth") { Depth::Unknown } else { Depth::of(found.message_count(), found.consumer_count()) }
}

fn traced(traceparent: Option<&str>) -> BasicProperties {
    let Some(traceparent) = traceparent else { return BasicProperties::default() };
    let mut headers = FieldTable::default();
    headers.insert(HEADER.into(), AMQPValue::LongString(traceparent.into()));
    BasicProperties::default().with_headers(headers)
}

fn confirmed(confirmation: Confirmation) -> Result<()> {
    match confirmation {
        Confirmation::Ack(None) => Ok(()),
        Confirmation::Ack(Some(back)) | Confirmation::Nack(Some(back)) => {
            Err(BrokerError::Returned { reply: back.reply_text.to_string() })
        }
        Confirmation::Nack(None) => Err(BrokerError::Nacked),
        Confirmation::NotRequested => Err(BrokerError::Unconfirmed),
    }
}

fn was_ended(error: &lapin::Error) -> bool {
    let causes = std::iter::successors(error.source(), |cause| (**cause).source());
    causes.filter_map(|cause| cause.downcast_ref::<io::Error>()).any(|error| {
        matches!(
            error.kind(),
            io::ErrorKind::ConnectionReset
                | io::ErrorKind::ConnectionAborted
                | io::ErrorKind::BrokenPipe
                | io::ErrorKind::UnexpectedEof
        )
    })
}

async fn limit<T>(limit: Duration, action: &'static str, call: impl Future<Output = lapin::Result<T>>) -> Result<T> {
    match tokio::time::timeout(limit, call).await {
        Ok(answer) => answer.map_err(|source| BrokerError::Call { action, source: Whole(source) }),
        Err(_) => Err(BrokerError::NoAnswer { action, limit }),
    }
}
