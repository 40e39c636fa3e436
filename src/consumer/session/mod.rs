//! One session with the broker: it receives, writes and acknowledges messages until it ends ([`SessionEnd`]).
//!
//! While the writer writes one batch, the session fills the next one, so there are at most two batches. The broker
//! holds back messages beyond the prefetch. A batch closes when it is full, or when the daemon stops. A batch also
//! closes when the writer is free and `linger_ms` has passed since the batch's first message. While few events arrive,
//! a batch closes as soon as the writer is free.

mod writing;

use std::convert::Infallible;
use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context;
use futures_util::{FutureExt, StreamExt};
use lapin::Acker;
use lapin::message::Delivery;
use tokio_util::sync::CancellationToken;
use tracing::debug;

use self::writing::{Writing, join};
use super::arrival_rate::ArrivalRate;
use super::batch::{Arrived, Batch, Event, Inbox, Origin, Received};
use super::batch_writer::BatchWriter;
use super::counting::{InBatches, ReceivedCounts};
use super::decode::decode;
use super::{Learned, PAUSED_BY, Partition, SessionEnd};
use crate::config::{Config, Derived};
use crate::letter;
use crate::runtime::clock;
use crate::runtime::log::Flood;
use crate::runtime::retry::Outage;
use crate::telemetry::{PartitionState, Standing, telemetry};
use tallyd_core::event::{Message, Terms};
use tallyd_core::model::Micros;
use tallyd_core::prefetch::portion;
use tallyd_core::stall_detector::StallDetector;
use tallyd_rabbitmq::Link;

/// AMQP's reply code for success.
const REPLY_SUCCESS: u16 = 200;

/// The loop waits for this time before it reads the messages that have arrived. Without this wait, the runtime's thread
/// would wake up for every few messages. These wake-ups would cost more than all other work on the messages.
const GATHER: Duration = Duration::from_millis(1);

/// An idle loop wakes up at this interval to show that it is alive.
const TICK: Duration = Duration::from_secs(1);

/// A session that has lasted for this time is considered to work, even if no messages arrived.
const PROBATION: Duration = Duration::from_secs(5);

/// A batch that the session fills, and the handle that acknowledges the batch's last message.
#[derive(Default)]
struct Open {
    batch: Batch,
    /// Acknowledges the last message and, with `multiple`, all before it.
    last: Option<Acker>,
    since: Option<Instant>,
    /// The oldest `at` of the batch's events, for the metric of the lag.
    oldest: Option<Micros>,
    received: ReceivedCounts,
    /// How often one of the batch's messages was returned.
    returns_max: i64,
}

/// Runs one session, from connecting to its end. The broker keeps messages that were received and not acknowledged.
pub(super) async fn run(
    partition: &Partition,
    config: &Config,
    learned: &mut Learned,
    outage: &mut Outage,
) -> SessionEnd {
    let number = partition.number;
    let prefetch = learned.begin(config);
    let queue = partition.queue();
    // `listen` makes many calls, and each has a timeout.
    let listening = partition.heartbeat.during(partition.listen(&queue, prefetch)).await;
    let (link, deliveries, partitions) = match listening {
        Ok(listening) => listening,
        Err(error) => return error.into(),
    };
    learned.partitions = partitions;
    let ends = partition.stop.child_token();
    let writer = BatchWriter::new(partition, config, partitions, learned.reads_first, ends.clone());
    let mut session = Session {
        partition,
        config,
        link: &link,
        ends,
        terms: partition.live.derive(|config| Terms::from(config)),
        deliveries,
        inbox: Inbox::default(),
        open: Open::default(),
        arrival_rate: ArrivalRate::default(),
        writer: Some(writer),
        writing: None,
        committed: None,
        learned,
        outage,
        began: Instant::now(),
        is_proven: false,
        refused: Flood::default(),
        stall_detector: StallDetector::default(),
        unacked: InBatches::default(),
        vitals: telemetry().partition(number),
    };
    session.vitals.stands(Standing::Listening);
    let Err(mut end) = session.consume().await;
    if matches!(end, SessionEnd::Paused) {
        // A pause does not wait for an unresponsive database, and neither does the stop.
        session.ends.cancel();
    }
    if end.is_orderly()
        && let Err(failed) = session.write_delivered().await
    {
        end = failed;
    }
    let is_proven = session.is_proven;
    let writer = session.close().await;
    if end.is_orderly() {
        if let Some(writer) = writer {
            partition.heartbeat.during(writer.release()).await;
        }
        return end;
    }
    if end.takes_fewer() || !is_proven {
        learned.lower_prefetch(prefetch, number, config, &end);
    }
    end
}

struct Session<'a> {
    partition: &'a Partition,
    config: &'a Config,
    link: &'a Link,
    /// The token is cancelled at the stop, and when the session fails. The writer then stops waiting for an
    /// unresponsive database.
    ends: CancellationToken,
    /// These settings are read again for each message, so that a reload of the configuration applies to the next
    /// message.
    terms: Derived<Terms>,
    deliveries: lapin::Consumer,
    /// Received messages that have not been added to a batch yet.
    inbox: Inbox,
    open: Open,
    arrival_rate: ArrivalRate,
    /// The idle writer. Always either `writer` or `writing` is `Some`, and the other one is `None`.
    writer: Option<BatchWriter>,
    writing: Option<Writing>,
    /// Acknowledges the last message that is committed and not acknowledged.
    committed: Option<Acker>,
    learned: &'a mut Learned,
    /// The current outage of the connection to the broker. The outage ends when a batch is written, or after some time
    /// without a failure. Until then, a new session begins after a delay, because a connection can seem to work
    /// although it does not.
    outage: &'a mut Outage,
    began: Instant,
    /// True as soon as the connection has proved that it works. There are three proofs: a batch was written, a batch
    /// failed in MySQL, or nothing has failed for some time.
    is_proven: bool,
    refused: Flood,
    stall_detector: StallDetector,
    unacked: InBatches,
    vitals: Arc<PartitionState>,
}

impl Session<'_> {
    /// Receives, writes and acknowledges until the session ends.
    async fn consume(&mut self) -> Result<Infallible, SessionEnd> {
        let mut tick = tokio::time::interval(TICK);
        let (stop, control) = (self.partition.stop.clone(), self.partition.control.clone());
        let mut paused = pin!(control.until_paused(PAUSED_BY));
        // The loop lets messages gather until this instant.
        let mut gather: Option<Instant> = None;
        loop {
            if self.writing.is_none() {
                // While the writer writes a batch, only the writer updates the heartbeat, at each try. Otherwise a
                // writer that hangs would not be noticed.
                self.partition.heartbeat.beat();
            }
            self.unacked.note(self.inbox.len(), &self.vitals);
            if self.fill() {
                return Err(SessionEnd::OtherPrefetch);
            }
            if self.starts_if_due()? {
                continue;
            }
            let lingers_until = self.lingers_until();
            tokio::select! {
                biased;
                () = stop.cancelled() => return Err(SessionEnd::Stopped),
                () = &mut paused => return Err(SessionEnd::Paused),
                written = join(&mut self.writing) => {
                    self.committed(written?)?;
                    // The writer must not wait for the acknowledgement.
                    let started = self.start_next();
                    self.acknowledge().await?;
                    started?;
                }
                delivery = self.deliveries.next(), if gather.is_none() => {
                    self.take_in(delivery)?;
                    // While the writer is busy, waiting costs no time.
                    gather = (self.arrival_rate.is_fast || self.writing.is_some()).then(|| Instant::now() + GATHER);
                }
                () = until(gather) => gather = None,
                () = until(lingers_until), if self.writing.is_none() => {}
                _ = tick.tick() => self.check_idle().await?,
            }
        }
    }

    /// If the session is idle, checks that the queue really has nothing to deliver.
    async fn check_idle(&mut self) -> Result<(), SessionEnd> {
        if self.began.elapsed() > PROBATION {
            self.went_well();
        }
        let is_idle = self.writing.is_none() && self.open.batch.is_empty();
        if is_idle && self.stall_detector.is_due(Instant::now()) {
            let queue = self.partition.queue();
            let depth = self.partition.heartbeat.during(self.link.depth(&queue)).await;
            let messages = depth.map_err(anyhow::Error::from)?.messages();
            if self.stall_detector.is_stalled(messages, Instant::now()) {
                return Err(SessionEnd::Stalled { queue, messages: messages.unwrap_or_default() });
            }
        }
        Ok(())
    }

    /// Records that a batch was written, or that nothing failed for some time.
    fn went_well(&mut self) {
        self.outage.over();
        self.is_proven = true;
    }

    fn is_full(&self) -> bool {
        let limits = &self.config.consumer;
        self.open.batch.is_full(limits.batch_events_max, limits.batch_bytes_max)
    }

    fn lingers_until(&self) -> Option<Instant> {
        let linger_ms = if self.arrival_rate.is_fast { self.config.consumer.linger_ms } else { 0 };
        self.open.since.map(|since| since + Duration::from_millis(linger_ms))
    }

    /// Takes one message, and all messages that have already arrived. Messages must not stay inside the library,
    /// because their bytes are not counted there. Fails with `Cancelled` if the queue was deleted: the library reports
    /// this once.
    fn take_in(&mut self, delivery: Option<lapin::Result<Delivery>>) -> Result<(), SessionEnd> {
        self.stall_detector.received(Instant::now());
        let mut next = Some(delivery);
        while let Some(delivery) = next {
            let delivery = delivery.ok_or(SessionEnd::Cancelled)?;
            self.inbox.push(delivery.inspect_err(|error| self.link.note(error)).context("receive")?);
            // The messages are much larger than the session expected when it chose the prefetch. The session ends
            // before the messages fill the memory.
            let (bytes, bytes_max) = (self.inbox.bytes, Learned::bytes_max(self.config));
            if self.learned.prefetch.is_overfull(bytes, bytes_max, self.inbox.sizes()) {
                return Err(SessionEnd::LargeMessages(self.inbox.bytes));
            }
            next = self.deliveries.next().now_or_never();
        }
        Ok(())
    }

    /// Moves messages from the inbox into the open batch. Returns true if a different prefetch would suit these messages
    /// better.
    fn fill(&mut self) -> bool {
        while !self.is_full() {
            if !self.inbox.next().is_some_and(|next| self.may_join(next.returns)) {
                break;
            }
            let Some(message) = self.inbox.pop() else { break };
            self.learned.prefetch.note(message.returns, message.bytes());
            self.push(message);
            if self.learned.is_off(self.config) {
                return true;
            }
        }
        false
    }

    /// Whether a message that was returned so often can be written together with the open batch. Before a message that
    /// may crash the daemon is decoded, the batches before it are acknowledged.
    fn may_join(&self, returns: i64) -> bool {
        let portion = portion(self.open.returns_max.max(returns));
        let is_acknowledged = self.writing.is_none() && self.committed.is_none();
        portion == u16::MAX || (is_acknowledged && self.open.batch.messages < usize::from(portion))
    }

    fn push(&mut self, message: Arrived) {
        let bytes = message.bytes();
        let Arrived { body, headers, returns, redelivered, is_direct, acker } = message;
        let now = clock::now();
        let open = &mut self.open;
        open.since.get_or_insert_with(Instant::now);
        self.unacked.open.oldest.get_or_insert(now);
        self.unacked.open.messages += 1;
        open.received.messages += 1;
        open.received.redelivered += u64::from(redelivered);
        open.last = Some(acker);
        open.batch.messages += 1;
        open.returns_max = open.returns_max.max(returns);
        open.batch.bytes += bytes;
        open.batch.clock.note(now);
        open.batch.belongs_to(headers.traceparent);
        let origin = Arc::new(Origin { body, headers: headers.json });
        let map = self.partition.map.as_deref();
        decode(&origin.body, is_direct, map, (self.terms.get(), now), |verdict, range| {
            let event = match verdict {
                Ok(Message::Like(event)) => Event::Like(event),
                Ok(Message::Count(event)) => Event::Count(event),
                Ok(Message::Set(event)) => Event::Set(event),
                // The queue can have returned earlier events behind this fence.
                Ok(Message::Fence(_)) if redelivered => return,
                Ok(Message::Fence(fence)) => return open.batch.take_fence(fence),
                Err(refusal) => {
                    // The error's text is left out, because it can quote the message.
                    debug!(
                        event = "message-refused",
                        partition = self.partition.number,
                        reason = refusal.reason.code()
                    );
                    let body = origin.body.get(range).unwrap_or(&origin.body);
                    let letter = letter::refused(refusal, body, &origin.headers, &self.partition.queue(), now);
                    return open.batch.refused.push(letter);
                }
            };
            open.oldest = Some(open.oldest.map_or(event.at(), |oldest| oldest.min(event.at())));
            open.received.event(&event);
            open.batch.events.push(Received { event, origin: Arc::clone(&origin), range });
        });
    }
}

/// Waits until `then`, or forever if `then` is `None`.
async fn until(then: Option<Instant>) {
    match then {
        Some(then) => tokio::time::sleep_until(then.into()).await,
        None => std::future::pending().await,
    }
}
