//! How a session begins: it connects, makes queues and exchanges that are missing, and asks for messages.

use anyhow::{Context, Result};
use lapin::options::{BasicConsumeOptions, BasicQosOptions};
use lapin::types::FieldTable;

use crate::consumer::Partition;
use tallyd_rabbitmq::Link;

/// Connects, makes what is missing, and asks for messages. Returns how many partitions there are, too.
pub(super) async fn listen(partition: &Partition, queue: &str, prefetch: u16) -> Result<(Link, lapin::Consumer, u16)> {
    let link = partition.broker.connect(&format!("partition {} of {}", partition.number, partition.owner)).await?;
    let partitions = declare(partition, &link).await?;
    let qos = link.channel.basic_qos(prefetch, BasicQosOptions { global: false });
    link.call("set the prefetch", qos).await?;
    let tag = format!("tallyd-{}", partition.owner);
    let (options, arguments) = (BasicConsumeOptions::default(), FieldTable::default());
    let consume = link.channel.basic_consume(queue.into(), tag.as_str().into(), options, arguments);
    let deliveries = link.call("consume", consume).await.with_context(|| format!("queue {queue}"))?;
    Ok((link, deliveries, partitions))
}

/// Makes what is missing on the broker, for as many partitions as are in use. This daemon can be one that knows of fewer, and must not
/// undo what another daemon has made. More are noted before they are made. Returns how many there are.
async fn declare(Partition { broker, store, owner, .. }: &Partition, link: &Link) -> Result<u16> {
    loop {
        let partitions = store.note_partitions(broker.partitions(), owner).await?;
        broker.declare_for(link, partitions).await?;
        // If another daemon has come with more meanwhile, something that it has undone was perhaps made again.
        let noted = store.noted_partitions().await?;
        // A smaller number was read from a server that is behind.
        if noted.is_none_or(|noted| noted.partitions <= partitions) {
            return Ok(partitions);
        }
    }
}
