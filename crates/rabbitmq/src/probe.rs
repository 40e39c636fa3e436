//! Questions to the broker that change nothing on it: what is there, what is different, what the account may do.
//!
//! A thing is asked for passively first: declared, one that is missing would be made. Each question has a channel of its own, which a
//! refusal closes.

use futures_util::future::join_all;
use lapin::options::{BasicPublishOptions, ExchangeDeclareOptions, QueueDeclareOptions};
use lapin::types::FieldTable;
use lapin::{BasicProperties, Channel, ExchangeKind};

use super::topology::CONSISTENT_HASH;
use super::{Broker, Link, Result};

/// No such thing, or unknown.
pub(super) const NOT_FOUND: u16 = 404;

/// No right.
pub(super) const ACCESS_REFUSED: u16 = 403;

/// It exists and is different.
const PRECONDITION_FAILED: u16 = 406;

/// No such kind of exchange.
const COMMAND_INVALID: u16 = 503;

/// No such vhost, or no right to it.
pub(super) const NOT_ALLOWED: u16 = 530;

/// The broker can't do it.
pub(super) const NOT_IMPLEMENTED: u16 = 540;

/// What the broker says of one thing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Found {
    /// There, and as it is declared.
    Right,
    /// Not there.
    Missing,
    /// There, and different: the broker's words.
    Different(String),
    /// The account has no right: the broker's words.
    Refused(String),
}

impl Found {
    /// What an answer says.
    fn of<T>(answer: Result<T>) -> Result<Self> {
        let Err(error) = answer else { return Ok(Self::Right) };
        match error.code() {
            Some((NOT_FOUND, _)) => Ok(Self::Missing),
            Some((PRECONDITION_FAILED, text)) => Ok(Self::Different(text)),
            Some((ACCESS_REFUSED, text)) => Ok(Self::Refused(text)),
            _ => Err(error),
        }
    }
}

impl Broker {
    /// A link to each node, or why there is none, beside the node's `host:port`.
    pub async fn probe_nodes(&self) -> Vec<(String, Result<Link>)> {
        let asked =
            self.nodes.all().iter().map(async |node| (node.name.clone(), self.connect_to(node, "check-config").await));
        join_all(asked).await
    }

    /// The exchanges, each with what is said of it.
    pub async fn probe_exchanges(&self, link: &Link) -> Result<Vec<(String, Found)>> {
        let mut found = Vec::new();
        for (name, kind) in self.exchanges() {
            let passive = ExchangeDeclareOptions { passive: true, ..ExchangeDeclareOptions::default() };
            let durable = ExchangeDeclareOptions { durable: true, ..ExchangeDeclareOptions::default() };
            let ask = async |options| {
                let channel = link.another_channel().await?;
                let declare =
                    channel.exchange_declare(name.as_str().into(), kind.clone(), options, FieldTable::default());
                Found::of(link.call("ask for the exchange", declare).await)
            };
            let there = ask(passive).await?;
            let is = if there == Found::Right && self.config.declare { ask(durable).await? } else { there };
            found.push((name, is));
        }
        Ok(found)
    }

    /// The queues, each with what is said of it.
    pub async fn probe_queues(&self, link: &Link) -> Result<Vec<(String, Found)>> {
        let mut found = Vec::new();
        for (name, arguments) in self.queues(self.partitions()) {
            let ask = async |options| {
                let channel = link.another_channel().await?;
                let declare = channel.queue_declare(name.as_str().into(), options, arguments.clone());
                Found::of(link.call("ask for the queue", declare).await)
            };
            let there = ask(QueueDeclareOptions::durable().passive()).await?;
            let is = if there == Found::Right && self.config.declare {
                ask(QueueDeclareOptions::durable()).await?
            } else {
                there
            };
            found.push((name, is));
        }
        Ok(found)
    }

    /// Whether the account may publish there: in a transaction that is taken back, so that nothing is published.
    ///
    /// # Errors
    /// The broker is away, or reads nothing from publishers now: it has a memory or disk alarm.
    pub async fn probe_publish(&self, link: &Link, exchange: &str) -> Result<Found> {
        let channel: Channel = link.another_channel().await?;
        let publish = async {
            channel.tx_select().await?;
            let (options, properties) = (BasicPublishOptions::default(), BasicProperties::default());
            channel.basic_publish(exchange.into(), "tallyd-check".into(), options, b"", properties).await?;
            channel.tx_rollback().await
        };
        let answer = link.call("ask whether it may publish", publish).await;
        match link.connection.status().blocked() {
            true => {
                let alarm = "the broker has a memory or disk alarm, and reads nothing from publishers";
                Found::of(answer.map_err(|error| error.about(alarm)))
            }
            false => Found::of(answer),
        }
    }

    /// Whether the broker has the kind of exchange that spreads events over partitions. It is asked to make one by a name that it lets
    /// nobody use: it looks at the kind first.
    pub async fn probe_plugin(&self) -> Result<bool> {
        // Not to know the kind closes the connection.
        let link = self.connect("check-config").await?;
        let kind = ExchangeKind::Custom(CONSISTENT_HASH.to_owned());
        let options = ExchangeDeclareOptions { durable: true, ..ExchangeDeclareOptions::default() };
        let declare = link.channel.exchange_declare("amq.tallyd-check".into(), kind, options, FieldTable::default());
        let Err(error) = link.call("ask for the plugin", declare).await else { return Ok(true) };
        match error.code() {
            Some((COMMAND_INVALID, _)) => Ok(false),
            Some((ACCESS_REFUSED, _)) => Ok(true),
            _ => Err(error),
        }
    }
}
