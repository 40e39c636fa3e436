//! How a session ends: it writes what it has where nothing went wrong, and closes its channel.

use std::pin::pin;

use anyhow::Result;
use futures_util::{FutureExt, StreamExt};
use tracing::debug;

use super::super::flush::Writer;
use super::super::waiting::Waiting;
use super::writing::{Written, join};
use super::{Open, REPLY_SUCCESS, Session};
use crate::runtime::fault;
use crate::telemetry::Close;

impl Session<'_> {
    /// Writes all that was delivered, for each message that returns is counted, and acknowledges it at the end: for each acknowledgement the broker
    /// would send more.
    pub(super) async fn write_delivered(&mut self) -> Result<()> {
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
            self.partition.beat.beat();
            let written = self.written().await?;
            last = self.committed(written)?.or(last);
        }
        match last {
            Some(last) => self.acknowledge_until(&last).await,
            None => Ok(()),
        }
    }

    /// Waits for the running transaction and takes in what still comes: the library holds as much as the broker sends.
    async fn written(&mut self) -> Result<Written> {
        loop {
            tokio::select! {
                biased;
                written = join(&mut self.writing) => return written,
                Some(delivery) = self.deliveries.next() => self.take_in(Some(delivery))?,
            }
        }
    }

    /// Closes the channel. In one step the broker takes back what was not acknowledged and makes the next consumer the active one, so no fence
    /// passes an event that this session holds. A cancelled consumer would keep its messages while the next one is active. Waits
    /// for the running transaction, which commits or not, and gives the writer where none was running.
    pub(super) async fn close(mut self) -> Option<Writer> {
        self.ends.cancel();
        self.open.received.note();
        fault::point("consumer:ending");
        // The broker has them again, and as many can be in flight, which nobody needs either.
        (self.waiting, self.open) = (Waiting::default(), Open::default());
        let closed = self.link.channel.close(REPLY_SUCCESS, "done".into());
        let mut closed = pin!(self.partition.beat.during(self.link.call("close the channel", closed)));
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
