//! Reads the depths of queues. The observer keeps a separate connection open for this.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use anyhow::Result;

use super::Rest;
use crate::partitions::Backlog;
use tallyd_connect::fate::Fate;
use tallyd_core::partition::Partitions;
use tallyd_rabbitmq::{Broker, Publisher};

/// Delay before the next query of a queue that does not exist or that this account cannot read. Each refused query
/// costs a connection.
const AGAIN_AFTER: Duration = Duration::from_secs(15);

/// Time limit for the open connection to answer, so that time is left for a new connection.
const OPEN_ANSWERS_IN: Duration = Duration::from_secs(1);

pub(super) struct Queues {
    broker: Broker,
    /// The open connection. Each query takes the connection out of this field, and puts it back only after an answer.
    /// So a failed connection is not used again.
    link: Option<Publisher>,
    missing: BTreeSet<String>,
    backlog: Backlog,
    again: Rest,
}

#[derive(Default)]
pub(super) struct Depths {
    pub queues: BTreeMap<u16, (u64, u64)>,
    pub returned: Option<u64>,
}

impl Queues {
    pub(super) fn new(broker: Broker) -> Self {
        Self { broker, link: None, missing: BTreeSet::new(), backlog: Backlog::default(), again: Rest::default() }
    }

    /// Checks that the broker answers. If the open connection fails, only a new connection shows whether the broker fails.
    /// The open one can have broken in an outage that is already over.
    pub(super) async fn ask(&mut self) -> Result<()> {
        if let Some(open) = self.link.take()
            && matches!(tokio::time::timeout(OPEN_ANSWERS_IN, open.answers()).await, Ok(Ok(())))
        {
            self.link = Some(open);
            return Ok(());
        }
        let open = self.open().await?;
        open.answers().await?;
        self.link = Some(open);
        Ok(())
    }

    pub(super) async fn look(&mut self, partitions: &Partitions) -> Result<Depths> {
        if self.again.is_over(AGAIN_AFTER) {
            self.missing.clear();
        }
        let mut depths = Depths::default();
        let all = partitions.queues().map(|(partition, queue)| (Some(partition), queue.to_owned()));
        for (partition, queue) in all.chain([(None, self.broker.returned())]).collect::<Vec<_>>() {
            if self.missing.contains(&queue) {
                continue;
            }
            let open = self.open().await?;
            match self.backlog.of(&open, &queue).await {
                Ok((messages, consumers)) => {
                    match partition {
                        Some(partition) => drop(depths.queues.insert(partition, (messages, consumers))),
                        None => depths.returned = Some(messages),
                    }
                    self.link = Some(open);
                }
                // The refusal has closed the channel.
                Err(error) if error.fate() == Fate::Refused => drop(self.missing.insert(queue)),
                Err(error) => return Err(error.into()),
            }
        }
        Ok(depths)
    }

    async fn open(&mut self) -> Result<Publisher> {
        Ok(match self.link.take() {
            Some(open) => open,
            None => self.broker.connect_publisher("observer").await?,
        })
    }
}
