//! One connection with the broker: receive, write, acknowledge, until told to stop or until anything goes wrong.
//!
//! While one batch is in its transaction the next one fills: two open batches at most, and of the rest the broker
//! holds back what exceeds the prefetch. A batch closes when the writer is free and `linger_ms` has passed since its
//! first message, or when it is full, or at the stop. Every exit but the stop is an error: the outer loop rebuilds.

mod ending;
mod writing;

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use futures_util::{FutureExt, StreamExt};
use lapin::Acker;
use lapin::message::Delivery;
use lapin::options::{BasicConsumeOptions, BasicQosOptions};
use lapin::types::FieldTable;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};

use self::writing::{Writing, join};
use super::Partition;
use super::batch::{Batch, Event, Origin, Received};
use super::dead;
use super::flush::Writer;
use super::redelivery::PrefetchLimit;
use super::silence::Silence;
use super::sizes::PREFETCH_MIN;
use super::vital::{Oldest, ReceivedCounts};
use super::waiting::{self, Waiting};
use crate::broker::Link;
use crate::config::Derived;
use crate::event::{self, Message, Terms};
use crate::model::Micros;
use crate::runtime::log::Flood;
use crate::runtime::retry::Outage;
use crate::telemetry::{Close, PartitionState, Standing, telemetry};

/// AMQP's code for "nothing is wrong".
const REPLY_SUCCESS: u16 = 200;

/// How long messages gather before the loop looks at them again. Looking at each as it comes costs more than all that is
/// done with it: the runtime's thread falls asleep and is woken for every few of them.
const GATHER: Duration = Duration::from_millis(1);

/// How often the loop wakes up with nothing to do, to say that it is alive.
const TICK: Duration = Duration::from_secs(1);

/// A session that has lasted so long is taken to work, though nothing came.
const PROBATION: Duration = Duration::from_secs(5);

/// A batch that fills, and what acknowledges it.
#[derive(Default)]
struct Open {
    batch: Batch,
    /// Acknowledges the last message and, with `multiple`, all before it.
    last: Option<Acker>,
    since: Option<Instant>,
    /// The oldest and newest `at`, for the lag.
    oldest: Option<Micros>,
    received: ReceivedCounts,
}

/// The next session must take fewer messages at once. Nothing of the open batch was tried.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct TakeFewer(String);

/// One session: from connecting to the stop, or until another number of messages should be taken at once.
///
/// # Errors
/// Whatever else ended it. The broker has what was received and not acknowledged.
pub(super) async fn run(partition: &Partition, limit: &mut PrefetchLimit, outage: &mut Outage) -> Result<()> {
    let prefetch = limit.of(partition.prefetch());
    let queue = partition.queue();
    // Many calls, which all have time limits.
    let (link, deliveries, partitions) = partition.beat.during(listen(partition, &queue, prefetch)).await?;
    let number = partition.number;
    info!(
        event = "consuming",
        partition = number,
        queue,
        prefetch,
        "listening on {queue}, {prefetch} messages at once"
    );
    let ends = partition.stop.child_token();
    let writer = Some(partition.writer(partitions, ends.clone()));
    let mut session = Session {
        partition,
        terms: partition.live.derive(Terms::new),
        limit,
        prefetch,
        seen: 0,
        outage,
        is_proven: false,
        began: Instant::now(),
        link: &link,
        deliveries,
        ends,
        is_cancelled: false,
        waiting: Waiting::default(),
        open: Open::default(),
        writer,
        writing: None,
        refused: Flood::default(),
        silence: Silence::default(),
        unacked: Oldest::default(),
        vitals: telemetry().partition(number),
    };
    session.vitals.stands(Standing::Listening);
    let mut ended = session.consume().await;
    if ended.is_ok() {
        ended = session.write_delivered().await;
    }
    let is_proven = session.is_proven;
    let writer = session.close().await;
    let Err(error) = ended else {
        if let Some(writer) = writer {
            partition.beat.during(writer.release()).await;
        }
        return Ok(());
    };
    let takes_fewer = error.is::<TakeFewer>();
    if !takes_fewer && !is_proven {
        limit.failed(prefetch);
    }
    let lowered = limit.of(partition.prefetch());
    if lowered < prefetch && (takes_fewer || !is_proven) {
        warn!(
            event = "prefetch-lowered",
            partition = number,
            prefetch = lowered,
            "the next session takes {lowered} messages at once, this one took {prefetch}: {error:#}"
        );
    }
    if takes_fewer { Ok(()) } else { Err(error) }
}

/// Connects, makes what is missing, and asks for messages. Says, too, how many partitions there are.
async fn listen(partition: &Partition, queue: &str, prefetch: u16) -> Result<(Link, lapin::Consumer, u16)> {
    let link = partition.broker.connect(&format!("partition {} of {}", partition.number, partition.owner)).await?;
    let partitions = partition.declare(&link).await?;
    let qos = link.channel.basic_qos(prefetch, BasicQosOptions { global: false });
    link.call("set the prefetch", qos).await?;
    let tag = format!("tallyd-{}", partition.owner);
    let (options, arguments) = (BasicConsumeOptions::default(), FieldTable::default());
    let consume = link.channel.basic_consume(queue.into(), tag.as_str().into(), options, arguments);
    let deliveries = link.call("consume", consume).await.with_context(|| format!("queue {queue}"))?;
    Ok((link, deliveries, partitions))
}

struct Session<'a> {
    partition: &'a Partition,
    /// Asked for with each message: what comes after a reload is judged by it.
    terms: Derived<Terms>,
    limit: &'a mut PrefetchLimit,
    prefetch: u16,
    /// Messages since the prefetch was last looked at.
    seen: u16,
    /// Over once something was written, or nothing went wrong for a while: a connection that only seems to work must not
    /// be made anew at full speed.
    outage: &'a mut Outage,
    /// A batch was written or MySQL did not take one, or nothing went wrong for a while.
    is_proven: bool,
    began: Instant,
    link: &'a Link,
    deliveries: lapin::Consumer,
    /// Cancelled at the stop, and when the session fails: a database that is away is then waited for no longer.
    ends: CancellationToken,
    /// Nothing comes any more: it was asked for, or the queue is gone.
    is_cancelled: bool,
    /// Received and in no batch yet.
    waiting: Waiting,
    open: Open,
    /// While idle. Exactly one of `writer` and `writing` is there.
    writer: Option<Writer>,
    writing: Option<Writing>,
    refused: Flood,
    silence: Silence,
    unacked: Oldest,
    vitals: Arc<PartitionState>,
}

impl Session<'_> {
    /// Receives and writes until the stop, or until another number of messages should be taken at once.
    async fn consume(&mut self) -> Result<()> {
        let mut tick = tokio::time::interval(TICK);
        let stop = self.partition.stop.clone();
        // Until then messages gather.
        let mut gather: Option<Instant> = None;
        loop {
            if self.writing.is_none() {
                // Else the writer does, at each try: one that hangs must not be taken for one that waits.
                self.partition.beat.beat();
            }
            self.unacked.note(&self.vitals);
            if self.fill()? {
                return Ok(());
            }
            if self.is_due() {
                self.start_writing(Close::Size)?;
                continue;
            }
            tokio::select! {
                biased;
                () = stop.cancelled() => return Ok(()),
                written = join(&mut self.writing) => {
                    if let Some(last) = self.committed(written?)? {
                        self.acknowledge_until(&last).await?;
                    }
                }
                delivery = self.deliveries.next(), if gather.is_none() => {
                    self.take_in(delivery)?;
                    ensure!(!self.is_cancelled, "the broker cancelled the consumer");
                    gather = Some(Instant::now() + GATHER);
                }
                () = until(gather) => gather = None,
                () = until(self.open.since.map(|since| since + self.partition.linger())), if self.writing.is_none() => self.start_writing(Close::Linger)?,
                _ = tick.tick() => self.look().await?,
            }
        }
    }

    /// Nothing has to be done: whether that is right.
    async fn look(&mut self) -> Result<()> {
        if self.began.elapsed() > PROBATION {
            self.went_well();
        }
        let is_idle = self.writing.is_none() && self.open.batch.is_empty();
        if is_idle && self.silence.is_long(Instant::now()) {
            let queue = self.partition.queue();
            let messages = self.partition.beat.during(self.link.depth(&queue)).await?.messages;
            ensure!(
                !self.silence.is_wrong(messages, Instant::now()),
                "{queue} has {messages} messages, and the broker sends none of them"
            );
        }
        Ok(())
    }

    /// Something was written, or nothing went wrong for a while.
    fn went_well(&mut self) {
        self.outage.over();
        self.is_proven = true;
    }

    fn is_full(&self) -> bool {
        let limits = &self.partition.limits;
        self.open.batch.is_full(limits.batch_events_max, limits.batch_bytes_max)
    }

    /// Fewer than the least can't be asked for: they are taken as they come.
    fn is_overfull(&self) -> bool {
        self.waiting.bytes > self.partition.waiting_bytes_max() && self.prefetch > PREFETCH_MIN
    }

    fn is_due(&self) -> bool {
        self.writing.is_none() && self.is_full()
    }

    /// Takes one message, and those that are here already: what the library holds nobody counts.
    fn take_in(&mut self, delivery: Option<lapin::Result<Delivery>>) -> Result<()> {
        self.silence.broken(Instant::now());
        let mut next = Some(delivery);
        while let Some(delivery) = next {
            let Some(delivery) = delivery else {
                self.is_cancelled = true;
                break;
            };
            self.waiting.push(delivery.context("receive")?);
            // Quite other messages than the prefetch was made for: the broker is stopped before memory is full of them.
            if self.is_overfull() {
                self.partition.sizes.learn(self.waiting.sizes());
                bail!(TakeFewer(format!(
                    "messages of {} bytes wait, more than memory is meant for",
                    self.waiting.bytes
                )));
            }
            next = self.deliveries.next().now_or_never();
        }
        Ok(())
    }

    /// Moves what waits into the open batch. Whether another number of messages should be taken at once.
    fn fill(&mut self) -> Result<bool> {
        while !self.is_full() {
            let Some(message) = self.waiting.pop() else { break };
            let returns = message.returns;
            self.limit.note(returns);
            ensure!(
                self.limit.of(self.prefetch) == self.prefetch,
                TakeFewer(format!("a message has come back {returns} times"))
            );
            self.push(message);
            if self.prefetch_is_off() {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Checks, once per prefetch, if messages have quite another size than it was made for, or what came back is through.
    fn prefetch_is_off(&mut self) -> bool {
        self.seen += 1;
        if self.seen < self.prefetch {
            return false;
        }
        self.seen = 0;
        let wanted = self.limit.of(self.partition.prefetch());
        wanted / 2 > self.prefetch || self.prefetch / 2 > wanted
    }

    fn push(&mut self, message: waiting::Arrived) {
        let bytes = message.bytes();
        let waiting::Arrived { body, headers, redelivered, is_direct, acker, .. } = message;
        let now = Micros::now();
        let open = &mut self.open;
        open.since.get_or_insert_with(Instant::now);
        self.unacked.open.get_or_insert(now);
        open.received.messages += 1;
        open.received.redelivered += u64::from(redelivered);
        open.last = Some(acker);
        open.batch.messages += 1;
        open.batch.bytes += bytes;
        open.batch.clock.note(now);
        self.partition.sizes.note(bytes);
        let origin = Arc::new(Origin { body, headers: headers.json });
        event::decode_all(&origin.body, self.terms.get(), now, |verdict, range| {
            // API servers may publish to the exchange alone, so none of them can forge one.
            let verdict = verdict.and_then(|message| if is_direct { Ok(message) } else { message.of_publisher() });
            let event = match verdict {
                Ok(Message::Like(event)) => Event::Like(event),
                Ok(Message::Count(event)) => Event::Count(event),
                Ok(Message::Set(event)) => Event::Set(event),
                Ok(Message::Fence(fence)) => return open.batch.take_fence(fence),
                Err(refusal) => {
                    // Not the sentence: it may quote the message.
                    debug!(
                        event = "message-refused",
                        partition = self.partition.number,
                        reason = refusal.reason.code()
                    );
                    let body = origin.body.get(range).unwrap_or(&origin.body);
                    let letter = dead::refused(refusal, body, &origin.headers, &self.partition.queue(), now);
                    return open.batch.refused.push(letter);
                }
            };
            open.oldest = Some(open.oldest.map_or(event.at(), |oldest| oldest.min(event.at())));
            open.received.event(&event);
            open.batch.events.push(Received { event, origin: Arc::clone(&origin), range });
        });
    }
}

/// Waits until then; for ever when there is no such time.
async fn until(then: Option<Instant>) {
    match then {
        Some(then) => tokio::time::sleep_until(then).await,
        None => std::future::pending().await,
    }
}
