//! Events to rows: one task per partition, each on its own connection to the broker.
//!
//! The way: `session` receives -> `batch` collects -> `batch_writer` writes one `transaction` -> `session` acknowledges. The loop here
//! reconnects forever: connection lost, channel closed, consumer cancelled, stream ended, stale acknowledgement and time limit all take
//! the same path. The broker delivers again what was not acknowledged, and events that had been written change nothing (invariant 2).
//!
//! The races, and what decides them:
//!
//! * A: a batch is committed. B: the daemon is killed before the acknowledgement. The broker delivers again. No event is newer than its
//!   row, so nothing is written, and the batch is acknowledged.
//! * A: daemon 1 is paused with a batch in hand. B: the broker makes daemon 2 the active consumer, which takes the
//!   partition (epoch + 1). C: daemon 1 wakes up and writes. Its transaction locks the partition's row first, finds a
//!   newer epoch and writes nothing; its session ends.
//! * A and B: two writers write the same row. The second one waits for the first one's lock, and the statement that then writes
//!   the row notes the state that it finds. Where old states are read first, both insert a row that neither found: the second insert
//!   violates the primary key, and its whole transaction runs again and finds the row.
//! * A: the stop. B: a running transaction. The transaction ends, everything else that was delivered is written, all of it is acknowledged,
//!   and the channel is closed. In one step the broker then takes back the rest and activates the next consumer: a fence never passes an
//!   event that a daemon holds, and "no consumer, empty queue" means that nothing is in flight.
//! * A: a pause, which daemon 1 reads first. B: the broker makes daemon 2 the active consumer for up to a second, until it has read the pause,
//!   too. Each daemon ends its session as at the stop, so nothing is lost or doubled, and the order is kept.
//! * A: a like. B: an unlike of the same user, delivered first (redelivery, a changed route). The newer `at` wins.
//! * A: a like. B: an unlike of the same user in the same second, through a map whose times are in seconds. The later arrival wins:
//!   `tallyd_core::mapping`, order.
//!
//! What it must never do: acknowledge before the COMMIT (invariant 1), return messages in a loop (a quorum queue dead-letters a message
//! after 20 returns), end because a server does not answer.

mod batch;
mod batch_writer;
mod clock;
mod counting;
mod dead_letter_quota;
mod decode;
pub(crate) mod ledger_gc;
mod rows;
mod session;
mod transaction;

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use lapin::options::{BasicConsumeOptions, BasicQosOptions};
use lapin::types::FieldTable;
use tokio::sync::watch::Sender;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use batch_writer::WriteError;
use clock::Clock;

use crate::config::{Config, ConfigHandle, Map};
use crate::partitions::{InUse, noted, queue_of};
use crate::runtime::liveness::Heartbeat;
use crate::runtime::retry::{Outage, Rivals};
use crate::runtime::waits::Work;
use crate::servers::control::Control;
use crate::telemetry::{PartitionState, Standing, telemetry};
use tallyd_core::control::Task;
use tallyd_core::partition::PartitionName;
use tallyd_core::prefetch::{MessageSizes, PrefetchLimit};
use tallyd_mysql::{Store, StoreError, likes};
use tallyd_rabbitmq::probe::Found;
use tallyd_rabbitmq::{Broker, Link};

/// Messages in flight have at most the bytes of this many batches.
const PREFETCH_BATCHES: usize = 4;

/// Tasks whose pause keeps a partition from being consumed.
const PAUSED_BY: &[Task] = &[Task::Consumer];

/// Delay before a session with a partition that another daemon took over.
const STAND_BACK: Duration = Duration::from_millis(100);

/// One partition's consumer.
pub struct Partition {
    /// From 0; those of maps are far above.
    pub number: u16,
    /// The map by which its messages are read: they are not tallyd's own JSON.
    pub map: Option<Arc<Map>>,
    /// The broker that delivers its events.
    pub broker: Broker,
    /// Where they are written.
    pub store: Store,
    /// This daemon: host and process.
    pub owner: String,
    /// Metric rules and bounds follow it; other settings are as of the start.
    pub live: ConfigHandle,
    /// Says whether consumers are paused.
    pub(crate) control: Control,
    /// Wakes the outbox once something is committed that the daemon adds to Redis. Dropped at the end.
    pub outbox: Sender<()>,
    /// Ends it.
    pub stop: CancellationToken,
    /// Beats while it works.
    pub heartbeat: Heartbeat,
}

/// Why a session has ended.
#[derive(Debug, thiserror::Error)]
enum SessionEnd {
    #[error("stopped")]
    Stopped,
    #[error("an operator has paused the consumers")]
    Paused,
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
    pub(crate) fn is_orderly(&self) -> bool {
        matches!(self, Self::Stopped | Self::Paused | Self::OtherPrefetch)
    }

    pub(crate) fn takes_fewer(&self) -> bool {
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

/// What sessions leave to the next one.
struct Learned {
    /// The server cannot do the faster way of writing rows, or must not.
    reads_first: bool,
    sizes: MessageSizes,
    limit: PrefetchLimit,
}

impl Learned {
    /// How many messages may be in flight: batches are bounded in bytes, and so are messages that wait for them.
    fn prefetch(&self, config: &Config) -> u16 {
        let bytes_max = config.consumer.batch_bytes_max.saturating_mul(PREFETCH_BATCHES);
        self.limit.of(self.sizes.prefetch(config.amqp.prefetch, bytes_max))
    }

    /// Lowers the prefetch after a session that took too many messages, or failed before it got anything done.
    fn lower_prefetch(&mut self, took: u16, partition: u16, config: &Config, end: &SessionEnd) {
        if !end.takes_fewer() {
            self.limit.failed(took);
        }
        let prefetch = self.prefetch(config);
        if prefetch < took {
            warn!(
                event = "prefetch-lowered",
                partition,
                prefetch,
                "the next session takes {prefetch} messages at once, this one took {took}: {end:#}"
            );
        }
    }
}

impl Partition {
    /// How it is called in sentences.
    fn name(&self) -> PartitionName {
        PartitionName { number: self.number, map: self.map.as_ref().map(|map| map.name.clone()) }
    }

    fn queue(&self) -> String {
        self.map.as_ref().map_or_else(|| self.broker.queue(self.number), |map| self.broker.map_queue(&map.name))
    }

    /// Consumes until the stop, and reconnects after every failure.
    pub async fn run(self) {
        let config = self.live.current();
        let reads_first = config.consumer.reads_first;
        let mut learned = Learned { reads_first, sizes: MessageSizes::default(), limit: PrefetchLimit::default() };
        let mut broker = Outage::new(Work::Consuming(self.name()));
        let mut database = Outage::new(Work::Database(self.name()));
        let vitals = telemetry().partition(self.number);
        while !self.stop.is_cancelled() {
            self.heartbeat.beat();
            let is_paused = self.control.paused(PAUSED_BY).is_some();
            vitals.stands(if is_paused { Standing::Paused } else { Standing::Connecting });
            vitals.oldest(None);
            // The database first: otherwise messages would be received only to be returned.
            if let Err(error) = self.heartbeat.during(self.database_is_ready(&mut learned)).await {
                self.wait(database.failed(&format!("{error:#}"))).await;
                continue;
            }
            database.over();
            if !self.control.allows(PAUSED_BY) {
                self.wait_until_allowed(&vitals).await;
                continue;
            }
            let end = session::run(&self, &config, &mut learned, &mut broker).await;
            self.recover(end, &mut broker).await;
        }
        vitals.stands(Standing::Stopped);
        vitals.oldest(None);
        info!(event = "partition-stopped", partition = self.number, "{} is no longer written here", self.name());
    }

    /// Logs why a session has failed, and waits until the next one should begin.
    async fn recover(&self, end: SessionEnd, outage: &mut Outage) {
        match end {
            SessionEnd::Stopped
            | SessionEnd::Paused
            | SessionEnd::OtherPrefetch
            | SessionEnd::Redelivered(_)
            | SessionEnd::LargeMessages(_) => {}
            SessionEnd::TakenOver => {
                info!(
                    event = "partition-taken-over",
                    partition = self.number,
                    "{} was written by another daemon meanwhile: beginning anew",
                    self.name()
                );
                self.wait(STAND_BACK).await;
            }
            end if self.stop.is_cancelled() || self.control.paused(PAUSED_BY).is_some() => info!(
                event = "partition-given-back",
                partition = self.number,
                error = format!("{end:#}"),
                "stopped with messages that were not written, which the broker keeps: {end:#}"
            ),
            end => self.wait(outage.failed(&format!("{end:#}"))).await,
        }
    }

    async fn database_is_ready(&self, learned: &mut Learned) -> Result<()> {
        if let Some(problem) = self.store.schema().await.context("ask for the schema")?.problem() {
            bail!(problem);
        }
        let (now, writable) = self.store.clock().await?;
        ensure!(writable, "MySQL is read-only");
        Clock::default().hold(now)?;
        if !learned.reads_first {
            learned.reads_first = !self.upserts_in_order().await?;
        }
        Ok(())
    }

    /// Whether the faster way of writing rows is exact on this server.
    async fn upserts_in_order(&self) -> Result<bool> {
        let mut rivals = Rivals::default();
        let exact = loop {
            let mut conn = self.store.acquire().await?;
            match conn.limit("try the way of writing rows", |it| likes::upserts_in_order(it, self.number)).await {
                // Other partitions try it beside these rows.
                Err(error) if error.is_contention() && rivals.has_room() => rivals.wait().await,
                tried => break tried?,
            }
        };
        if !exact {
            let (partition, error) = (self.number, "this server assigns columns in another order");
            warn!(event = "reads-first", partition, error, "writing in the slower way, by reading first: {error}");
        }
        Ok(exact)
    }

    /// Connects, makes what is missing, and asks for messages. Returns how many partitions there are, too.
    async fn listen(&self, queue: &str, prefetch: u16) -> Result<(Link, lapin::Consumer, u16)> {
        let link = self.broker.connect(&format!("{} of {}", self.name(), self.owner)).await?;
        let partitions = self.declare(&link).await?;
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
            "listening on {queue}, {prefetch} messages at once"
        );
        Ok((link, deliveries, partitions))
    }

    /// Makes what is missing on the broker, for as many partitions as are in use. This daemon can be one that knows of fewer, and must not
    /// undo what another daemon has made. More are noted before they are made. Returns how many partitions there are.
    async fn declare(&self, link: &Link) -> Result<u16> {
        self.declare_numbered(link).await?;
        if let Some(map) = &self.map {
            self.declare_map(link, map).await?;
        }
        Ok(InUse::read(&self.store, &self.broker).await?.partitions.count())
    }

    /// Makes the map's queue and binds it, once the map is noted.
    async fn declare_map(&self, link: &Link, map: &Map) -> Result<()> {
        let queue = queue_of(map, &self.broker);
        match self.broker.probe_map_exchange(link, &queue).await.context("ask for the site's exchange")? {
            Found::Right => {}
            Found::Missing => bail!(
                "[[map]] {}: the exchange {} is not there: tallyd never makes it, so declare it or correct `exchange`",
                map.name,
                map.exchange
            ),
            Found::Different(text) | Found::Refused(text) => bail!(
                "[[map]] {}: the account has no right to bind a queue to the exchange {}: {text}; docs/moving-reference.md has the rights",
                map.name,
                map.exchange
            ),
        }
        let noted = noted(map, &self.broker, &self.owner);
        if let Some(problem) = noted.conflict(&self.store.note_map(&noted).await?) {
            bail!(problem);
        }
        self.broker.declare_map(link, &queue).await.with_context(|| format!("make the queue of the map {}", map.name))
    }

    async fn declare_numbered(&self, link: &Link) -> Result<()> {
        loop {
            let partitions = self.store.note_partitions(self.broker.partitions(), &self.owner).await?;
            self.broker.declare_for(link, partitions).await?;
            // If another daemon has come with more meanwhile, something that it has undone was perhaps made again.
            let noted = self.store.noted_partitions().await?;
            // A smaller number was read from a server that is behind.
            if noted.is_none_or(|noted| noted.partitions <= partitions) {
                return Ok(());
            }
        }
    }

    /// Holds nothing until the pause ends, or MySQL has said that there is none.
    async fn wait_until_allowed(&self, vitals: &PartitionState) {
        if self.control.paused(PAUSED_BY).is_some() {
            vitals.stands(Standing::Paused);
        }
        let allowed = self.heartbeat.during(self.control.until_allowed(PAUSED_BY));
        self.stop.run_until_cancelled(allowed).await;
    }

    async fn wait(&self, delay: Duration) {
        self.stop.run_until_cancelled(tokio::time::sleep(delay)).await;
    }
}
