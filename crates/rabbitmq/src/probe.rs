//! Checks the broker without changing it. Finds out which exchanges and queues exist, whether their arguments differ
//! from the expected arguments, and which rights the account has.
//!
//! Each check begins with a passive declaration, because a normal declaration would create a missing exchange or queue.
//! Each check uses its own channel, because an error closes the channel.

use std::io::{self, Read, Write};
use std::time::Duration;

use futures_util::future::join_all;
use lapin::options::{BasicPublishOptions, ExchangeDeclareOptions, QueueDeclareOptions};
use lapin::tcp::{AMQPUriTcpExt, OwnedTLSConfig};
use lapin::types::FieldTable;
use lapin::uri::AMQPUri;
use lapin::{BasicProperties, Channel, ExchangeKind};

use super::topology::CONSISTENT_HASH;
use super::{Broker, Link, Result};

pub(super) const NOT_FOUND: u16 = 404;

pub(super) const ACCESS_REFUSED: u16 = 403;

const PRECONDITION_FAILED: u16 = 406;

const COMMAND_INVALID: u16 = 503;

pub(super) const NOT_ALLOWED: u16 = 530;

pub(super) const NOT_IMPLEMENTED: u16 = 540;

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Found {
    Right,
    Missing,
    Different(String),
    Refused(String),
}

impl Found {
    pub(super) fn of<T>(answer: Result<T>) -> Result<Self> {
        let Err(error) = answer else { return Ok(Self::Right) };
        match error.code() {
            Some((NOT_FOUND, _)) => Ok(Self::Missing),
            Some((PRECONDITION_FAILED, text)) => Ok(Self::Different(text)),
            Some((ACCESS_REFUSED, text)) => Ok(Self::Refused(text)),
            _ => Err(error),
        }
    }
}

fn greeting(uri: &AMQPUri, tls: OwnedTLSConfig, limit: Duration) -> io::Result<Vec<u8>> {
    let mut stream = uri.connect_with_config(tls.as_ref()).map_err(io::Error::other)?;
    stream.set_nonblocking(false)?;
    stream.set_read_timeout(Some(limit))?;
    stream.write_all(b"AMQP\0\0\x09\x01")?;
    // Type, channel, length.
    let mut header = [0; 7];
    stream.read_exact(&mut header)?;
    let [.., a, b, c, d] = header;
    let mut payload = Vec::new();
    stream.take(u64::from(u32::from_be_bytes([a, b, c, d]))).read_to_end(&mut payload)?;
    Ok(payload)
}

/// Finds the text property `name` in an AMQP table. In the table, a property consists of the name's length, the name,
/// `S`, the text's length and the text.
fn property(table: &[u8], name: &str) -> Option<String> {
    let mark = [&[u8::try_from(name.len()).ok()?], name.as_bytes(), b"S"].concat();
    let from = table.windows(mark.len()).position(|window| window == mark)? + mark.len();
    let (length, rest) = table.get(from..)?.split_first_chunk::<4>()?;
    let text = rest.get(..usize::try_from(u32::from_be_bytes(*length)).ok()?)?;
    Some(String::from_utf8_lossy(text).into_owned())
}

impl Broker {
    pub async fn probe_nodes(&self) -> Vec<(String, Result<Link>)> {
        let asked =
            self.nodes.all().iter().map(async |node| (node.name.clone(), self.connect_to(node, "config check").await));
        join_all(asked).await
    }

    pub async fn probe_exchanges(&self, link: &Link) -> Result<Vec<(String, Found)>> {
        let mut found = Vec::new();
        for (name, kind) in self.exchanges() {
            let passive = ExchangeDeclareOptions { passive: true, ..ExchangeDeclareOptions::default() };
            let durable = ExchangeDeclareOptions { durable: true, ..ExchangeDeclareOptions::default() };
            let ask = async |options| {
                let channel = link.another_channel().await?;
                let declare =
                    channel.exchange_declare(name.as_str().into(), kind.clone(), options, FieldTable::default());
                Found::of(link.call("check the exchange", declare).await)
            };
            let there = ask(passive).await?;
            let is = if there == Found::Right && self.config.declare { ask(durable).await? } else { there };
            found.push((name, is));
        }
        Ok(found)
    }

    pub async fn probe_queues(&self, link: &Link) -> Result<Vec<(String, Found)>> {
        let mut found = Vec::new();
        for (name, arguments) in self.queues(self.partitions()) {
            let is = self.probe_queue(link, &name, &arguments).await?;
            found.push((name, is));
        }
        Ok(found)
    }

    pub(super) async fn probe_queue(&self, link: &Link, name: &str, arguments: &FieldTable) -> Result<Found> {
        let ask = async |options| {
            let channel = link.another_channel().await?;
            let declare = channel.queue_declare(name.into(), options, arguments.clone());
            Found::of(link.call("check the queue", declare).await)
        };
        let there = ask(QueueDeclareOptions::durable().passive()).await?;
        match there {
            Found::Right if self.config.declare => ask(QueueDeclareOptions::durable()).await,
            there => Ok(there),
        }
    }

    /// Checks whether the account can publish to the exchange. The check sends a message in a transaction and rolls the
    /// transaction back, so nothing is published.
    pub async fn probe_publish(&self, link: &Link, exchange: &str) -> Result<Found> {
        let channel: Channel = link.another_channel().await?;
        let publish = async {
            channel.tx_select().await?;
            let (options, properties) = (BasicPublishOptions::default(), BasicProperties::default());
            channel.basic_publish(exchange.into(), "tallyd-check".into(), options, b"", properties).await?;
            channel.tx_rollback().await
        };
        let answer = link.call("check the right to publish", publish).await;
        match link.connection.status().blocked() {
            true => {
                let alarm = "the broker has a memory or disk alarm, and reads nothing from publishers";
                Found::of(answer.map_err(|error| error.about(alarm)))
            }
            false => Found::of(answer),
        }
    }

    pub async fn version(&self) -> Option<String> {
        let (uri, tls, limit) = (self.nodes.all().first()?.uri.clone(), self.tls.clone(), self.config.timeout());
        let read = move || greeting(&uri, tls, limit).ok();
        let greeting = tokio::time::timeout(limit, tokio::task::spawn_blocking(read)).await.ok()?.ok()??;
        Some(format!("{} {}", property(&greeting, "product")?, property(&greeting, "version")?))
    }

    /// Declares an exchange with a reserved name: the broker checks the type before it refuses the name, so it never
    /// creates the exchange.
    pub async fn probe_plugin(&self) -> Result<bool> {
        // If the broker does not know the type, it closes the connection, so the check needs its own connection.
        let link = self.connect("config check").await?;
        let kind = ExchangeKind::Custom(CONSISTENT_HASH.to_owned());
        let options = ExchangeDeclareOptions { durable: true, ..ExchangeDeclareOptions::default() };
        let declare = link.channel.exchange_declare("amq.tallyd-check".into(), kind, options, FieldTable::default());
        let Err(error) = link.call("check the plugin", declare).await else { return Ok(true) };
        match error.code() {
            Some((COMMAND_INVALID, _)) => Ok(false),
            Some((ACCESS_REFUSED, _)) => Ok(true),
            _ => Err(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_greeting_tells_the_product_and_its_version() {
        let table = b"\0\0\x07productS\0\0\0\x08RabbitMQ\x07versionS\0\0\0\x063.10.8\x00";
        assert_eq!(property(table, "product").as_deref(), Some("RabbitMQ"));
        assert_eq!(property(table, "version").as_deref(), Some("3.10.8"));
        assert_eq!(property(table, "platform"), None);
        assert_eq!(property(&table[..30], "version"), None);
    }
}
