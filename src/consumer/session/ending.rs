//! How a session ends: in order, or after an error.

use std::pin::pin;

use anyhow::Result;
use futures_util::{FutureExt, StreamExt};
use lapin::Acker;
use lapin::options::{BasicCancelOptions, BasicNackOptions};
use tracing::debug;

use super::super::waiting::Waiting;
use super::writing::{Written, join};
use super::{End, Open, REPLY_SUCCESS, Session};

impl Session<'_> {
    /// After an error, or to stop the broker at once (`learns`: for what waits is of a size that nobody knew). Gives everything back and waits
    /// for the transaction under way, which commits or not.
    pub(super) async fn break_off(mut self, learns: bool) {
        self.ends.cancel();
        self.open.received.note();
        if learns {
            self.partition.sizes.learn(self.waiting.sizes());
        }
        // The broker's again; and as much may be on the way, which nobody needs either.
        (self.waiting, self.open) = (Waiting::default(), Open::default());
        // First of all the broker takes back what we hold, or a fence could pass it by.
        let closed = self.link.channel.close(REPLY_SUCCESS, "starting again".into());
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
    }

    /// In order: writes and acknowledges what is open, and gives the rest and the partition back. All that is ours is committed before the consumer
    /// is cancelled: from then on the broker gives the partition to the next daemon, which takes it over from whoever still writes.
    pub(super) async fn finish(&mut self, end: End) -> Result<()> {
        let beat = self.partition.beat.clone();
        let mut written = None;
        if end == End::Stop {
            self.ends.cancel();
            self.write_open().await?;
        } else {
            // What was delivered is written, not returned: each return counts. Only what slips in before the cancel goes back; the next daemon
            // may pass on a fence that was behind it, as at a stop, for which the reconciler looks twice before it repairs.
            written = self.write_delivered().await?;
        }
        let cancel = self.link.channel.basic_cancel(self.deliveries.tag(), BasicCancelOptions::default());
        beat.during(self.link.call("cancel the consumer", cancel)).await?;
        if let Some(last) = written {
            self.acknowledge_until(&last).await?;
        }
        beat.during(self.give_back()).await?;
        let close = self.link.channel.close(REPLY_SUCCESS, "done".into());
        beat.during(self.link.call("close the channel", close)).await?;
        if let Some(writer) = &self.writer {
            beat.during(writer.release()).await;
        }
        Ok(())
    }

    /// Writes and acknowledges the batch under way and the open one.
    async fn write_open(&mut self) -> Result<()> {
        if self.writing.is_some() {
            let written = self.written().await?;
            self.acknowledge(written).await?;
        }
        if self.open.batch.is_empty() {
            return Ok(());
        }
        self.start_writing("stop")?;
        let written = self.written().await?;
        self.acknowledge(written).await
    }

    /// Waits for the transaction under way, and takes in what still comes: the library holds as much as the broker sends.
    async fn written(&mut self) -> Result<Written> {
        loop {
            tokio::select! {
                biased;
                written = join(&mut self.writing) => return written,
                Some(delivery) = self.deliveries.next() => self.take_in(Some(delivery))?,
            }
        }
    }

    /// Writes all that has come, and gives what acknowledges it. Not before the cancel: for each that is acknowledged the broker would send
    /// another one.
    async fn write_delivered(&mut self) -> Result<Option<Acker>> {
        let mut last = None;
        loop {
            while !self.is_full() {
                if let Some(Some(delivery)) = self.deliveries.next().now_or_never() {
                    self.take_in(Some(delivery))?;
                }
                let Some(message) = self.waiting.pop() else { break };
                self.push(message);
            }
            if self.writing.is_none() && self.open.batch.is_empty() {
                return Ok(last);
            }
            self.partition.beat.beat();
            if self.writing.is_none() {
                self.start_writing("stop")?;
            }
            let written = self.written().await?;
            last = self.committed(written)?.or(last);
        }
    }

    /// What was delivered and never looked at goes back to the front of the queue. Only after the cancel, or the broker
    /// would send it again at once.
    async fn give_back(&mut self) -> Result<()> {
        let mut last = self.waiting.take_last();
        while let Some(Some(Ok(delivery))) = self.deliveries.next().now_or_never() {
            last = Some(delivery.acker);
        }
        let Some(last) = last else { return Ok(()) };
        let options = BasicNackOptions { multiple: true, requeue: true };
        self.link.call("give messages back", last.nack(options)).await.map(drop)
    }
}
