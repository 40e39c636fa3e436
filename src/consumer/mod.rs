//! Events to rows: one task per partition, each on its own connection to the broker.
//!
//! The way: `session` receives -> `batch` coalesces -> `flush` writes one transaction -> `session` acknowledges. Around
//! it the loop here reconnects for ever: connection lost, channel closed, consumer cancelled, stream ended, stale
//! acknowledgement, time limit: all the same path. What was not acknowledged comes again, and changes nothing if it had
//! been written (invariant 2).
//!
//! The races, and what decides them:
//!
//! * A: batch committed. B: daemon killed before the acknowledgement. The broker delivers again; each event is not newer
//!   than its row: nothing is written, and it is acknowledged.
//! * A: daemon 1 is paused with a batch in hand. B: the broker makes daemon 2 the active consumer, which takes the
//!   partition (epoch + 1). C: daemon 1 wakes up and writes. Its transaction locks the partition's row first, finds a
//!   newer epoch and writes nothing; its session ends.
//! * A: two writers write the same row. The second one waits for the first one's lock, and the statement that then writes
//!   the row notes what it finds there. Where old states are read first, a row that neither found is inserted by both:
//!   the second violates the primary key, and its whole transaction runs again and finds the row.
//! * A: the stop. B: a running transaction. It ends, what else was delivered is written, all is acknowledged, and the channel is closed.
//!   In one step the broker then takes back the rest and activates the next consumer: a fence never passes an event that
//!   a daemon holds, and "no consumer, empty queue" means that nothing is in flight.
//! * A: a like. B: an unlike of the same user, delivered first (redelivery, a changed route). The newer `at` wins.
//!
//! What it must never do: acknowledge before the COMMIT (invariant 1), return messages in a loop (a quorum queue drops
//! out after 20 returns), end because a server is away.

pub mod batch;
mod clock;
mod consumed;
mod counts;
mod dead;
mod flush;
pub mod forget;
mod late;
mod redelivery;
mod room;
mod session;
pub mod settle;
mod silence;
mod sizes;
mod transaction;
mod vital;
mod waiting;
mod watch;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use tokio::sync::watch::Sender;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use clock::Clock;
use consumed::Consumed;
use flush::Writer;
use redelivery::PrefetchLimit;
use room::Room;
use sizes::Sizes;
use watch::Watch;

use crate::broker::{Broker, Link};
use crate::config::{ConfigHandle, Consumer as Limits, Rules};
use crate::model::Metric;
use crate::runtime::liveness::Heartbeat;
use crate::runtime::log::Flood;
use crate::runtime::retry::Outage;
use crate::runtime::waits::Work;
use crate::store::{Store, StoreError, likes};
use crate::telemetry::{Standing, telemetry};

/// What is on the way has at most the bytes of so many batches.
const PREFETCH_BATCHES: usize = 4;

/// Before a partition that another daemon has written meanwhile is begun anew.
const STAND_BACK: Duration = Duration::from_millis(100);

/// Whether another daemon has written the partition since this one did.
fn is_taken_over(error: &anyhow::Error) -> bool {
    matches!(error.downcast_ref(), Some(StoreError::TakenOver(_)))
}

/// One partition's consumer.
pub struct Partition {
    /// Its number, from 0.
    number: u16,
    broker: Broker,
    store: Store,
    owner: String,
    /// Names and rules may change; what stands below is as it was at the start.
    live: ConfigHandle,
    metric: Metric,
    outbox: Sender<()>,
    limits: Limits,
    prefetch: u16,
    /// The server can't do the faster way of writing rows, or must not.
    reads_first: AtomicBool,
    sizes: Sizes,
    stop: CancellationToken,
    beat: Heartbeat,
}

impl Partition {
    /// The consumer of partition `number`, which runs until `stop`.
    pub fn new(
        number: u16,
        live: &ConfigHandle,
        broker: Broker,
        store: Store,
        owner: &str,
        stop: CancellationToken,
        beat: Heartbeat,
    ) -> Self {
        let config = live.current();
        Self {
            number,
            broker,
            store,
            owner: owner.to_owned(),
            live: live.clone(),
            metric: config.metrics.like(),
            outbox: Sender::default(),
            limits: config.consumer.clone(),
            prefetch: config.amqp.prefetch,
            reads_first: AtomicBool::new(config.consumer.reads_first),
            sizes: Sizes::default(),
            stop,
            beat,
        }
    }

    /// Rings this bell once it has committed something that the daemon adds to Redis. Drops it when it ends.
    #[must_use]
    pub fn ringing(self, outbox: Sender<()>) -> Self {
        Self { outbox, ..self }
    }

    /// Consumes until the stop, through whatever goes wrong.
    pub async fn run(self) {
        let mut broker = Outage::new(Work::Consuming(self.number));
        let mut database = Outage::new(Work::Database(self.number));
        let mut limit = PrefetchLimit::default();
        let vitals = telemetry().partition(self.number);
        while !self.stop.is_cancelled() {
            self.beat.beat();
            vitals.stands(Standing::Connecting);
            vitals.oldest(None);
            // Not before: messages would be taken only to be given back.
            if let Err(error) = self.beat.during(self.database_is_ready()).await {
                self.wait(database.failed(&format!("{error:#}"))).await;
                continue;
            }
            database.over();
            if let Err(error) = session::run(&self, &mut limit, &mut broker).await {
                self.recover(&error, &mut broker).await;
            }
        }
        vitals.stands(Standing::Stopped);
        vitals.oldest(None);
        info!(
            event = "partition-stopped",
            partition = self.number,
            "partition {} is no longer written here",
            self.number
        );
    }

    /// Says why a session has failed, and waits until the next one should begin.
    async fn recover(&self, error: &anyhow::Error, outage: &mut Outage) {
        if is_taken_over(error) {
            info!(
                event = "partition-taken-over",
                partition = self.number,
                "partition {} was written by another daemon meanwhile: beginning anew",
                self.number
            );
            self.wait(STAND_BACK).await;
        } else if self.stop.is_cancelled() {
            info!(
                event = "partition-given-back",
                partition = self.number,
                error = format!("{error:#}"),
                "stopped with messages that were not written, which the broker keeps: {error:#}"
            );
        } else {
            self.wait(outage.failed(&format!("{error:#}"))).await;
        }
    }

    /// Makes what is missing on the broker, for as many partitions as are in use: this daemon may be one that knows of fewer, and must not
    /// undo what another one has made. More are noted before they are made. Returns how many there are.
    async fn declare(&self, link: &Link) -> Result<u16> {
        loop {
            let partitions = self.store.note_partitions(self.broker.partitions(), &self.owner).await?;
            self.broker.declare_for(link, partitions).await?;
            // Should another daemon have come with more meanwhile, perhaps what it has undone was made again.
            let now = self.store.noted_partitions().await?;
            // A smaller number was read from a server that is behind.
            if now.is_none_or(|now| now.partitions <= partitions) {
                return Ok(partitions);
            }
        }
    }

    fn queue(&self) -> String {
        self.broker.queue(self.number)
    }

    async fn database_is_ready(&self) -> Result<()> {
        if let Some(problem) = self.store.schema().await.context("ask for the schema")?.problem() {
            bail!(problem);
        }
        let (now, writable) = self.store.clock().await?;
        ensure!(writable, "MySQL is read-only");
        Clock::default().hold(now)?;
        self.choose_way().await
    }

    /// Rows are written in the slower way where the faster one would not be exact.
    async fn choose_way(&self) -> Result<()> {
        if self.reads_first.load(Ordering::Relaxed) {
            return Ok(());
        }
        let mut lent = self.store.acquire().await?;
        let exact = lent.limit("try the way of writing rows", |it| likes::upserts_in_order(it, self.number)).await?;
        if !exact {
            self.reads_first.store(true, Ordering::Relaxed);
            let (partition, error) = (self.number, "this server assigns columns in another order");
            warn!(event = "reads-first", partition, error, "writing in the slower way, by reading first: {error}");
        }
        Ok(())
    }

    /// Messages that may be on the way: batches are bounded in bytes, and so is what waits for them.
    fn prefetch(&self) -> u16 {
        self.sizes.prefetch(self.prefetch, self.limits.batch_bytes_max.saturating_mul(PREFETCH_BATCHES))
    }

    /// With more bytes than that in no batch yet, the broker is asked for fewer messages: twice what is meant to be on the way.
    fn waiting_bytes_max(&self) -> usize {
        self.limits.batch_bytes_max.saturating_mul(PREFETCH_BATCHES * 2)
    }

    fn linger(&self) -> Duration {
        Duration::from_millis(self.limits.linger_ms)
    }

    fn writer(&self, partitions: u16, ends: CancellationToken) -> Writer {
        Writer {
            store: self.store.clone(),
            partition: self.number,
            owner: self.owner.clone(),
            queue: self.queue(),
            metric: self.metric,
            outbox: self.outbox.clone(),
            database_away_max: self.limits.database_away_max.0,
            ends,
            epoch: None,
            reads_first: self.reads_first.load(Ordering::Relaxed),
            asks_ledger: 0,
            watch: Watch::default(),
            rules_now: self.live.derive(|config| Arc::new(Rules::new(config))),
            rules: Arc::default(),
            overlap: self.live.derive(|config| config.reconcile.overlap.0),
            clock: Clock::default(),
            room: Room {
                max: self.live.derive(|config| config.consumer.dead_letters_max),
                partitions,
                broker: self.broker.clone(),
                publisher: None,
                dropped: Flood::default(),
                returned: Flood::default(),
            },
            consumed: Consumed::default(),
            beat: self.beat.clone(),
        }
    }

    async fn wait(&self, delay: Duration) {
        self.stop.run_until_cancelled(tokio::time::sleep(delay)).await;
    }
}
