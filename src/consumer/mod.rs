//! Writes events to rows: one task per partition, each with its own connection to the broker (decision 0002).
//!
//! `session` receives messages, `batch` collects them, `batch_writer` writes each batch in one `transaction`, and
//! `session` acknowledges the messages. The loop in this file reconnects forever. A lost connection, a closed channel,
//! a cancelled consumer, an ended stream, a stale acknowledgement and a timeout are all handled in the same way. The
//! broker redelivers messages that were not acknowledged. If an event is written already, its redelivery changes
//! nothing (invariant 2).
//!
//! Possible races, each with its outcome:
//!
//! * A: a batch is committed. B: the daemon is killed before the acknowledgement. The broker redelivers. No redelivered
//!   event is newer than its row, so the next daemon writes nothing and acknowledges the batch.
//! * A: daemon 1 freezes while it holds a batch. B: the broker makes daemon 2 the active consumer. Daemon 2 takes over
//!   the partition and increments its epoch. C: daemon 1 resumes and writes. The transaction of daemon 1 locks the
//!   partition's row first, finds a newer epoch and writes nothing. The session of daemon 1 ends.
//! * A and B: two writers write the same row. The second writer waits for the first writer's lock, and its statement
//!   then reads the state that the first writer wrote. Some writers read the old states first. Then both writers can
//!   find that the row is missing, and both insert the row. The second insert violates the primary key. The second
//!   writer runs its whole transaction again and finds the row.
//! * A: the stop. B: a running transaction. The transaction finishes, all other delivered messages are written, all
//!   messages are acknowledged, and the channel is closed. When the channel is closed, the broker requeues the
//!   unacknowledged messages and activates the next consumer in one step. So no new fence message of a job overtakes an
//!   event that a daemon has received, and a fence that was requeued is ignored (`jobs::fence`). A queue without a
//!   consumer has all its messages, and none are in flight.
//! * A: an operator pauses the consumers, and daemon 1 reads the pause before daemon 2. B: the broker makes daemon 2
//!   the active consumer. Less than a second later, daemon 2 also reads the pause. Each daemon ends its session with
//!   the same steps as a daemon that stops. So no event is lost or applied twice, and the events keep their order.
//! * A: a like. B: an unlike of the same user, which is delivered before the like (after a redelivery or a changed
//!   route). The event with the newer `at` wins.
//! * A: a like. B: an unlike of the same user in the same second, through a map whose times are in seconds. The event
//!   that arrives later wins (see "order" in `tallyd_core::mapping`).
//!
//! The consumer must never acknowledge before the COMMIT (invariant 1). The consumer must never return messages in a
//! loop, because a quorum queue dead-letters a message after 20 returns. The consumer must never exit because a server
//! does not answer.

mod batch;
mod batch_writer;
mod clock;
mod counting;
mod dead_letter_quota;
mod declare;
mod decode;
pub(crate) mod ledger_gc;
mod rows;
mod session;
mod transaction;

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use lapin::options::{BasicConsumeOptions, BasicQosOptions};
use lapin::types::FieldTable;
use tokio::sync::watch::Sender;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use batch_writer::WriteError;
use clock::Clock;
use declare::Declared;

use tallyd_base::config::{Config, ConfigHandle, Map};
use tallyd_base::runtime::liveness::Heartbeat;
use tallyd_base::runtime::retry::{Outage, Rivals};
use tallyd_base::runtime::waits::Work;
use tallyd_base::servers::control::Control;
use tallyd_base::telemetry::{ConsumerState, PartitionState, Unacked, telemetry};
use tallyd_core::control::Task;
use tallyd_core::partition::PartitionName;
use tallyd_core::prefetch::{self, Limits, Prefetch};
use tallyd_mysql::{Store, StoreError, likes};
use tallyd_rabbitmq::{Broker, Link};

const PREFETCH_BATCHES: usize = 4;

/// If one of these tasks is paused, no partition is consumed.
const PAUSED_BY: &[Task] = &[Task::Consumer];

/// The delay before the next session, if another daemon took over the partition.
const STAND_BACK: Duration = Duration::from_millis(100);

pub struct Partition {
    /// The partitions of tallyd's own queues are counted from 0. Partitions of maps have much higher numbers.
    pub number: u16,
    pub map: Option<Arc<Map>>,
    pub broker: Broker,
    pub store: Store,
    pub owner: String,
    /// A reload of the configuration changes metric rules and limits. All other settings keep the values that they had
    /// at the daemon's start.
    pub live: ConfigHandle,
    pub(crate) control: Control,
    /// Wakes the outbox after a commit with additions to Redis. This sender is dropped when the partition's task ends.
    pub outbox: Sender<()>,
    pub stop: CancellationToken,
    pub heartbeat: Heartbeat,
    pub has_tried: AtomicBool,
}

#[derive(Debug, thiserror::Error)]
enum SessionEnd {
    #[error("stopped")]
    Stopped,
    #[error("an operator has paused the consumers")]
    Paused,
    #[error("another prefetch fits the messages better")]
    OtherPrefetch,
    /// The session chose the prefetch for smaller messages than the messages that arrived. The value is the size of the
    /// inbox in bytes.
    #[error("the received messages exceed the memory limit: they have {0} bytes")]
    LargeMessages(usize),
    #[error("the broker cancelled the consumer")]
    Cancelled,
    #[error("{queue} has {messages} messages, but the broker delivers none of them")]
    Stalled { queue: String, messages: u32 },
    #[error(
        "another node of RabbitMQ has {messages} messages of {queue}, but this session's node delivers none of them"
    )]
    CutOff { queue: String, messages: u32 },
    #[error("another daemon has taken over the partition")]
    TakenOver,
    #[error(transparent)]
    Failed(#[from] anyhow::Error),
}

impl SessionEnd {
    pub(crate) fn is_orderly(&self) -> bool {
        matches!(self, Self::Stopped | Self::Paused | Self::OtherPrefetch)
    }

    pub(crate) fn takes_fewer(&self) -> bool {
        matches!(self, Self::LargeMessages(_))
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

struct Learned {
    /// Whether old rows are read before rows are written. This slower way is used if the server does not support the
    /// faster way, or if the configuration forbids the faster way.
    reads_first: bool,
    prefetch: Prefetch,
    /// The count of partitions in use, or 1 before the first session.
    partitions: u16,
}

impl Learned {
    fn limits(&self, config: &Config) -> Limits {
        Limits {
            messages: prefetch::share(config.amqp.prefetch, self.partitions),
            bytes: config.consumer.batch_bytes_max.saturating_mul(PREFETCH_BATCHES),
        }
    }

    /// Lowers the prefetch after a session that received too many messages, or that failed before its first
    /// acknowledgement.
    fn lower_prefetch(&mut self, took: u16, partition: u16, config: &Config, end: &SessionEnd) {
        if !end.takes_fewer() {
            self.prefetch.failed();
        }
        let prefetch = self.prefetch.wanted(self.limits(config));
        if prefetch < took {
            warn!(
                event = "prefetch-lowered",
                partition,
                prefetch,
                "lowered the prefetch for the next session from {took} to {prefetch} messages: {end:#}"
            );
        }
    }
}

impl Partition {
    fn name(&self) -> PartitionName {
        PartitionName { number: self.number, map: self.map.as_ref().map(|map| map.name.clone()) }
    }

    fn queue(&self) -> String {
        self.map.as_ref().map_or_else(|| self.broker.queue(self.number), |map| self.broker.map_queue(&map.name))
    }

    pub async fn run(self) {
        let config = self.live.current();
        let reads_first = config.consumer.reads_first;
        let mut learned = Learned { reads_first, prefetch: Prefetch::default(), partitions: 1 };
        let mut broker = Outage::new(Work::Consuming(self.name()));
        let mut database = Outage::new(Work::Database(self.name()));
        let partition_state = telemetry().partition(self.number);
        while !self.stop.is_cancelled() {
            self.heartbeat.beat();
            let is_paused = self.control.paused(PAUSED_BY).is_some();
            partition_state.set_state(if is_paused { ConsumerState::Paused } else { ConsumerState::Connecting });
            partition_state.set_unacked(Unacked::default());
            // The database is checked first. If MySQL is down, a session without this check would receive messages and
            // have to return them.
            if let Err(error) = self.heartbeat.during(self.database_is_ready(&mut learned)).await {
                self.wait(database.failed(&format!("{error:#}"))).await;
                continue;
            }
            database.over();
            if !self.control.allows(PAUSED_BY) {
                self.wait_until_allowed(&partition_state).await;
                continue;
            }
            let end = session::run(&self, &config, &mut learned, &mut broker).await;
            self.recover(end, &mut broker).await;
        }
        partition_state.set_state(ConsumerState::Stopped);
        partition_state.set_unacked(Unacked::default());
        info!(event = "partition-stopped", partition = self.number, "this daemon no longer writes {}", self.name());
    }

    /// Logs why a session failed, and waits until the next session should begin.
    async fn recover(&self, end: SessionEnd, outage: &mut Outage) {
        match end {
            SessionEnd::Stopped | SessionEnd::Paused | SessionEnd::OtherPrefetch | SessionEnd::LargeMessages(_) => {}
            SessionEnd::TakenOver => {
                info!(
                    event = "partition-taken-over",
                    partition = self.number,
                    "another daemon has taken over {}: starting a new session",
                    self.name()
                );
                self.wait(STAND_BACK).await;
            }
            end if self.stop.is_cancelled() || self.control.paused(PAUSED_BY).is_some() => info!(
                event = "partition-given-back",
                partition = self.number,
                error = format!("{end:#}"),
                "the session stopped before all its messages were written; the broker keeps the unwritten messages: {end:#}"
            ),
            end => self.wait(outage.failed(&format!("{end:#}"))).await,
        }
    }

    async fn database_is_ready(&self, learned: &mut Learned) -> Result<()> {
        if let Some(problem) = self.store.schema().await.context("check the schema")?.problem() {
            bail!(problem);
        }
        let (now, writable) = self.store.clock().await?;
        ensure!(writable, "MySQL is read-only");
        Clock::default().check(now)?;
        if !learned.reads_first {
            learned.reads_first = !self.upserts_in_order().await?;
        }
        Ok(())
    }

    async fn upserts_in_order(&self) -> Result<bool> {
        let mut rivals = Rivals::default();
        let exact = loop {
            let mut conn = self.store.acquire().await?;
            match conn.limit("test the faster way to write rows", |it| likes::upserts_in_order(it, self.number)).await {
                // The consumers of other partitions run the same test on adjacent rows at the same time.
                Err(error) if error.is_contention() && rivals.has_room() => rivals.wait().await,
                tried => break tried?,
            }
        };
        if !exact {
            let (partition, error) = (self.number, "this server does not assign columns from left to right");
            warn!(
                event = "reads-first",
                partition, error, "switched to the slower way of writing, which reads rows first: {error}"
            );
        }
        Ok(exact)
    }

    async fn listen(&self, queue: &str, prefetch: u16) -> Result<(Link, lapin::Consumer, Declared)> {
        let link = self.broker.connect(&format!("{} of {}", self.name(), self.owner)).await?;
        let declared = self.declare(&link).await?;
        let qos = link.channel.basic_qos(prefetch, BasicQosOptions { global: false });
        link.call("set the prefetch", qos).await?;
        let tag = format!("tallyd-{}", self.owner);
        let (options, arguments) = (BasicConsumeOptions::default(), FieldTable::default());
        let consume = link.channel.basic_consume(queue.into(), tag.as_str().into(), options, arguments);
        let deliveries = link.call("consume", consume).await.with_context(|| format!("queue {queue}"))?;
        info!(
            event = "consuming",
            partition = self.number,
            queue,
            prefetch,
            "listening on {queue} with a prefetch of {prefetch} messages"
        );
        Ok((link, deliveries, declared))
    }

    async fn wait_until_allowed(&self, partition_state: &PartitionState) {
        if self.control.paused(PAUSED_BY).is_some() {
            partition_state.set_state(ConsumerState::Paused);
        }
        let allowed = self.heartbeat.during(self.control.until_allowed(PAUSED_BY));
        self.stop.run_until_cancelled(allowed).await;
    }

    async fn wait(&self, delay: Duration) {
        self.stop.run_until_cancelled(tokio::time::sleep(delay)).await;
    }
}
