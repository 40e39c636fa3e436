//! Fewer partitions: their queues leave the topology.

use lapin::options::{ExchangeDeleteOptions, ExchangeUnbindOptions, QueueDeclareOptions, QueueDeleteOptions};
use lapin::types::FieldTable;

use super::probe::NOT_FOUND;
use super::{Broker, Depth, Link, Result};

impl Broker {
    /// The length of each partition's queue; `None` where there is no such queue.
    pub async fn depths(&self, link: &Link, partitions: u16) -> Result<Vec<Option<Depth>>> {
        let mut depths = Vec::new();
        let mut channel = link.another_channel().await?;
        for queue in (0..partitions).map(|partition| self.queue(partition)) {
            let passive = QueueDeclareOptions::durable().passive();
            let declare = channel.queue_declare(queue.as_str().into(), passive, FieldTable::default());
            match link.call("ask for the queue's length", declare).await {
                Ok(found) => {
                    depths.push(Some(Depth { messages: found.message_count(), consumers: found.consumer_count() }));
                }
                Err(error) if matches!(error.code(), Some((NOT_FOUND, _))) => {
                    depths.push(None);
                    // The refusal has closed the other one.
                    channel = link.another_channel().await?;
                }
                Err(error) => return Err(error.about(format!("queue {queue}"))),
            }
        }
        Ok(depths)
    }

    /// Takes the queues `to..from` out of the topology, and returns those that hold messages or have consumers after they were unbound: these
    /// stay. Every event reaches a queue meanwhile. A call that was interrupted can be repeated.
    pub async fn lower_partitions(&self, link: &Link, from: u16, to: u16) -> Result<Vec<String>> {
        if to == 1 {
            self.bind_queue(link, &self.queue(0), &self.exchange(), "#").await?;
            self.unbind_spread(link).await?;
        }
        let depths = self.depths(link, from).await?;
        let there = |depths: &[Option<Depth>]| -> Vec<(String, bool)> {
            // Messages that a consumer has not acknowledged are not counted.
            let is_used = |depth: &Depth| depth.messages > 0 || depth.consumers > 0;
            let numbered = (0..).zip(depths).skip(usize::from(to));
            numbered.filter_map(|(partition, depth)| Some((self.queue(partition), is_used(depth.as_ref()?)))).collect()
        };
        for (queue, _) in there(&depths) {
            let unbind = link.channel.queue_unbind(
                queue.as_str().into(),
                self.spread().into(),
                "1".into(),
                FieldTable::default(),
            );
            link.call("unbind the queue", unbind).await?;
        }
        let mut kept = Vec::new();
        for (queue, is_used) in there(&self.depths(link, from).await?) {
            if is_used {
                kept.push(queue);
            } else {
                // RabbitMQ refuses `if_unused` and `if_empty` of quorum queues.
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
