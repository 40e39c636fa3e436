//! Reduces the number of partitions: removes the queues of the highest partitions from the topology.

use lapin::options::{ExchangeDeleteOptions, ExchangeUnbindOptions, QueueDeclareOptions, QueueDeleteOptions};
use lapin::types::FieldTable;
use tallyd_core::partition::Partitions;

use super::probe::NOT_FOUND;
use super::{Broker, Depth, Link, Result};

impl Broker {
    /// Returns each partition's queue and its length. The length is `None` if the queue is missing.
    pub async fn depths(&self, link: &Link, partitions: &Partitions) -> Result<Vec<(String, Option<Depth>)>> {
        let mut depths = Vec::new();
        let mut channel = link.another_channel().await?;
        for (_, queue) in partitions.queues() {
            let passive = QueueDeclareOptions::durable().passive();
            let declare = channel.queue_declare(queue.into(), passive, FieldTable::default());
            match link.call("read the queue's length", declare).await {
                Ok(found) => {
                    let depth = Depth { messages: found.message_count(), consumers: found.consumer_count() };
                    depths.push((queue.to_owned(), Some(depth)));
                }
                Err(error) if matches!(error.code(), Some((NOT_FOUND, _))) => {
                    depths.push((queue.to_owned(), None));
                    // The error has closed the channel, so the next call needs a new channel.
                    channel = link.another_channel().await?;
                }
                Err(error) => return Err(error.about(format!("queue {queue}"))),
            }
        }
        Ok(depths)
    }

    /// Unbinds the queues of the partitions `to..from`. Then deletes those unbound queues that have no messages and no
    /// consumers. Returns the queues that were not deleted. During the call, each new event still reaches a queue. If
    /// the call is interrupted, the caller must repeat it.
    pub async fn lower_partitions(&self, link: &Link, from: u16, to: u16) -> Result<Vec<String>> {
        if to == 1 {
            self.bind_queue(link, &self.queue(0), &self.exchange(), "#").await?;
            self.unbind_spread(link).await?;
        }
        let spare: Partitions = (to..from).map(|partition| (partition, self.queue(partition))).collect();
        let there = |depths: Vec<(String, Option<Depth>)>| -> Vec<(String, bool)> {
            // The number of messages does not include unacknowledged messages. So a queue with a consumer is treated as
            // in use.
            let is_used = |depth: Depth| depth.messages > 0 || depth.consumers > 0;
            depths.into_iter().filter_map(|(queue, depth)| Some((queue, is_used(depth?)))).collect()
        };
        for (queue, _) in there(self.depths(link, &spare).await?) {
            let unbind = link.channel.queue_unbind(
                queue.as_str().into(),
                self.spread().into(),
                "1".into(),
                FieldTable::default(),
            );
            link.call("unbind the queue", unbind).await?;
        }
        let mut kept = Vec::new();
        for (queue, is_used) in there(self.depths(link, &spare).await?) {
            if is_used {
                kept.push(queue);
            } else {
                // RabbitMQ rejects `if_unused` and `if_empty` for quorum queues.
                let delete = link.channel.queue_delete(queue.as_str().into(), QueueDeleteOptions::default());
                link.call("delete the queue", delete).await?;
            }
        }
        if to == 1 && kept.is_empty() {
            let delete = link.channel.exchange_delete(self.spread().into(), ExchangeDeleteOptions::default());
            link.call("delete the exchange", delete).await?;
        }
        Ok(kept)
    }

    async fn unbind_spread(&self, link: &Link) -> Result<()> {
        let channel = link.another_channel().await?;
        let unbind = channel.exchange_unbind(
            self.spread().into(),
            self.exchange().into(),
            "#".into(),
            ExchangeUnbindOptions::default(),
            FieldTable::default(),
        );
        match link.call("unbind the exchanges", unbind).await {
            Err(error) if !matches!(error.code(), Some((NOT_FOUND, _))) => Err(error),
            _ => Ok(()),
        }
    }
}
