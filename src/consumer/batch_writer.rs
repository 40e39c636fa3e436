//! Writes batches to MySQL, each in one transaction, and retries each transaction until it succeeds.
//!
//! A transaction can run many times, because it is idempotent. After an error, the writer retries the transaction or
//! writes its batch in parts. The caller acknowledges after [`BatchWriter::write`] returns (invariant 1).

use std::time::{Duration, Instant};

use sqlx::MySqlConnection;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tracing::{debug, warn};

use super::Partition;
use super::batch::{Batch, Origin, Received};
use super::counting::{self, Throughput};
use super::dead_letter_quota::DeadLetterQuota;
use super::declare::Declared;
use super::transaction::{Committed, Transaction};
use crate::letter;
use crate::letter::text::instant;
use tallyd_base::config::Config;
use tallyd_base::runtime::liveness::Heartbeat;
use tallyd_base::runtime::log::Flood;
use tallyd_base::runtime::retry::{Outage, Rivals};
use tallyd_base::runtime::waits::Work;
use tallyd_base::telemetry::Step;
use tallyd_connect::fate::Fate;
use tallyd_core::event::{LIST_EVENTS_MAX, Reason, Refusal};
use tallyd_core::mapping::Trial;
use tallyd_core::model::Micros;
use tallyd_core::partition::PartitionName;
use tallyd_mysql::letters::DeadLetter;
use tallyd_mysql::{Store, StoreError};

/// If a smaller transaction can avoid an error, the writer splits the batch after this number of such errors.
const TOO_MUCH_MAX: u32 = 2;

/// A batch is logged if its write takes longer than this. Most batches take a few milliseconds, and the largest batches
/// take about a second.
const SLOW: Duration = Duration::from_secs(2);

pub(super) struct BatchWriter {
    store: Store,
    /// Wakes the outbox after a commit with additions to Redis.
    outbox: watch::Sender<()>,
    /// Each try updates the heartbeat. A try takes at most `[mysql] transaction_timeout_ms` plus the time to connect.
    heartbeat: Heartbeat,
    /// The token is cancelled when the session ends. The writer then stops waiting for an unresponsive database.
    ends: CancellationToken,
    partition: u16,
    name: PartitionName,
    queue: String,
    database_away_max: Duration,
    part_max: usize,
    transaction: Transaction,
    throughput: Throughput,
    slow: Flood,
    refused: Flood,
}

#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Written {
    pub rows: usize,
    pub refused: usize,
    pub stopped: Option<Trial>,
}

/// The batch must be returned to the broker.
#[derive(Debug, thiserror::Error)]
pub(super) enum WriteError {
    /// Another daemon took over the partition, or the clocks differ. This error also occurs if MySQL fails for longer
    /// than `database_away_max`, or if the session ends while MySQL fails.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// Some dead letters exceeded the quota, and the session ended before the broker had confirmed these letters.
    #[error(transparent)]
    Letters(#[from] anyhow::Error),
}

enum WriteOutcome {
    Committed(Committed),
    Again,
    Split,
    Refused(StoreError),
    Forgotten(Micros),
}

#[derive(Default)]
struct Tries {
    rivals: Rivals,
    too_much: u32,
}

impl BatchWriter {
    pub(super) fn new(
        partition: &Partition,
        config: &Config,
        declared: Declared,
        reads_first: bool,
        ends: CancellationToken,
    ) -> Self {
        let Partition { number, store, live, outbox, heartbeat, .. } = partition;
        let letters_max = live.derive(|config| config.consumer.dead_letters_max);
        let quota = DeadLetterQuota::new(partition, declared.partitions, letters_max, ends.clone());
        Self {
            store: store.clone(),
            outbox: outbox.clone(),
            heartbeat: heartbeat.clone(),
            ends,
            partition: *number,
            name: partition.name(),
            queue: partition.queue(),
            database_away_max: config.consumer.database_away_max.0,
            part_max: config.consumer.batch_events_max + LIST_EVENTS_MAX,
            transaction: Transaction::new(partition, config, reads_first, (quota, declared.trial)),
            throughput: Throughput::default(),
            slow: Flood::default(),
            refused: Flood::default(),
        }
    }

    /// Writes the batch, and retries until the write succeeds. If MySQL refuses the whole batch, parts of it are
    /// committed separately.
    pub(super) async fn write(&mut self, mut batch: Batch) -> Result<Written, WriteError> {
        let (began, events, traceparents) =
            (Instant::now(), batch.events.len(), std::mem::take(&mut batch.traceparents));
        let written = self.write_parts(batch).await?;
        if began.elapsed() > SLOW {
            self.note_slow(began.elapsed(), events, &traceparents.join(" "));
        }
        Ok(written)
    }

    async fn write_parts(&mut self, batch: Batch) -> Result<Written, WriteError> {
        let mut outage = Outage::new(Work::Writing(self.name.clone()));
        let mut written = Written::default();
        // The last part of the batch contains all events that MySQL refuses. The writer writes these events as dead
        // letters.
        let Batch { clock, is_behind, .. } = batch;
        let mut refused = Batch { clock, is_behind, ..Batch::default() };
        let mut parts = vec![batch];
        let mut tries = Tries::default();
        while let Some(mut part) = parts.pop() {
            // A long list is written in several transactions, and its message is acknowledged after the last one.
            if part.len() > self.part_max && part.can_split() {
                let rest = part.split();
                parts.extend([rest, part]);
                continue;
            }
            let outcome = match self.commit(&part).await {
                Ok(committed) => WriteOutcome::Committed(committed),
                Err(error) => self.recover(error, &part, &mut tries, &mut outage).await?,
            };
            if !matches!(outcome, WriteOutcome::Again) {
                tries = Tries::default();
            }
            match outcome {
                WriteOutcome::Committed(committed) => {
                    written.rows += committed.rows;
                    written.refused += part.refused.len();
                    written.stopped = written.stopped.or(committed.stopped);
                    self.note(&part, &committed);
                    let rest = part.refused.get(committed.letters..).unwrap_or_default();
                    self.transaction.quota.turn_away(rest, &mut outage).await?;
                    outage.over();
                }
                WriteOutcome::Again => parts.push(part),
                WriteOutcome::Split => {
                    let rest = part.split();
                    parts.extend([rest, part]);
                }
                WriteOutcome::Forgotten(floor) => {
                    let forgotten = part.events.extract_if(.., |received| received.event.is_before(floor));
                    refused.refused.extend(forgotten.map(|event| self.forgotten(&event, floor)));
                    parts.push(part);
                }
                WriteOutcome::Refused(error) => {
                    let error = self.note_refused(&error);
                    let refusal = || Refusal { reason: Reason::RefusedByDatabase, error: error.clone() };
                    refused.refused.extend(part.events.iter().map(|event| letter_of(event, refusal(), &self.queue)));
                    part.fences.into_values().for_each(|fence| refused.take_fence(fence));
                }
            }
            if parts.is_empty() && !refused.refused.is_empty() {
                parts.push(std::mem::replace(&mut refused, Batch { clock, is_behind, ..Batch::default() }));
            }
        }
        Ok(written)
    }

    /// Logs a slow batch, at most once every ten seconds. The log line contains traces, with which an operator finds
    /// the senders of the batch's events.
    fn note_slow(&mut self, took: Duration, events: usize, traceparents: &str) {
        let Some(batches) = self.slow.note(1, Instant::now()) else { return };
        let (partition, name, seconds) = (self.partition, &self.name, took.as_secs_f32());
        warn!(
            event = "batch-slow",
            partition,
            events,
            seconds,
            batches,
            traceparents,
            "writing {events} events of {name} took {seconds:.1} s: check tallyd_batch_write_duration_seconds"
        );
    }

    /// The caller has written its last batch and closed the channel.
    pub(super) async fn release(&self) {
        self.transaction.ownership.release(&self.store).await;
    }

    async fn commit(&mut self, batch: &Batch) -> Result<Committed, StoreError> {
        self.heartbeat.beat();
        self.transaction.steps.begin();
        let mut conn = self.store.acquire().await?;
        self.transaction.steps.end(Step::Lend);
        self.heartbeat.beat();
        let work = async |connection: &mut MySqlConnection| {
            let ended = self.transaction.run(connection, batch).await;
            tallyd_mysql::or_rollback(connection, ended).await
        };
        let committed = conn.limit("write a batch", work).await?;
        self.transaction.steps.end(Step::Commit);
        self.transaction.steps.note();
        Ok(committed)
    }

    async fn recover(
        &mut self,
        error: StoreError,
        part: &Batch,
        tries: &mut Tries,
        outage: &mut Outage,
    ) -> Result<WriteOutcome, StoreError> {
        self.transaction.counts.failed();
        let (partition, code) = (self.partition, error.code());
        let outcome = match error {
            StoreError::TakenOver(_) | StoreError::ClocksApart(_) => return Err(error),
            StoreError::Forgotten(floor) => WriteOutcome::Forgotten(floor),
            _ if error.fate() == Fate::Item && part.can_split() => WriteOutcome::Split,
            _ if error.fate() == Fate::Item && !part.events.is_empty() => WriteOutcome::Refused(error),
            _ if self.transaction.like_rows.falls_back(&error) => {
                let error = chain(&error);
                warn!(
                    event = "reads-first",
                    partition, error, "switched to the slower way of writing, which reads rows first: {error}"
                );
                WriteOutcome::Again
            }
            _ if error.is_contention() && tries.rivals.has_room() => {
                let error = chain(&error);
                debug!(
                    event = "contention",
                    partition, "another transaction used the same rows, retrying the batch: {error}"
                );
                tries.rivals.wait().await;
                WriteOutcome::Again
            }
            _ if self.ends.is_cancelled() || outage.age() > self.database_away_max => return Err(error),
            _ => {
                tries.too_much += u32::from(error.may_be_too_much());
                let delay = outage.failed(&without_values(&error));
                self.ends.run_until_cancelled(tokio::time::sleep(delay)).await;
                let splits = tries.too_much >= TOO_MUCH_MAX && part.can_split();
                if splits { WriteOutcome::Split } else { WriteOutcome::Again }
            }
        };
        counting::again(code);
        Ok(outcome)
    }

    fn note(&mut self, part: &Batch, committed: &Committed) {
        self.transaction.counts.committed();
        counting::committed(part, committed.rows);
        self.transaction.ownership.committed(committed.epoch);
        if committed.outboxed {
            self.outbox.send_replace(());
        }
        self.heartbeat.beat();
        self.throughput.note(self.partition, part, committed.rows);
    }

    /// Logs that MySQL refuses an event, at most once every ten seconds. Returns the error's text.
    fn note_refused(&mut self, error: &StoreError) -> String {
        let error = chain(error);
        if let Some(events) = self.refused.note(1, Instant::now()) {
            let (partition, reason) = (self.partition, Reason::RefusedByDatabase.code());
            warn!(
                event = "event-refused",
                partition, reason, events, error, "MySQL refused {events} events, which become dead letters: {error}"
            );
        }
        error
    }

    fn forgotten(&self, event: &Received, floor: Micros) -> DeadLetter {
        let error = format!(
            "the ledger no longer has events before {}: a daemon ran with a shorter applied_event_keep",
            instant(floor)
        );
        letter_of(event, Refusal { reason: Reason::AtTooOld, error }, &self.queue)
    }
}

fn letter_of(received: &Received, refusal: Refusal, queue: &str) -> DeadLetter {
    let Origin { body, headers } = received.origin.as_ref();
    let body = body.get(received.range.clone()).unwrap_or(body);
    letter::refused(refusal, body, headers, queue, tallyd_base::runtime::clock::now())
}

/// Returns the error's text for logs and metrics. If MySQL's own text can contain a key with ids, the text is left out.
fn without_values(error: &StoreError) -> String {
    match error.number() {
        Some(number) if error.fate() == Fate::Item || error.is_contention() => {
            format!("{error}: MySQL's error {number}")
        }
        _ => chain(error),
    }
}

/// Returns the text of the error and of its causes, because the error's own text contains only the action that failed.
fn chain(error: &StoreError) -> String {
    let causes: Vec<String> = anyhow::Chain::new(error).map(ToString::to_string).collect();
    causes.join(": ")
}
