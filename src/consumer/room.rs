//! The quota of dead letters. Each partition has its part of `[consumer] dead_letters_max`, so partitions need not ask each other. A letter
//! for which there is no room goes to the queue of returned messages if it may be good, and is only counted otherwise.

use std::collections::VecDeque;
use std::time::Instant;

use anyhow::Result;
use futures_util::{StreamExt, stream};
use sqlx::MySqlConnection;
use tokio::time::sleep;
use tracing::warn;

use super::flush::Writer;
use crate::broker::{Broker, Publisher};
use crate::config::{self, Derived};
use crate::dead_letters::letter;
use crate::event::Reason;
use crate::runtime::log::Flood;
use crate::runtime::retry::Outage;
use crate::store::StoreError;
use crate::store::letters::{self, DeadLetter};
use crate::telemetry::telemetry;

/// Messages that are published before the first one is confirmed.
const IN_FLIGHT: usize = 500;

/// Where a partition's dead letters go.
pub(super) struct Room {
    /// `[consumer] dead_letters_max`.
    pub max: Derived<u64>,
    pub partitions: u16,
    pub broker: Broker,
    /// Its connection is not the one that consumes: under a memory alarm the broker reads nothing from who publishes.
    pub publisher: Option<Publisher>,
    pub dropped: Flood,
    pub returned: Flood,
}

impl Room {
    /// Publishes letters, and removes those from `left` that the broker has confirmed.
    async fn publish(&mut self, left: &mut VecDeque<&DeadLetter>) -> Result<()> {
        let publisher = match self.publisher.take() {
            Some(publisher) => publisher,
            None => self.broker.connect_publisher("dead letters without room").await?,
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

impl Writer {
    /// For how many of a batch's dead letters there is room, as of its transaction.
    pub(super) async fn room(&mut self, tx: &mut MySqlConnection, letters: &[DeadLetter]) -> Result<usize, StoreError> {
        if letters.is_empty() {
            return Ok(0);
        }
        let part = config::dead_letters_part(*self.room.max.get(), self.room.partitions);
        let open = letters::open_of(tx, &self.queue, part).await?;
        Ok(usize::try_from(part.saturating_sub(open)).unwrap_or(usize::MAX).min(letters.len()))
    }

    /// Does what is left to do with letters for which there was no room, before their batch is acknowledged.
    ///
    /// # Errors
    /// The session ends, and the broker has not taken all of them.
    pub(super) async fn do_without_room(&mut self, letters: &[DeadLetter], outage: &mut Outage) -> Result<()> {
        let (mut left, never): (VecDeque<&DeadLetter>, VecDeque<&DeadLetter>) =
            letters.iter().partition(|letter| Reason::may_be_good(letter.reason));
        never.iter().for_each(|letter| telemetry().consumer.dead_letter_dropped(letter.reason));
        let (partition, queue, now) = (self.partition, self.room.broker.returned(), Instant::now());
        if let Some(dropped) = self.room.dropped.note(never.len() as u64, now) {
            warn!(
                event = "dead-letters-dropped",
                partition,
                dropped,
                "{dropped} messages that can never be applied were counted and not kept: dead letters are at their bound"
            );
        }
        if let Some(returned) = self.room.returned.note(left.len() as u64, now) {
            warn!(
                event = "dead-letters-returned",
                partition,
                returned,
                "{returned} messages go to {queue}: dead letters are at their bound. Replay or purge some, then run `tallyd dead list`"
            );
        }
        while !left.is_empty() {
            let Err(error) = self.beat.during(self.room.publish(&mut left)).await else { break };
            if self.ends.is_cancelled() {
                return Err(error.context(format!("{} dead letters without room", left.len())));
            }
            let why = format!("dead letters are at their bound, and {queue} does not take more: {error:#}");
            let delay = outage.failed(&why);
            self.ends.run_until_cancelled(sleep(delay)).await;
        }
        outage.over();
        Ok(())
    }
}
