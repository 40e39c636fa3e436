//! One batch, one transaction: rows, counters, dead letters and fence together, or nothing of it. The caller
//! acknowledges after this returns (invariant 1). The transaction's body may run many times: it is idempotent.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use sqlx::{Connection, MySqlConnection};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};

use super::batch::{Batch, Received, before, coalesce, differences};
use super::consumed::Consumed;
use super::dead;
use super::room::{Kept, Room};
use super::vital::{self, Steps};
use super::watch::Watch;
use crate::config::{Current, Rules, Writes};
use crate::event::{LikeEvent, Reason};
use crate::model::{Addition, Metric, Micros};
use crate::runtime::fault;
use crate::runtime::progress::Beat;
use crate::runtime::retry::Outage;
use crate::store::likes::{self, Before, Difference, Pair, State};
use crate::store::partitions::Ownership;
use crate::store::{Fate, Store, StoreError, Text, letters, outbox, partitions};
use crate::vitals::vitals;

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
    /// Asks which counts were applied before it notes them.
    pub asks_ledger: bool,
    /// The targets whose events are logged for a reconcile.
    pub watch: Watch,
    /// Whose numbers the daemon adds to Redis, and which may be set: as of now.
    pub rules_now: Current<Arc<Rules>>,
    /// As of the transaction in hand.
    pub rules: Arc<Rules>,
    /// How many dead letters are kept.
    pub room: Room,
    pub consumed: Consumed,
    /// Beats at each try: none takes longer than `[mysql] transaction_timeout_ms` and a connection.
    pub beat: Beat,
}

/// After so many rivals in a row it is waited between two tries.
const RIVALS_MAX: u32 = 3;

/// After so many time limits a batch is written in halves: it may be too large for the way to the server.
const TIMEOUTS_MAX: u32 = 2;

/// What has gone wrong with a batch so far.
struct Tries {
    outage: Outage,
    rivals: u32,
    timeouts: u32,
    /// The database refuses the batch, and none of its events.
    together: bool,
}

/// Whether a transaction is kept.
#[derive(Clone, Copy, PartialEq, Eq)]
enum End {
    Commit,
    RollBack,
}

/// What a transaction found out, to be remembered once it is committed.
#[derive(Default)]
pub(super) struct Found {
    pub epoch: u64,
    pub coalesced: usize,
    /// The outbox has got rows.
    pub outboxed: bool,
    /// Dead letters that are open now and were not, as far as is known.
    pub kept: u64,
    /// Those that were only counted, by reason.
    pub dropped: BTreeMap<&'static str, u64>,
}

impl Writer {
    /// Writes the batch, however often that takes. Returns how many rows its events came down to.
    ///
    /// # Errors
    /// The partition was taken over, MySQL was away for longer than `database_away_max`, or away when the session
    /// ended: the batch must be given back to the broker.
    pub async fn write(&mut self, batch: &mut Batch) -> Result<usize, StoreError> {
        let outage = Outage::new(format!("writing partition {}", self.partition));
        let mut tries = Tries { outage, rivals: 0, timeouts: 0, together: false };
        self.write_trying(batch, &mut tries).await
    }

    async fn write_trying(&mut self, batch: &mut Batch, tries: &mut Tries) -> Result<usize, StoreError> {
        loop {
            if (tries.timeouts >= TIMEOUTS_MAX || tries.together) && batch.can_split() {
                let mut rest = batch.split();
                let mut rows = 0;
                for part in [batch, &mut rest] {
                    (tries.rivals, tries.timeouts, tries.together) = (0, 0, false);
                    // The outage goes on: parts are waited for no longer than the whole.
                    rows += Box::pin(self.write_trying(part, tries)).await?;
                }
                return Ok(rows);
            }
            match self.transact(batch, &batch.events, End::Commit).await {
                Ok(found) => {
                    self.asks_ledger = false;
                    tries.outage.over();
                    vital::committed(batch, found.coalesced);
                    self.remember(found.epoch);
                    self.note_letters(&found);
                    if found.outboxed {
                        self.outbox.send_replace(());
                    }
                    self.beat.beat();
                    self.consumed.note(self.partition, batch, found.coalesced);
                    return Ok(found.coalesced);
                }
                Err(error) => self.recover(error, batch, tries).await?,
            }
        }
    }

    /// Does what an error asks for before the next try; gives it back where there is none.
    async fn recover(&mut self, error: StoreError, batch: &mut Batch, tries: &mut Tries) -> Result<(), StoreError> {
        // Perhaps it was a count that was applied before, and perhaps a COMMIT that failed was none.
        self.asks_ledger = true;
        let code = error.code();
        match error {
            StoreError::TakenOver(_) => return Err(error),
            // What there is room for goes through.
            StoreError::NoRoom(_) if batch.can_split() => tries.together = true,
            _ if error.fate() == Fate::Row && self.set_refused_aside(batch).await? => {}
            _ if error.fate() == Fate::Row && spell_in_ascii(batch) => {}
            // Each is fine alone, and together they aren't: two that fill a number.
            _ if error.fate() == Fate::Row && batch.can_split() => tries.together = true,
            _ if !self.reads_first && error.is_unsupported() => {
                self.reads_first = true;
                let error = chain(&error);
                warn!(
                    event = "reads-first",
                    partition = self.partition,
                    error,
                    "writing in the slower way, by reading first: {error}"
                );
            }
            _ if error.is_contention() && tries.rivals < RIVALS_MAX => {
                tries.rivals += 1;
                debug!(
                    event = "contention",
                    partition = self.partition,
                    "a rival was first, trying again: {}",
                    chain(&error)
                );
            }
            _ if self.ends.is_cancelled() || tries.outage.age() > self.database_away_max => return Err(error),
            _ => {
                tries.timeouts += u32::from(matches!(error, StoreError::Timeout { .. }));
                let delay = tries.outage.failed(&without_values(&error));
                self.ends.run_until_cancelled(tokio::time::sleep(delay)).await;
            }
        }
        vital::again(code);
        Ok(())
    }

    /// Gives the partition back, after everything is written and the broker has the rest.
    pub async fn release(&self) {
        let Some(epoch) = self.epoch else { return };
        let released = async {
            let mut lent = self.store.lend().await?;
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
        vitals().partition(self.partition).writes();
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

    /// Finds the events whose rows the database refuses, and makes dead letters of them. False where none is refused
    /// when tried alone.
    async fn set_refused_aside(&mut self, batch: &mut Batch) -> Result<bool, StoreError> {
        let mut refused: Vec<(usize, String)> = Vec::new();
        let mut parts = vec![(0, batch.events.len())];
        while let Some((from, until)) = parts.pop() {
            let Some(events) = batch.events.get(from..until).filter(|events| !events.is_empty()) else { continue };
            match self.transact(batch, events, End::RollBack).await {
                Ok(_) => {}
                Err(error) if error.fate() == Fate::Row && events.len() == 1 => refused.push((from, chain(&error))),
                Err(error) if error.fate() == Fate::Row => {
                    let middle = from.midpoint(until);
                    parts.extend([(middle, until), (from, middle)]);
                }
                Err(error @ StoreError::TakenOver(_)) => return Err(error),
                // Passing: the caller's loop begins again, with those found so far still in the batch.
                Err(_) => return Ok(false),
            }
        }
        refused.sort_unstable_by_key(|(index, _)| std::cmp::Reverse(*index));
        for (index, error) in &refused {
            let received: Received = batch.events.remove(*index);
            warn!(
                event = "event-refused",
                partition = self.partition,
                reason = Reason::RefusedByDatabase.code(),
                error,
                "the database refuses one event, which is kept in dead_letter: {error}"
            );
            batch.refused.push(dead::refused_by_database(&received, error.clone(), &self.queue, Micros::now()));
        }
        Ok(!refused.is_empty())
    }

    async fn transact(&mut self, batch: &Batch, events: &[Received], end: End) -> Result<Found, StoreError> {
        self.beat.beat();
        let mut steps = Steps::begin();
        let mut lent = self.store.lend().await?;
        steps.end("lend");
        self.beat.beat();
        let found = lent.limit("write a batch", |it| self.transact_on(it, batch, events, end, &mut steps)).await?;
        if end == End::Commit {
            steps.note();
        }
        Ok(found)
    }

    async fn transact_on(
        &mut self,
        connection: &mut MySqlConnection,
        batch: &Batch,
        received: &[Received],
        end: End,
        steps: &mut Steps,
    ) -> Result<Found, StoreError> {
        // At each try: it may have been waited for MySQL since the last one.
        self.rules = Arc::clone(self.rules_now.get());
        let events: Vec<LikeEvent> = received.iter().filter_map(Received::like).collect();
        let sql = |action| move |source| StoreError::Sql { action, source };
        let mut tx = connection.begin().await.map_err(sql("begin a batch"))?;
        let Ownership { epoch, watch, outbox: last } = self.own(&mut tx).await?;
        self.learn_watch(&mut tx, watch).await?;
        // First of all: without room the rest is for nothing.
        let kept = if end == End::Commit { self.room(&mut tx, &batch.refused).await? } else { Kept::default() };
        steps.end("lock");
        let winners = coalesce(&events);
        // A watch needs the rows' former states in full.
        let before = match self.watch.of_likes(self.metric) {
            Some(watch) => self.write_reading(&mut tx, &winners, Some((watch, &events))).await?,
            None if self.reads_first => self.write_reading(&mut tx, &winners, None).await?,
            None => {
                let before = likes::upsert(&mut tx, &winners).await?;
                before.ok_or(StoreError::Unsupported("user variables"))?
            }
        };
        let mut differences = differences(self.metric, &winners, &before);
        let sums = self.apply_counts(&mut tx, received).await?;
        let coalesced = winners.len() + sums.len();
        if !sums.is_empty() {
            differences.extend(sums);
            differences.sort_unstable_by_key(|difference| (difference.target, difference.metric));
        }
        steps.end("rows");
        let outboxed = self.add_differences(&mut tx, last, &differences).await?;
        if end == End::RollBack {
            tx.rollback().await.map_err(sql("roll a batch back"))?;
            return Ok(Found { epoch, coalesced, ..Found::default() });
        }
        letters::keep_dead_letters(&mut tx, &kept.letters).await?;
        for fence in batch.fences.iter().flatten() {
            partitions::pass_fence(&mut tx, self.partition, *fence).await?;
        }
        steps.end("counters");
        fault::point("consumer:before-commit");
        // A COMMIT that fails has an unknown outcome: the whole batch runs again, and finds what it wrote.
        tx.commit().await.map_err(sql("commit a batch"))?;
        fault::point("consumer:after-commit");
        steps.end("commit");
        Ok(Found { epoch, coalesced, outboxed, kept: kept.added, dropped: kept.dropped })
    }

    /// Adds to counters, and appends to the outbox what the daemon adds to Redis. Returns whether that is anything.
    async fn add_differences(
        &self,
        tx: &mut MySqlConnection,
        last: u64,
        differences: &[Difference],
    ) -> Result<bool, StoreError> {
        let by_daemon =
            |it: &&Difference| it.delta != 0 && self.rules.of(it.target.kind, it.metric).writer == Writes::Daemon;
        let additions: Vec<Addition> = differences.iter().filter(by_daemon).map(Difference::addition).collect();
        let mut text = Text::default();
        likes::add_differences(&mut text, self.partition, differences);
        outbox::append_after(&mut text, self.partition, last, &additions);
        text.run(tx, "add to counters").await?;
        Ok(!additions.is_empty())
    }

    /// Writes rows by reading their old states first, and logs the events of watched targets.
    async fn write_reading(
        &mut self,
        tx: &mut MySqlConnection,
        winners: &[(Pair, State)],
        watched: Option<(u64, &[LikeEvent])>,
    ) -> Result<Vec<Before>, StoreError> {
        let pairs: Vec<Pair> = winners.iter().map(|(pair, _)| *pair).collect();
        let old = likes::old_states(tx, &pairs).await?;
        let before = before(winners, &old);
        let those = |wanted: fn(&Before) -> bool| -> Vec<(Pair, State)> {
            winners.iter().zip(&before).filter(|(_, before)| wanted(before)).map(|(winner, _)| *winner).collect()
        };
        likes::insert_states(tx, &those(|before| *before == Before::Absent)).await?;
        likes::update_states(tx, &those(|before| matches!(before, Before::Older(_)))).await?;
        if let Some((watch, events)) = watched {
            self.log_watched_likes(tx, watch, events, &old).await?;
        }
        Ok(before)
    }

    /// Locks the partition's row, first of all, and checks or takes the ownership.
    async fn own(&self, tx: &mut MySqlConnection) -> Result<Ownership, StoreError> {
        let mut ownership = partitions::lock_owner(tx, self.partition).await?;
        if ownership.is_none() && self.epoch.is_none() {
            // A row that isn't there can't be locked: two would take the same epoch.
            partitions::make_owner(tx, self.partition).await?;
            ownership = partitions::lock_owner(tx, self.partition).await?;
        }
        match (self.epoch, ownership) {
            (Some(ours), Some(now)) if now.epoch == ours => Ok(now),
            (Some(_), _) => Err(StoreError::TakenOver(format!("partition {}", self.partition))),
            (None, now) => {
                let now = now.unwrap_or_default();
                let epoch = now.epoch + 1;
                partitions::take_partition(tx, self.partition, epoch, &self.owner).await?;
                Ok(Ownership { epoch, ..now })
            }
        }
    }
}

/// Spells dead letters in ASCII: one that the database refuses, by its character set, must not hold the others up.
/// False where they are already.
fn spell_in_ascii(batch: &mut Batch) -> bool {
    let mut changed = false;
    for letter in &mut batch.refused {
        for text in [&mut letter.error, &mut letter.headers] {
            if !text.is_ascii() {
                *text = text.chars().map(|character| if character.is_ascii() { character } else { '?' }).collect();
                changed = true;
            }
        }
    }
    changed
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
