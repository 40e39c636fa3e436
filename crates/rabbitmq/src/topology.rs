//! The broker's exchanges, queues and bindings: their names, their arguments, and how tallyd declares them.

use lapin::ExchangeKind;
use lapin::options::{ExchangeBindOptions, ExchangeDeclareOptions, QueueBindOptions, QueueDeclareOptions};
use lapin::types::{AMQPValue, FieldTable};
use tallyd_core::partition::Partitions;

use super::{Broker, Link, Result};
use crate::config::QueueType;

const RETURNS_MAX: i32 = 20;

/// The size limit of the queue of returned messages, in bytes. When this queue is full, messages that should be
/// dead-lettered stay in the partition's queue.
const RETURNED_BYTES_MAX: i64 = 1 << 30;

/// The exchange type that distributes messages over queues by a hash.
pub(super) const CONSISTENT_HASH: &str = "x-consistent-hash";

impl Broker {
    pub fn exchange(&self) -> String {
        format!("{}.events", self.config.prefix)
    }

    pub fn queue(&self, partition: u16) -> String {
        format!("{}.events.{partition}", self.config.prefix)
    }

    pub fn numbered(&self, count: u16) -> Partitions {
        (0..count).map(|number| (number, self.queue(number))).collect()
    }

    pub(super) fn spread(&self) -> String {
        format!("{}.partitions", self.config.prefix)
    }

    pub fn returned(&self) -> String {
        format!("{}.returned", self.config.prefix)
    }

    /// If `[amqp] declare` is set. Several daemons can call this while events are published: the new binding is added
    /// before the old one is removed. An event in two queues is harmless, but one without a binding would return to its
    /// publisher.
    pub async fn declare_for(&self, link: &Link, partitions: u16) -> Result<()> {
        if !self.config.declare {
            return Ok(());
        }
        self.declare_exchange(link, &self.exchange(), ExchangeKind::Topic).await?;
        for (queue, arguments) in self.queues(partitions) {
            self.declare_queue(link, &queue, arguments).await?;
        }
        if partitions == 1 {
            return self.bind_queue(link, &self.queue(0), &self.exchange(), "#").await;
        }
        let spread = self.spread();
        let kind = ExchangeKind::Custom(CONSISTENT_HASH.to_owned());
        let plugin = "several partitions need the plugin: rabbitmq-plugins enable rabbitmq_consistent_hash_exchange";
        self.declare_exchange(link, &spread, kind).await.map_err(|error| error.about(plugin))?;
        for partition in 0..partitions {
            // For this exchange type the binding key is a weight.
            self.bind_queue(link, &self.queue(partition), &spread, "1").await?;
        }
        let bind = link.channel.exchange_bind(
            spread.as_str().into(),
            self.exchange().into(),
            "#".into(),
            ExchangeBindOptions::default(),
            FieldTable::default(),
        );
        link.call("bind the exchanges", bind).await?;
        // Removes the binding of a site with a single partition, if this binding exists. Otherwise the old binding
        // would deliver each event a second time.
        let unbind =
            link.channel.queue_unbind(self.queue(0).into(), self.exchange().into(), "#".into(), FieldTable::default());
        link.call("unbind the queue", unbind).await
    }

    async fn declare_exchange(&self, link: &Link, name: &str, kind: ExchangeKind) -> Result<()> {
        let options = ExchangeDeclareOptions { durable: true, ..ExchangeDeclareOptions::default() };
        let declare = link.channel.exchange_declare(name.into(), kind, options, FieldTable::default());
        link.call("declare the exchange", declare).await.map_err(|error| error.about(format!("exchange {name}")))
    }

    pub(super) async fn declare_queue(&self, link: &Link, name: &str, arguments: FieldTable) -> Result<()> {
        let declare = link.channel.queue_declare(name.into(), QueueDeclareOptions::durable(), arguments);
        link.call("declare the queue", declare).await.map(drop).map_err(|error| {
            error.about(format!(
                "queue {name}; if it exists with other arguments, delete it or set [amqp] declare = false"
            ))
        })
    }

    pub(super) fn exchanges(&self) -> Vec<(String, ExchangeKind)> {
        let spread = (self.spread(), ExchangeKind::Custom(CONSISTENT_HASH.to_owned()));
        let events = (self.exchange(), ExchangeKind::Topic);
        if self.partitions() == 1 { vec![events] } else { vec![events, spread] }
    }

    pub(super) fn queues(&self, partitions: u16) -> Vec<(String, FieldTable)> {
        let mut returned = FieldTable::default();
        returned.insert("x-queue-type".into(), self.queue_type());
        returned.insert("x-max-length-bytes".into(), AMQPValue::LongLongInt(RETURNED_BYTES_MAX));
        returned.insert("x-overflow".into(), text("reject-publish"));
        if self.config.queue_type == QueueType::Quorum {
            // RabbitMQ 4 has a default limit of 20. RabbitMQ 4.3 also counts the returns to the partition's queue, so it
            // would drop a message that someone takes once and does not acknowledge.
            returned.insert("x-delivery-limit".into(), AMQPValue::LongInt(i32::MAX));
        }
        let partition = self.partition_arguments();
        let partitions = (0..partitions).map(|number| (self.queue(number), partition.clone()));
        std::iter::once((self.returned(), returned)).chain(partitions).collect()
    }

    pub(super) fn partition_arguments(&self) -> FieldTable {
        let is_quorum = self.config.queue_type == QueueType::Quorum;
        let mut partition = FieldTable::default();
        partition.insert("x-queue-type".into(), self.queue_type());
        partition.insert("x-single-active-consumer".into(), AMQPValue::Boolean(true));
        partition.insert("x-dead-letter-exchange".into(), text(""));
        partition.insert("x-dead-letter-routing-key".into(), text(&self.returned()));
        if is_quorum {
            // With this strategy, the broker keeps a dead-lettered message until the queue of returned messages has
            // stored it.
            partition.insert("x-dead-letter-strategy".into(), text("at-least-once"));
            partition.insert("x-overflow".into(), text("reject-publish"));
            // RabbitMQ 3 has no default limit. Without a limit, a message that crashes its receiver would block the
            // partition.
            partition.insert("x-delivery-limit".into(), AMQPValue::LongInt(RETURNS_MAX));
        }
        partition
    }

    fn queue_type(&self) -> AMQPValue {
        text(if self.config.queue_type == QueueType::Quorum { "quorum" } else { "classic" })
    }

    pub(super) async fn bind_queue(&self, link: &Link, queue: &str, exchange: &str, key: &str) -> Result<()> {
        let options = QueueBindOptions::default();
        let bind = link.channel.queue_bind(queue.into(), exchange.into(), key.into(), options, FieldTable::default());
        let bound = link.call("bind the queue", bind).await;
        bound.map_err(|error| error.about(format!("queue {queue} to exchange {exchange}")))
    }
}

fn text(value: &str) -> AMQPValue {
    AMQPValue::LongString(value.into())
}
