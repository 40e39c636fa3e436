//! One session with the broker: it receives, writes and acknowledges messages until it ends ([`SessionEnd`]).
//!
//! [`Flow`] decides what to do next. While the writer writes one batch, the session fills the next one. The broker holds
//! back messages beyond the prefetch. A batch closes when it is full, when no further message can come before its
//! acknowledgement, or when the session ends. Otherwise it closes when the writer is free and `linger_ms` has passed since
//! the write of the last batch began. So an event of an idle partition is written at once, and a busy partition commits
//! seldom.

mod filling;
mod writing;

use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context;
use futures_util::{FutureExt, StreamExt};
use lapin::Acker;
use lapin::message::Delivery;
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;

use self::filling::Filling;
use self::writing::{Writing, join};
use super::batch::Arrived;
use super::batch_writer::BatchWriter;
use super::counting::InBatches;
use super::{Learned, PAUSED_BY, Partition, SessionEnd};
use tallyd_base::config::{Config, Derived};
use tallyd_base::runtime::clock;
use tallyd_base::runtime::log::Flood;
use tallyd_base::runtime::retry::Outage;
use tallyd_base::telemetry::{ConsumerState, PartitionState, telemetry};
use tallyd_core::event::Terms;
use tallyd_core::flow::{Flow, Step};
use tallyd_core::stall_detector::StallDetector;
use tallyd_rabbitmq::Link;

const REPLY_SUCCESS: u16 = 200;

/// Without this wait, the runtime's thread would wake up for every few messages, which would cost more than all other
/// work on them (docs/performance.md).
const GATHER: Duration = Duration::from_millis(5);

/// An idle loop wakes up at this interval to show that it is alive.
const TICK: Duration = Duration::from_secs(1);

/// A session that has lasted for this time is considered to work, even if no messages arrived.
const PROBATION: Duration = Duration::from_secs(5);

/// If an idle session has received messages, it counts those in its queue at this interval.
const CHECK_EVERY: Duration = Duration::from_secs(5);

/// If an idle session has received messages, it counts those in its queue through another node at this interval.
const CHECK_ELSEWHERE_EVERY: Duration = Duration::from_secs(10);

/// Runs one session, from connecting to its end. The broker keeps messages that were received and not acknowledged.
pub(super) async fn run(
    partition: &Partition,
    config: &Config,
    learned: &mut Learned,
    outage: &mut Outage,
) -> SessionEnd {
    let number = partition.number;
    let prefetch = learned.prefetch.begin(learned.limits(config));
    let queue = partition.queue();
    // `listen` makes many calls, and each has a timeout.
    let listening = partition.heartbeat.during(partition.listen(&queue, prefetch)).await;
    let (link, deliveries, declared) = match listening {
        Ok(listening) => listening,
        Err(error) => return error.into(),
    };
    learned.partitions = declared.partitions;
    let limits = learned.limits(config);
    let ends = partition.stop.child_token();
    let writer = BatchWriter::new(partition, config, declared, learned.reads_first, ends.clone());
    let mut session = Session {
        partition,
        config,
        link: &link,
        ends,
        terms: partition.live.derive(|config| Terms::from(config)),
        deliveries,
        is_cancelled: false,
        flow: Flow::new(std::mem::take(&mut learned.prefetch), limits),
        open: Filling::default(),
        write_began: None,
        writer: Some(writer),
        writing: None,
        outage,
        began: Instant::now(),
        is_proven: false,
        refused: Flood::default(),
        stall_detector: StallDetector::new(CHECK_EVERY),
        stall_elsewhere: StallDetector::new(CHECK_ELSEWHERE_EVERY),
        counting: None,
        unacked: InBatches::default(),
        partition_state: telemetry().partition(number),
    };
    session.partition_state.set_state(ConsumerState::Listening);
    let end = match session.consume().await {
        Ok(end) => end,
        Err(failed) => {
            // Messages are acknowledged even if a later batch failed.
            if let Some(last) = session.flow.failed() {
                let _ = session.acknowledge(last).await;
            }
            failed
        }
    };
    let is_proven = session.is_proven;
    learned.prefetch = session.flow.close();
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
    ends: CancellationToken,
    /// These settings are read again for each message, so that a reload of the configuration applies to the next
    /// message.
    terms: Derived<Terms>,
    deliveries: lapin::Consumer,
    /// True if the queue was deleted while the session was ending.
    is_cancelled: bool,
    flow: Flow<Arrived, Acker>,
    open: Filling,
    /// When the write of the last batch began.
    write_began: Option<Instant>,
    /// The idle writer. Always either `writer` or `writing` is `Some`, and the other one is `None`.
    writer: Option<BatchWriter>,
    writing: Option<Writing>,
    /// Ends when a batch is written, or after some time without a failure. Until then, a new session begins after a
    /// delay, because a connection can seem to work although it does not.
    outage: &'a mut Outage,
    began: Instant,
    /// True as soon as the connection has proved that it works. There are three proofs: a batch was written, a batch
    /// failed in MySQL, or nothing has failed for some time.
    is_proven: bool,
    refused: Flood,
    stall_detector: StallDetector,
    stall_elsewhere: StallDetector,
    counting: Option<AbortOnDropHandle<Option<u32>>>,
    unacked: InBatches,
    partition_state: Arc<PartitionState>,
}

impl Session<'_> {
    async fn consume(&mut self) -> Result<SessionEnd, SessionEnd> {
        let mut tick = tokio::time::interval(TICK);
        let (stop, control) = (self.partition.stop.clone(), self.partition.control.clone());
        let mut paused = pin!(control.until_paused(PAUSED_BY));
        // The loop lets messages gather until this instant.
        let mut gather: Option<Instant> = None;
        let (mut end, mut is_asked_to_end) = (SessionEnd::OtherPrefetch, false);
        loop {
            if self.writing.is_none() {
                // While the writer writes a batch, only the writer updates the heartbeat, at each try. Otherwise a
                // writer that hangs would not be noticed.
                self.partition.heartbeat.beat();
            }
            self.unacked.note(self.flow.waiting(), &self.partition_state);
            loop {
                let (is_full, lingers_until) = (self.is_full(), self.lingers_until());
                let has_lingered = || lingers_until.is_none_or(|until| until <= Instant::now());
                let Some(step) = self.flow.next(is_full, has_lingered) else { break };
                match step {
                    Step::Join(message) => self.push(message),
                    Step::Write => self.start_writing()?,
                    Step::Acknowledge(last) => self.acknowledge(last).await?,
                    Step::Close => return Ok(end),
                }
            }
            let (lingers_until, is_ending) = (self.lingers_until(), self.flow.is_ending());
            tokio::select! {
                biased;
                () = stop.cancelled(), if !is_asked_to_end => {
                    (end, is_asked_to_end) = (SessionEnd::Stopped, true);
                    self.take_in_arrived()?;
                    self.flow.end();
                }
                () = &mut paused, if !is_asked_to_end => {
                    (end, is_asked_to_end) = (SessionEnd::Paused, true);
                    self.take_in_arrived()?;
                    self.flow.end();
                    // A pause does not wait for an unresponsive database, and neither does the stop.
                    self.ends.cancel();
                }
                written = join(&mut self.writing) => {
                    gather = None;
                    self.committed(written?)?;
                    self.take_in_arrived()?;
                }
                delivery = self.deliveries.next(), if gather.is_none() && !self.is_cancelled => {
                    self.take_in(delivery)?;
                    self.take_in_arrived()?;
                    let now = Instant::now();
                    let must_linger = self.lingers_until().is_some_and(|until| until > now);
                    // While the open batch can't be written, waiting costs no time.
                    gather = (must_linger || self.writing.is_some()).then(|| now + GATHER);
                }
                () = until(gather) => gather = None,
                () = until(lingers_until), if self.writing.is_none() && self.open.batch.messages > 0 => {
                    self.take_in_arrived()?;
                }
                _ = tick.tick(), if !is_ending => self.check_idle().await?,
            }
        }
    }

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
        if is_idle && self.counting.is_none() && self.stall_elsewhere.is_due(Instant::now()) {
            // A task of its own, because the other nodes can hang while this session's node delivers.
            let (broker, node) = (self.partition.broker.clone(), self.link.node.clone());
            let queue = self.partition.queue();
            let count = async move { broker.count_elsewhere(&node, &queue).await };
            self.counting = Some(AbortOnDropHandle::new(tokio::spawn(count)));
        }
        let Some(counted) = self.counting.as_mut().and_then(FutureExt::now_or_never) else { return Ok(()) };
        self.counting = None;
        let messages = counted.ok().flatten();
        if self.stall_elsewhere.is_stalled(messages, Instant::now()) {
            self.partition.broker.avoid(&self.link.node);
            let queue = self.partition.queue();
            return Err(SessionEnd::CutOff { queue, messages: messages.unwrap_or_default() });
        }
        Ok(())
    }

    fn went_well(&mut self) {
        self.outage.over();
        self.is_proven = true;
    }

    fn is_full(&self) -> bool {
        let limits = &self.config.consumer;
        self.open.batch.is_full(limits.batch_events_max, limits.batch_bytes_max)
    }

    /// `None` if no batch was written in this session. The open one then need not wait.
    fn lingers_until(&self) -> Option<Instant> {
        self.write_began.map(|began| began + Duration::from_millis(self.config.consumer.linger_ms))
    }

    /// Takes one message. If the queue was deleted, the library reports this once. This does not matter if the session is
    /// ending.
    fn take_in(&mut self, delivery: Option<lapin::Result<Delivery>>) -> Result<(), SessionEnd> {
        let Some(delivery) = delivery else {
            self.is_cancelled = true;
            return if self.flow.is_ending() { Ok(()) } else { Err(SessionEnd::Cancelled) };
        };
        // A count from before this message proves nothing.
        self.counting = None;
        for detector in [&mut self.stall_detector, &mut self.stall_elsewhere] {
            detector.received(Instant::now());
        }
        let delivery = delivery.inspect_err(|error| self.link.note(error)).context("receive")?;
        let acker = delivery.acker.clone();
        self.flow
            .received(Arrived::of(delivery, self.partition.map.as_deref()), acker)
            .map_err(SessionEnd::LargeMessages)
    }

    /// Takes all messages that have already arrived. Messages must not stay inside the library, because their bytes are
    /// not counted there.
    fn take_in_arrived(&mut self) -> Result<(), SessionEnd> {
        while !self.is_cancelled
            && let Some(delivery) = self.deliveries.next().now_or_never()
        {
            self.take_in(delivery)?;
        }
        Ok(())
    }

    fn push(&mut self, message: Arrived) {
        let now = clock::now();
        self.unacked.open.oldest.get_or_insert(now);
        self.unacked.open.messages += 1;
        let queue = &self.partition.queue();
        self.open.take(message, self.partition.map.as_deref(), (self.terms.get(), now), queue);
    }
}

/// Waits until `then`, or forever if `then` is `None`.
async fn until(then: Option<Instant>) {
    match then {
        Some(then) => tokio::time::sleep_until(then.into()).await,
        None => std::future::pending().await,
    }
}
