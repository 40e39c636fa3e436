//! The queue of a map. The queue is bound to the site's exchange, and tallyd never declares this exchange.

use lapin::ExchangeKind;
use lapin::options::ExchangeDeclareOptions;
use lapin::types::FieldTable;

use super::probe::{Found, NOT_FOUND};
use super::{Broker, Link, Result};

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MapQueue {
    pub queue: String,
    pub exchange: String,
    pub binding_keys: Vec<String>,
}

/// A binding key that no map uses. Unbinding this key changes nothing.
const NO_KEY: &str = "tallyd-check";

impl Broker {
    pub fn map_queue(&self, name: &str) -> String {
        format!("{}{name}", self.map_queues())
    }

    pub fn map_queues(&self) -> String {
        format!("{}.map.", self.config.prefix)
    }

    pub async fn probe_map_exchange(&self, link: &Link, map: &MapQueue) -> Result<Found> {
        let channel = link.another_channel().await?;
        let passive = ExchangeDeclareOptions { passive: true, ..ExchangeDeclareOptions::default() };
        // If the exchange exists, the broker ignores the type in a passive declaration.
        let declare =
            channel.exchange_declare(map.exchange.as_str().into(), ExchangeKind::Topic, passive, FieldTable::default());
        let there = Found::of(link.call("check the site's exchange", declare).await)?;
        if there != Found::Right || !self.config.declare {
            return Ok(there);
        }
        let channel = link.another_channel().await?;
        let unbind = channel.queue_unbind(
            map.queue.as_str().into(),
            map.exchange.as_str().into(),
            NO_KEY.into(),
            FieldTable::default(),
        );
        // The broker checks the rights before it looks for the binding.
        let may = Found::of(link.call("check the right to bind a queue", unbind).await)?;
        Ok(if may == Found::Missing { Found::Right } else { may })
    }

    pub async fn probe_map_queue(&self, link: &Link, map: &MapQueue) -> Result<Found> {
        self.probe_queue(link, &map.queue, &self.partition_arguments()).await
    }

    pub async fn declare_map(&self, link: &Link, map: &MapQueue) -> Result<()> {
        if !self.config.declare {
            return Ok(());
        }
        self.declare_queue(link, &map.queue, self.partition_arguments()).await?;
        for key in &map.binding_keys {
            self.bind_queue(link, &map.queue, &map.exchange, key).await?;
        }
        Ok(())
    }

    pub async fn unbind_map(&self, link: &Link, queue: &str, exchange: &str, key: &str) -> Result<()> {
        let channel = link.another_channel().await?;
        let unbind = channel.queue_unbind(queue.into(), exchange.into(), key.into(), FieldTable::default());
        match link.call("unbind the queue", unbind).await {
            Err(error) if !matches!(error.code(), Some((NOT_FOUND, _))) => Err(error),
            _ => Ok(()),
        }
    }
}
