//! Hands a batch to the writer, and acknowledges the batch's messages once the batch is committed. At the end of a
//! session the channel is closed. If nothing failed, all delivered messages are written before the channel is closed
//! (decision 0010).

use std::pin::pin;
use std::time::Instant;

use anyhow::{Context, Result, anyhow};
use futures_util::StreamExt;
use lapin::Acker;
use lapin::options::BasicAckOptions;
use tokio::task::JoinHandle;
use tracing::{debug, warn};

use super::{Filling, REPLY_SUCCESS, Session};
use crate::consumer::SessionEnd;
use crate::consumer::batch_writer::{self, BatchWriter, WriteError};
use crate::consumer::declare::stopped_map;
use tallyd_base::runtime::progress::counted;
use tallyd_base::runtime::{clock, fault};
use tallyd_base::telemetry::{Close, Step, Unacked, telemetry};

/// The task that writes a batch. The task runs to its end, even if the session ends.
pub(super) type Writing = JoinHandle<Written>;

type Written = (BatchWriter, Result<batch_writer::Written, WriteError>);

impl Session<'_> {
    pub(super) fn start_writing(&mut self) -> Result<()> {
        let why = match self.is_full() {
            _ if self.flow.is_ending() => Close::Stop,
            true => Close::Size,
            false => Close::Linger,
        };
        let writer = self.writer.take().ok_or_else(|| anyhow!("the writer is busy"))?;
        let mut open = std::mem::take(&mut self.open);
        open.batch.is_behind = self.flow.is_behind();
        open.received.note();
        self.write_began = Some(Instant::now());
        telemetry().consumer.batches.get_or_create(&why).inc();
        self.unacked.writing = std::mem::take(&mut self.unacked.open);
        self.writing = Some(tokio::spawn(write(self.partition.number, writer, open, why)));
        Ok(())
    }

    pub(super) fn committed(&mut self, written: Written) -> Result<(), SessionEnd> {
        let (writer, result) = written;
        self.writer = Some(writer);
        self.unacked.writing = Unacked::default();
        self.is_proven |= result.is_err();
        let batch_writer::Written { refused, stopped, .. } = result?;
        if let Some(refused) = self.refused.note(refused as u64, Instant::now()) {
            let become_letters = counted(
                refused,
                "message can never be applied: it becomes a dead letter",
                "messages can never be applied: they become dead letters",
            );
            warn!(
                event = "dead-letters",
                partition = self.partition.number,
                refused,
                "{become_letters}, up to the quota"
            );
        }
        self.flow.committed();
        match (stopped, &self.partition.map) {
            (Some(trial), Some(map)) => Err(anyhow!(stopped_map(&map.name, trial)).into()),
            _ => Ok(()),
        }
    }

    /// Acknowledges this message and all messages before it.
    pub(super) async fn acknowledge(&mut self, last: Acker) -> Result<()> {
        let began = Instant::now();
        let ack = self.link.call("acknowledge", last.ack(BasicAckOptions { multiple: true }));
        let acknowledged = self.partition.heartbeat.during(ack).await?;
        if !acknowledged {
            return Err(anyhow!("the delivery is stale: the broker has requeued the message"));
        }
        telemetry().consumer.steps.get_or_create(&Step::Acknowledge).observe(began.elapsed().as_secs_f64());
        self.went_well();
        Ok(())
    }

    /// Closing the channel requeues the unacknowledged messages and activates the next consumer in one step, so that no
    /// new fence overtakes an event of this session. After a cancel, this consumer would keep its messages while the
    /// next one is active. Waits for the running transaction. Returns the writer if there was none.
    pub(super) async fn close(mut self) -> Option<BatchWriter> {
        self.ends.cancel();
        self.open.received.note();
        fault::point("consumer:ending");
        // The session drops the messages that are not written. The loop below drops the messages that still arrive. The
        // broker requeues all these messages.
        self.open = Filling::default();
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

pub(super) async fn join(writing: &mut Option<Writing>) -> Result<Written> {
    let Some(task) = writing else { return std::future::pending().await };
    let written = task.await;
    // A finished task must not be polled again.
    *writing = None;
    written.context("the writer panicked")
}

async fn write(partition: u16, mut writer: BatchWriter, open: Filling, why: Close) -> Written {
    let started = Instant::now();
    let (messages, events) = (open.batch.messages, open.batch.events.len());
    let result = writer.write(open.batch).await;
    if let Ok(batch_writer::Written { rows, refused, .. }) = &result {
        let write_ms = started.elapsed().as_secs_f32() * 1e3;
        let lag_ms = open.oldest.map(|oldest| (clock::now().0 - oldest.0) / 1_000);
        debug!(
            event = "batch-committed",
            partition,
            messages,
            events,
            rows,
            refused,
            why = why.name(),
            write_ms,
            lag_ms,
            "{messages} messages committed as {rows} rows in {write_ms:.1} ms"
        );
    }
    (writer, result)
}
