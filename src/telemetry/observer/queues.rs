//! How full queues are, on a link of its own that is kept open.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use anyhow::Result;

use super::Rest;
use crate::broker::{self, Broker, Publisher};

/// How long a queue that is not there, or that this account may not ask for, is not asked for again: the refusal costs a connection.
const AGAIN_AFTER: Duration = Duration::from_secs(15);

/// The broker, as it is asked for its queues.
pub(super) struct Queues {
    broker: Broker,
    /// One that failed is not given back, and made anew.
    link: Option<Publisher>,
    missing: BTreeSet<String>,
    again: Rest,
}

/// What was told.
#[derive(Default)]
pub(super) struct Depths {
    /// Messages and consumers of each partition's queue.
    pub queues: BTreeMap<u16, (u64, u64)>,
    /// Messages that the broker has given up on.
    pub returned: Option<u64>,
}

impl Queues {
    pub fn new(broker: Broker) -> Self {
        Self { broker, link: None, missing: BTreeSet::new(), again: Rest::default() }
    }

    /// Whether the broker answers.
    pub async fn ask(&mut self) -> Result<()> {
        let open = self.open().await?;
        open.answers().await?;
        self.link = Some(open);
        Ok(())
    }

    /// Asks for each queue.
    pub async fn look(&mut self, partitions: u16) -> Result<Depths> {
        if self.again.is_over(AGAIN_AFTER) {
            self.missing.clear();
        }
        let mut depths = Depths::default();
        let all = (0..partitions).map(|partition| (Some(partition), self.broker.queue(partition)));
        for (partition, queue) in all.chain([(None, self.broker.returned())]).collect::<Vec<_>>() {
            if self.missing.contains(&queue) {
                continue;
            }
            let open = self.open().await?;
            match open.depth(&queue).await {
                Ok(depth) => {
                    let (messages, consumers) = (u64::from(depth.messages), u64::from(depth.consumers));
                    match partition {
                        Some(partition) => drop(depths.queues.insert(partition, (messages, consumers))),
                        None => depths.returned = Some(messages),
                    }
                    self.link = Some(open);
                }
                // The answer has cost the channel.
                Err(error) if broker::is_refusal(&error) => drop(self.missing.insert(queue)),
                Err(error) => return Err(error),
            }
        }
        Ok(depths)
    }

    async fn open(&mut self) -> Result<Publisher> {
        match self.link.take() {
            Some(open) => Ok(open),
            None => self.broker.connect_publisher("observer").await,
        }
    }
}
