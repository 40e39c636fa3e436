//! Reduces the number of partitions: removes the queues of the highest partitions from the topology.

use lapin::options::{ExchangeDeleteOptions, ExchangeUnbindOptions, QueueDeclareOptions, QueueDeleteOptions};
use lapin::types::FieldTable;
use tallyd_core::fence::Depth;
use tallyd_core::partition::Partitions;

use super::probe::NOT_FOUND;
use super::{Broker, Link, Result, depth_of};

impl Broker {
    pub async fn depths(&self, link: &Link, partitions: &Partitions) -> Result<Vec<(String, Option<Depth>)>> {
        let mut depths = Vec::new();
        let mut channel = link.another_channel().await?;
        for (_, queue) in partitions.queues() {
            let passive = QueueDeclareOptions::durable().passive();
            let declare = channel.queue_declare(queue.into(), passive, FieldTable::default());
            match link.call("read the queue's length", declare).await {
                Ok(found) => depths.push((queue.to_owned(), Some(depth_of(&found)))),
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

    /// Unbinds these queues of the partitions from `to` on. During the call, each new event still reaches a queue. If
    /// the call is interrupted, the caller must repeat it.
    pub async fn unbind_spare(&self, link: &Link, to: u16, queues: &[String]) -> Result<()> {
        if to == 1 {
            self.bind_queue(link, &self.queue(0), &self.exchange(), "#").await?;
            self.unbind_spread(link).await?;
        }
        for queue in queues {
            let (queue, spread) = (queue.as_str().into(), self.spread().into());
            let unbind = link.channel.queue_unbind(queue, spread, "1".into(), FieldTable::default());
            link.call("unbind the queue", unbind).await?;
        }
        Ok(())
    }

    /// Deletes a queue and its messages. The caller has proved that they are no longer needed.
    pub async fn delete_queue(&self, link: &Link, queue: &str) -> Result<()> {
        // RabbitMQ rejects `if_unused` and `if_empty` for quorum queues.
        let delete = link.channel.queue_delete(queue.into(), QueueDeleteOptions::default());
        link.call("delete the queue", delete).await.map(drop)
    }

    pub async fn delete_spread(&self, link: &Link) -> Result<()> {
        let delete = link.channel.exchange_delete(self.spread().into(), ExchangeDeleteOptions::default());
        link.call("delete the exchange", delete).await
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
