//! How a session ends: it writes what it has if nothing went wrong, and closes its channel.

use std::pin::pin;

use futures_util::{FutureExt, StreamExt};
use tracing::debug;

use super::writing::{Written, join};
use super::{Open, REPLY_SUCCESS, Session};
use crate::consumer::batch_writer::{BatchWriter, WriteError};
use crate::consumer::inbox::Inbox;
use crate::runtime::fault;
use crate::telemetry::Close;
use tallyd_mysql::StoreError;

/// Why a session has ended.
#[derive(Debug, thiserror::Error)]
pub(in crate::consumer) enum SessionEnd {
    #[error("stopped")]
    Stopped,
    #[error("another prefetch fits better")]
    OtherPrefetch,
    /// The next session must take fewer messages. Nothing of the open batch was tried.
    #[error("a message has come back {0} times")]
    Redelivered(i64),
    /// Messages are larger than the prefetch assumed: the inbox has this many bytes.
    #[error("messages of {0} bytes wait, more than memory is meant for")]
    LargeMessages(usize),
    /// The stream of messages has ended.
    #[error("the broker cancelled the consumer")]
    Cancelled,
    #[error("{queue} has {messages} messages, and the broker sends none of them")]
    Stalled { queue: String, messages: u32 },
    #[error("another daemon has taken the partition over")]
    TakenOver,
    #[error(transparent)]
    Failed(#[from] anyhow::Error),
}

impl SessionEnd {
    /// Nothing went wrong: what was delivered can still be written.
    pub fn is_orderly(&self) -> bool {
        matches!(self, Self::Stopped | Self::OtherPrefetch)
    }

    pub fn takes_fewer(&self) -> bool {
        matches!(self, Self::Redelivered(_) | Self::LargeMessages(_))
    }
}

impl From<WriteError> for SessionEnd {
    fn from(error: WriteError) -> Self {
        match error {
            WriteError::Store(StoreError::TakenOver(_)) => Self::TakenOver,
            error => Self::Failed(anyhow::Error::from(error).context("write a batch")),
        }
    }
}

impl Session<'_> {
    /// Writes everything that was delivered, because the broker counts each message that returns. Acknowledges it at the end: for each
    /// acknowledgement the broker would send more.
    pub(super) async fn write_delivered(&mut self) -> Result<(), SessionEnd> {
        let mut last = None;
        loop {
            if let Some(delivery) = self.deliveries.next().now_or_never() {
                self.take_in(delivery)?;
            }
            self.fill()?;
            if self.writing.is_none() {
                if self.open.batch.is_empty() {
                    break;
                }
                self.start_writing(Close::Stop)?;
            }
            self.partition.heartbeat.beat();
            let written = self.written().await?;
            last = self.committed(written)?.or(last);
        }
        match last {
            Some(last) => Ok(self.acknowledge_until(&last).await?),
            None => Ok(()),
        }
    }

    /// Waits for the running transaction and takes in what still comes: the library holds as much as the broker sends.
    async fn written(&mut self) -> Result<Written, SessionEnd> {
        loop {
            tokio::select! {
                biased;
                written = join(&mut self.writing) => return Ok(written?),
                Some(delivery) = self.deliveries.next() => self.take_in(Some(delivery))?,
            }
        }
    }

    /// Closes the channel. In one step the broker takes back what was not acknowledged and makes the next consumer the active one, so no fence
    /// passes an event that this session holds. A cancelled consumer would keep its messages while the next one is active. Waits
    /// for the running transaction, which commits or not, and returns the writer if none was running.
    pub(super) async fn close(mut self) -> Option<BatchWriter> {
        self.ends.cancel();
        self.open.received.note();
        fault::point("consumer:ending");
        // The broker has these messages again. As many can be in flight, which nobody needs either.
        (self.inbox, self.open) = (Inbox::default(), Open::default());
        let closed = self.link.channel.close(REPLY_SUCCESS, "done".into());
        let mut closed = pin!(self.partition.heartbeat.during(self.link.call("close the channel", closed)));
        let closed = loop {
            tokio::select! {
                biased;
                closed = &mut closed => break closed,
                Some(_) = self.deliveries.next() => {}
            }
        };
        if let Err(error) = closed {
            debug!(event = "close-failed", partition = self.partition.number, "{error:#}");
        }
        if self.writing.is_some()
            && let Err(error) = join(&mut self.writing).await
        {
            debug!(event = "close-failed", partition = self.partition.number, "{error:#}");
        }
        self.writer
    }
}
