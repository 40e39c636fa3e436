//! Enforces the dead-letter quota. Each partition has its share of `[consumer] dead_letters_max`, so partitions need no
//! coordination (decision 0014). If a dead letter exceeds the quota and a later replay could succeed, the daemon sends
//! the letter to the queue of returned messages. If a replay can never succeed, the daemon counts the letter, and does
//! not store the letter.

use std::collections::VecDeque;
use std::time::Instant;

use anyhow::Result;
use futures_util::{StreamExt, stream};
use sqlx::MySqlConnection;
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;
use tracing::warn;

use super::Partition;
use crate::letter;
use tallyd_base::config::{self, Derived};
use tallyd_base::runtime::liveness::Heartbeat;
use tallyd_base::runtime::log::Flood;
use tallyd_base::runtime::retry::Outage;
use tallyd_base::telemetry::telemetry;
use tallyd_core::event::Reason;
use tallyd_core::partition::MAPS_FROM;
use tallyd_mysql::StoreError;
use tallyd_mysql::letters::{self, DeadLetter};
use tallyd_rabbitmq::{Broker, Publisher};

const IN_FLIGHT: usize = 500;

pub(super) struct DeadLetterQuota {
    broker: Broker,
    /// The publisher has a separate connection, because under a memory alarm the broker reads nothing from a connection
    /// that publishes.
    publisher: Option<Publisher>,
    heartbeat: Heartbeat,
    ends: CancellationToken,
    partition: u16,
    queue: String,
    partitions: u16,
    max: Derived<u64>,
    dropped: Flood,
    returned: Flood,
}

impl DeadLetterQuota {
    pub(super) fn new(partition: &Partition, partitions: u16, max: Derived<u64>, ends: CancellationToken) -> Self {
        Self {
            broker: partition.broker.clone(),
            publisher: None,
            heartbeat: partition.heartbeat.clone(),
            ends,
            partition: partition.number,
            queue: partition.queue(),
            partitions,
            max,
            dropped: Flood::default(),
            returned: Flood::default(),
        }
    }

    /// Returns the beginning of `letters`: as many letters as the quota still allows in this transaction.
    pub(super) async fn admit<'a>(
        &mut self,
        tx: &mut MySqlConnection,
        letters: &'a [DeadLetter],
    ) -> Result<&'a [DeadLetter], StoreError> {
        if letters.is_empty() {
            return Ok(letters);
        }
        let share = config::dead_letters_part(*self.max.get(), self.partitions);
        let open = letters::open_of(tx, &self.queue, share).await?;
        let admitted = usize::try_from(share.saturating_sub(open)).unwrap_or(usize::MAX);
        Ok(letters.get(..admitted).unwrap_or(letters))
    }

    /// Before their batch is acknowledged. What a later replay could apply goes to the queue of returned messages, the
    /// rest is only counted. Fails if the session ends before all confirms.
    pub(super) async fn turn_away(&mut self, letters: &[DeadLetter], outage: &mut Outage) -> Result<()> {
        let (mut left, never): (VecDeque<&DeadLetter>, VecDeque<&DeadLetter>) =
            letters.iter().partition(|letter| Reason::may_be_good(letter.reason, self.partition >= MAPS_FROM));
        never.iter().for_each(|letter| telemetry().consumer.dead_letter_dropped(letter.reason));
        self.log(left.len(), never.len());
        while !left.is_empty() {
            let heartbeat = self.heartbeat.clone();
            let Err(error) = heartbeat.during(self.publish(&mut left)).await else { break };
            if self.ends.is_cancelled() {
                return Err(error.context(format!("{} dead letters over the quota were not published", left.len())));
            }
            let queue = self.broker.returned();
            let why = format!("the dead-letter quota is full, and publishing to {queue} fails: {error:#}");
            let delay = outage.failed(&why);
            self.ends.run_until_cancelled(sleep(delay)).await;
        }
        Ok(())
    }

    fn log(&mut self, returned: usize, dropped: usize) {
        let (partition, now) = (self.partition, Instant::now());
        if let Some(dropped) = self.dropped.note(dropped as u64, now) {
            warn!(
                event = "dead-letters-dropped",
                partition,
                dropped,
                "{dropped} messages that can never be applied were counted but not kept: the dead-letter quota is full"
            );
        }
        if let Some(returned) = self.returned.note(returned as u64, now) {
            let queue = self.broker.returned();
            warn!(
                event = "dead-letters-returned",
                partition,
                returned,
                "{returned} messages go to {queue}: the dead-letter quota is full. Replay or purge some dead letters, then run `tallyd dead list`"
            );
        }
    }

    async fn publish(&mut self, left: &mut VecDeque<&DeadLetter>) -> Result<()> {
        let publisher = match self.publisher.take() {
            Some(publisher) => publisher,
            None => self.broker.connect_publisher("dead letters over the quota").await?,
        };
        let (publisher_now, queue) = (&publisher, &self.broker.returned());
        let letters = stream::iter(left.clone().into_iter().cloned());
        let mut sent = letters
            .map(|letter| async move {
                publisher_now.publish_with("", queue, &letter.body, letter::properties(&letter)).await
            })
            .buffered(IN_FLIGHT);
        while let Some(confirmed) = sent.next().await {
            confirmed?;
            left.pop_front();
        }
        drop(sent);
        self.publisher = Some(publisher);
        Ok(())
    }
}
