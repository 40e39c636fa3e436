//! One connection with the broker: receive, write, acknowledge, until told to stop or until anything goes wrong.
//!
//! While one batch is in its transaction the next one fills: two open batches at most, and of the rest the broker
//! holds back what exceeds the prefetch. A batch closes when the writer is free and `linger_ms` has passed since its
//! first message, or when it is full, or at the stop. Every exit but the stop is an error: the outer loop rebuilds.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use futures_util::{FutureExt, StreamExt};
use lapin::Acker;
use lapin::message::Delivery;
use lapin::options::{BasicAckOptions, BasicCancelOptions, BasicConsumeOptions, BasicNackOptions, BasicQosOptions};
use lapin::types::FieldTable;
use tokio::task::JoinHandle;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};

use super::Partition;
use super::batch::{Batch, Origin, Received};
use super::care::{self, Care};
use super::dead;
use super::flush::{Watch, Writer};
use crate::broker::Link;
use crate::event::{self, Message};
use crate::model::Micros;
use crate::runtime::log::Flood;
use crate::store::StoreError;

/// How often the loop wakes up with nothing to do, to say that it is alive.
const TICK: Duration = Duration::from_secs(1);

/// A batch that fills, and what acknowledges it.
#[derive(Default)]
struct Open {
    batch: Batch,
    /// Acknowledges the last message and, with `multiple`, all before it.
    last: Option<Acker>,
    since: Option<Instant>,
    /// The oldest and newest `at`, for the lag.
    oldest: Option<Micros>,
}

/// A batch in its transaction. The task runs to its end whatever becomes of the session.
type Writing = JoinHandle<Written>;

/// What comes back: the writer, the batch, and how many rows it came down to.
type Written = (Writer, Open, Result<usize, StoreError>);

/// Why a session ended in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    /// Told to.
    Stop,
    /// The messages that needed care are through.
    Relax,
}

/// A message has come back so often that it must be taken with more care. Nothing of its batch was tried.
#[derive(Debug, thiserror::Error)]
#[error("a message has come back {returns} times")]
pub(super) struct NeedsCare {
    pub care: Care,
    pub returns: i64,
}

/// One session: from connecting to the stop.
///
/// # Errors
/// Anything but an [`End`]. What was received and not acknowledged goes back to the broker.
pub(super) async fn run(partition: &Partition, care: Care, connected: impl FnOnce()) -> Result<End> {
    let link = partition.broker.connect(&format!("partition {} of {}", partition.number, partition.owner)).await?;
    partition.broker.declare(&link).await?;
    let qos = link.channel.basic_qos(care.prefetch(partition.prefetch), BasicQosOptions { global: false });
    link.call("set the prefetch", qos).await?;
    let queue = partition.queue();
    let tag = format!("tallyd-{}", partition.owner);
    let consume = link.channel.basic_consume(
        queue.as_str().into(),
        tag.as_str().into(),
        BasicConsumeOptions::default(),
        FieldTable::default(),
    );
    let deliveries = link.call("consume", consume).await.with_context(|| format!("queue {queue}"))?;
    connected();
    info!(event = "consuming", partition = partition.number, queue, "listening on {queue}");
    let ends = partition.stop.child_token();
    let writer = Some(partition.writer(ends.clone()));
    let mut session = Session {
        partition,
        care,
        link: &link,
        deliveries,
        ends,
        open: Open::default(),
        writer,
        writing: None,
        refused: Flood::default(),
    };
    let ended = session.consume().await;
    // The transaction that is under way is not cut off: it commits or not, and is redelivered if nobody acknowledges.
    let drained = session.finish(ended.is_ok()).await;
    let end = ended?;
    drained.map(|()| end)
}

struct Session<'a> {
    partition: &'a Partition,
    care: Care,
    link: &'a Link,
    deliveries: lapin::Consumer,
    /// Cancelled at the stop, and when the session fails: a database that is away is then waited for no longer.
    ends: CancellationToken,
    open: Open,
    /// While idle. Exactly one of `writer` and `writing` is there.
    writer: Option<Writer>,
    writing: Option<Writing>,
    refused: Flood,
}

impl Session<'_> {
    /// Receives and writes until the stop.
    async fn consume(&mut self) -> Result<End> {
        let mut tick = tokio::time::interval(TICK);
        let stop = self.partition.stop.clone();
        loop {
            self.partition.beat.beat();
            if self.is_due() {
                self.start_writing("size")?;
            }
            let full = self.is_full();
            tokio::select! {
                biased;
                () = stop.cancelled() => return Ok(End::Stop),
                written = join(&mut self.writing) => self.acknowledge(written?).await?,
                delivery = self.deliveries.next(), if !full => if self.receive(delivery)? {
                    return Ok(End::Relax);
                },
                () = lingered(self.open.since, self.partition.linger()), if self.writing.is_none() => self.start_writing("linger")?,
                _ = tick.tick() => {}
            }
        }
    }

    fn is_full(&self) -> bool {
        let limits = &self.partition.limits;
        self.open.batch.is_full(limits.batch_events_max, limits.batch_bytes_max)
    }

    fn is_due(&self) -> bool {
        self.writing.is_none() && self.is_full()
    }

    /// Takes one message, and those that are here already. True when care is no longer needed.
    fn receive(&mut self, delivery: Option<lapin::Result<Delivery>>) -> Result<bool> {
        let mut next = Some(delivery);
        while let Some(delivery) = next {
            let delivery = delivery.ok_or_else(|| anyhow!("the broker cancelled the consumer"))?.context("receive")?;
            let returns = care::returns(&delivery.properties);
            let needed = Care::needed(returns);
            if needed > self.care {
                return Err(NeedsCare { care: needed, returns }.into());
            }
            self.push(delivery);
            // What was returned stands first in the queue: behind this one there is none.
            if self.care > Care::Usual && needed == Care::Usual {
                return Ok(true);
            }
            next = if self.is_full() { None } else { self.deliveries.next().now_or_never() };
        }
        Ok(false)
    }

    fn push(&mut self, delivery: Delivery) {
        let Delivery { data: body, properties, acker, .. } = delivery;
        let now = Micros::now();
        let limits = &self.partition.limits;
        let open = &mut self.open;
        open.since.get_or_insert_with(Instant::now);
        open.last = Some(acker);
        open.batch.messages += 1;
        open.batch.bytes += body.len();
        let origin = Arc::new(Origin { body, headers: dead::headers(&properties) });
        event::decode_all(&origin.body, &self.partition.kinds.0, now, limits.future_max.0, |verdict, range| {
            match verdict {
                Ok(Message::Like(event)) => {
                    open.oldest = Some(open.oldest.map_or(event.at, |oldest| oldest.min(event.at)));
                    open.batch.events.push(Received { event, origin: Arc::clone(&origin), range });
                }
                Ok(Message::Fence(fence)) => open.batch.fence = open.batch.fence.max(Some(fence)),
                Err(refusal) => {
                    // Not the sentence: it may quote the message.
                    debug!(
                        event = "message-refused",
                        partition = self.partition.number,
                        reason = refusal.reason.code()
                    );
                    let body = origin.body.get(range).unwrap_or(&origin.body);
                    open.batch.refused.push(dead::refused(
                        refusal,
                        body,
                        &origin.headers,
                        &self.partition.queue(),
                        now,
                    ));
                }
            }
        });
    }

    /// Hands the open batch to the idle writer, in a task of its own.
    fn start_writing(&mut self, why: &'static str) -> Result<()> {
        let writer = self.writer.take().ok_or_else(|| anyhow!("the writer is busy"))?;
        let open = std::mem::take(&mut self.open);
        self.writing = Some(tokio::spawn(write(writer, open, why)));
        Ok(())
    }

    async fn acknowledge(&mut self, written: Written) -> Result<()> {
        let (writer, open, result) = written;
        (self.writer, self.writing) = (Some(writer), None);
        result.context("write a batch")?;
        let refused = open.batch.refused.len() as u64;
        if let Some(refused) = self.refused.note(refused, std::time::Instant::now()) {
            warn!(
                event = "dead-letters",
                partition = self.partition.number,
                refused,
                "{refused} messages that can never be applied were kept in dead_letter"
            );
        }
        let Some(acker) = open.last else { return Ok(()) };
        let acknowledged = self.link.call("acknowledge", acker.ack(BasicAckOptions { multiple: true })).await?;
        if acknowledged { Ok(()) } else { Err(anyhow!("the delivery is stale: the broker has taken it back")) }
    }

    /// Waits for the transaction under way; after the stop also writes what is open and gives the rest back.
    async fn finish(mut self, in_order: bool) -> Result<()> {
        self.ends.cancel();
        if self.writing.is_some() {
            let written = join(&mut self.writing).await?;
            if in_order {
                self.acknowledge(written).await?;
            }
        }
        if !in_order {
            return Ok(());
        }
        if !self.open.batch.is_empty() {
            self.start_writing("stop")?;
            let written = join(&mut self.writing).await?;
            self.acknowledge(written).await?;
        }
        self.give_back().await?;
        if let Some(writer) = &self.writer {
            writer.release().await;
        }
        Ok(())
    }

    /// What was delivered and never looked at goes back to the front of the queue. Only after the cancel, or the broker
    /// would send it again at once.
    async fn give_back(&mut self) -> Result<()> {
        let cancel = self.link.channel.basic_cancel(self.deliveries.tag(), BasicCancelOptions::default());
        self.link.call("cancel the consumer", cancel).await?;
        let mut last = None;
        while let Some(Some(Ok(delivery))) = self.deliveries.next().now_or_never() {
            last = Some(delivery.acker);
        }
        let Some(last) = last else { return Ok(()) };
        let options = BasicNackOptions { multiple: true, requeue: true };
        self.link.call("give messages back", last.nack(options)).await.map(drop)
    }
}

/// Waits for the transaction under way; for ever when there is none.
async fn join(writing: &mut Option<Writing>) -> Result<Written> {
    match writing {
        Some(task) => task.await.context("the writer panicked"),
        None => std::future::pending().await,
    }
}

/// Waits until a batch has been open for `linger`; for ever when there is none.
async fn lingered(since: Option<Instant>, linger: Duration) {
    match since {
        Some(since) => tokio::time::sleep_until(since + linger).await,
        None => std::future::pending().await,
    }
}

async fn write(mut writer: Writer, mut open: Open, why: &'static str) -> Written {
    let started = Instant::now();
    let result = writer.write(&mut open.batch).await;
    if let Ok(rows) = &result {
        let write_ms = started.elapsed().as_secs_f32() * 1e3;
        let lag_ms = open.oldest.map(|oldest| (Micros::now().0 - oldest.0) / 1_000);
        let (messages, events, refused) = (open.batch.messages, open.batch.events.len(), open.batch.refused.len());
        debug!(
            event = "batch-committed",
            partition = writer.partition,
            messages,
            events,
            rows,
            refused,
            why,
            write_ms,
            lag_ms,
            "{messages} messages committed as {rows} rows in {write_ms:.1} ms"
        );
    }
    (writer, open, result)
}

impl Partition {
    fn linger(&self) -> Duration {
        Duration::from_millis(self.limits.linger_ms)
    }

    fn writer(&self, ends: CancellationToken) -> Writer {
        Writer {
            store: self.store.clone(),
            partition: self.number,
            owner: self.owner.clone(),
            queue: self.queue(),
            metric: self.metric,
            database_away_max: self.limits.database_away_max.0,
            ends,
            epoch: None,
            reads_first: self.limits.reads_first,
            watch: Watch::default(),
        }
    }
}
