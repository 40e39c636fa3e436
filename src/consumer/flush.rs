//! A batch on its way into MySQL, through errors: tried again, or written in halves. The caller acknowledges after this returns (invariant 1).

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};

use super::batch::{Batch, Received};
use super::clock::Clock;
use super::consumed::Consumed;
use super::dead;
use super::room::Room;
use super::transaction::Found;
use super::vital;
use super::watch::Watch;
use crate::config::{Derived, Rules};
use crate::dead_letters::text::instant;
use crate::event::{Reason, Refusal};
use crate::model::{Metric, Micros};
use crate::runtime::liveness::Heartbeat;
use crate::runtime::retry::Outage;
use crate::runtime::waits::Work;
use crate::store::letters::DeadLetter;
use crate::store::{Fate, Store, StoreError, partitions};
use crate::telemetry::telemetry;

/// The writer of one partition, for one session with the broker.
pub(super) struct Writer {
    pub store: Store,
    pub partition: u16,
    pub owner: String,
    pub queue: String,
    pub metric: Metric,
    /// Rung when there is something for Redis.
    pub outbox: watch::Sender<()>,
    pub database_away_max: Duration,
    /// Cancelled when the session ends: a database that is away is then waited for no longer.
    pub ends: CancellationToken,
    /// Ours while the partition's row says so; none until the first batch, because a standby must not take over.
    pub epoch: Option<u64>,
    /// The server can't do the faster way of writing rows.
    pub reads_first: bool,
    /// For so many transactions it asks which counts were applied before it notes them.
    pub asks_ledger: u32,
    /// The targets whose events are logged for a reconcile.
    pub watch: Watch,
    /// Whose numbers the daemon adds to Redis, and which may be set: as of now.
    pub rules_now: Derived<Arc<Rules>>,
    /// As of the transaction in hand.
    pub rules: Arc<Rules>,
    /// `[reconcile] overlap`.
    pub overlap: Derived<Duration>,
    /// This machine's clock while the batch in hand was decoded.
    pub clock: Clock,
    /// Where its dead letters go.
    pub room: Room,
    pub consumed: Consumed,
    /// Beats at each try: none takes longer than `[mysql] transaction_timeout_ms` and a connection.
    pub beat: Heartbeat,
}

/// After so many rivals in a row it is waited between two tries.
const RIVALS_MAX: u32 = 3;

/// After so many errors that a smaller transaction may not meet, a part is split.
const TOO_MUCH_MAX: u32 = 2;

/// What has become of a batch.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Written {
    /// Rows that its events came down to.
    pub rows: usize,
    /// Events that can never be applied.
    pub refused: usize,
}

/// What has become of a part of a batch.
enum Outcome {
    Written(Found),
    /// Its halves may be written.
    Split,
    /// MySQL refuses its only event.
    Refused(StoreError),
    /// Some of its events are older than the ledger.
    Forgotten(Micros),
}

/// What has gone wrong with a part so far.
#[derive(Default)]
struct Tries {
    rivals: u32,
    too_much: u32,
}

impl Writer {
    /// Writes the batch, however often that takes. Parts of it are committed alone where MySQL refuses the whole.
    ///
    /// # Errors
    /// The partition was taken over, clocks are apart, MySQL was away for longer than `database_away_max`, or away when the session
    /// ended, or the broker has not taken what there was no room for: the batch must be given back to the broker.
    pub async fn write(&mut self, batch: Batch) -> anyhow::Result<Written> {
        let mut outage = Outage::new(Work::Writing(self.partition));
        let mut written = Written::default();
        self.clock = batch.clock;
        // Events that are refused alone become dead letters together, in the last part.
        let (mut parts, mut refused) = (vec![batch], Batch::default());
        while let Some(mut part) = parts.pop() {
            match self.write_part(&part, &mut outage).await? {
                Outcome::Written(found) => {
                    written.rows += found.coalesced;
                    written.refused += part.refused.len();
                    self.note(&part, &found);
                    self.do_without_room(part.refused.get(found.kept..).unwrap_or_default(), &mut outage).await?;
                }
                Outcome::Split => {
                    let rest = part.split();
                    parts.extend([rest, part]);
                }
                Outcome::Forgotten(floor) => {
                    let forgotten = part.events.extract_if(.., |received| received.event.is_before(floor));
                    refused.refused.extend(forgotten.map(|event| self.forgotten(&event, floor)));
                    parts.push(part);
                }
                Outcome::Refused(error) => {
                    refused.refused.extend(part.events.iter().map(|event| self.refused(event, &error)));
                    part.fences.into_values().for_each(|fence| refused.take_fence(fence));
                }
            }
            if parts.is_empty() && !refused.refused.is_empty() {
                parts.push(std::mem::take(&mut refused));
            }
        }
        Ok(written)
    }

    async fn write_part(&mut self, part: &Batch, outage: &mut Outage) -> Result<Outcome, StoreError> {
        let mut tries = Tries::default();
        loop {
            let ended = match self.transact(part).await {
                Ok(found) => Some(Outcome::Written(found)),
                Err(error) => {
                    // Perhaps it was a count that was applied before, and perhaps a COMMIT that failed was none.
                    self.asks_ledger = self.asks_ledger.max(1);
                    let code = error.code();
                    let ended = self.recover(error, part, &mut tries, outage).await?;
                    vital::again(code);
                    ended
                }
            };
            if let Some(outcome) = ended {
                return Ok(outcome);
            }
        }
    }

    /// Prepares the next try after an error, unless the error decides what becomes of the part.
    async fn recover(
        &mut self,
        error: StoreError,
        part: &Batch,
        tries: &mut Tries,
        outage: &mut Outage,
    ) -> Result<Option<Outcome>, StoreError> {
        match error {
            StoreError::TakenOver(_) | StoreError::ClocksApart(_) => return Err(error),
            StoreError::Forgotten(floor) => return Ok(Some(Outcome::Forgotten(floor))),
            _ if error.fate() == Fate::Row && part.can_split() => return Ok(Some(Outcome::Split)),
            _ if error.fate() == Fate::Row && !part.events.is_empty() => return Ok(Some(Outcome::Refused(error))),
            _ if !self.reads_first && error.is_unsupported() => {
                self.reads_first = true;
                let (partition, error) = (self.partition, chain(&error));
                warn!(event = "reads-first", partition, error, "writing in the slower way, by reading first: {error}");
            }
            _ if error.is_contention() && tries.rivals < RIVALS_MAX => {
                tries.rivals += 1;
                let (partition, error) = (self.partition, chain(&error));
                debug!(event = "contention", partition, "a rival was first, trying again: {error}");
            }
            _ if self.ends.is_cancelled() || outage.age() > self.database_away_max => return Err(error),
            _ => {
                tries.too_much += u32::from(error.may_be_too_much());
                let delay = outage.failed(&without_values(&error));
                self.ends.run_until_cancelled(tokio::time::sleep(delay)).await;
                if tries.too_much >= TOO_MUCH_MAX && part.can_split() {
                    return Ok(Some(Outcome::Split));
                }
            }
        }
        Ok(None)
    }

    /// Notes a part that is committed.
    fn note(&mut self, part: &Batch, found: &Found) {
        self.asks_ledger = self.asks_ledger.saturating_sub(1);
        vital::committed(part, found.coalesced);
        self.remember(found.epoch);
        if found.outboxed {
            self.outbox.send_replace(());
        }
        self.beat.beat();
        self.consumed.note(self.partition, part, found.coalesced);
    }

    /// The dead letter of an event that MySQL refuses.
    fn refused(&self, event: &Received, error: &StoreError) -> DeadLetter {
        let error = chain(error);
        warn!(
            event = "event-refused",
            partition = self.partition,
            reason = Reason::RefusedByDatabase.code(),
            error,
            "MySQL refuses one event, which is kept in dead_letter: {error}"
        );
        let refusal = Refusal { reason: Reason::RefusedByDatabase, error };
        dead::refused_event(event, refusal, &self.queue, Micros::now())
    }

    /// The dead letter of an event of which nobody can say any more whether it was applied.
    fn forgotten(&self, event: &Received, floor: Micros) -> DeadLetter {
        let error =
            format!("events before {} are forgotten: some daemon's applied_event_keep was shorter", instant(floor));
        let refusal = Refusal { reason: Reason::AtTooOld, error };
        dead::refused_event(event, refusal, &self.queue, Micros::now())
    }

    /// Gives the partition back, after everything is written and the broker has the rest.
    pub async fn release(&self) {
        let Some(epoch) = self.epoch else { return };
        let released = async {
            let mut lent = self.store.acquire().await?;
            lent.limit("release the partition", |connection| {
                partitions::release_partition(connection, self.partition, epoch)
            })
            .await
        };
        if let Err(error) = released.await {
            debug!(event = "release-failed", partition = self.partition, "{}", chain(&error));
        }
    }

    fn remember(&mut self, epoch: u64) {
        telemetry().partition(self.partition).writes();
        if self.epoch.replace(epoch).is_none() {
            info!(
                event = "partition-taken",
                partition = self.partition,
                epoch,
                "partition {} is written here now",
                self.partition
            );
        }
    }
}

/// For everybody who looks: MySQL's own words about values may quote a key, with ids in it.
fn without_values(error: &StoreError) -> String {
    match error.number() {
        Some(number) if error.fate() == Fate::Row || error.is_contention() => {
            format!("{error}: MySQL's error {number}")
        }
        _ => chain(error),
    }
}

pub(super) fn chain(error: &StoreError) -> String {
    // With the causes; the type's own display is the action alone.
    let mut text = error.to_string();
    let mut cause = std::error::Error::source(error);
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    text
}
