//! One batch, one transaction: rows, counters, dead letters and fence together, or nothing of it. It may run many times: it is idempotent.

use std::sync::Arc;

use sqlx::{Connection, MySqlConnection};

use super::batch::{Batch, Received, before, coalesce, differences};
use super::flush::Writer;
use super::vital::Steps;
use crate::config::Writes;
use crate::event::LikeEvent;
use crate::model::Addition;
use crate::runtime::fault;
use crate::store::likes::{self, Before, Difference, Pair, State};
use crate::store::partitions::{self, Ownership};
use crate::store::{StoreError, Text, letters, outbox};
use crate::telemetry::Step;

/// What a transaction found out, to be remembered once it is committed.
#[derive(Default)]
pub(super) struct Found {
    pub epoch: u64,
    pub coalesced: usize,
    /// The outbox has got rows.
    pub outboxed: bool,
    /// How many of its dead letters are kept, from the first one on.
    pub kept: usize,
}

impl Writer {
    pub(super) async fn transact(&mut self, batch: &Batch) -> Result<Found, StoreError> {
        self.beat.beat();
        let mut steps = Steps::begin();
        let mut lent = self.store.acquire().await?;
        steps.end(Step::Lend);
        self.beat.beat();
        let found = lent.limit("write a batch", |it| self.transact_on(it, batch, &mut steps)).await?;
        steps.note();
        Ok(found)
    }

    async fn transact_on(
        &mut self,
        connection: &mut MySqlConnection,
        batch: &Batch,
        steps: &mut Steps,
    ) -> Result<Found, StoreError> {
        // At each try: it may have been waited for MySQL since the last one.
        self.rules = Arc::clone(self.rules_now.get());
        let events: Vec<LikeEvent> = batch.events.iter().filter_map(Received::like).collect();
        let sql = |action| move |source| StoreError::Sql { action, source };
        let mut tx = connection.begin().await.map_err(sql("begin a batch"))?;
        let Ownership { epoch, watch, outbox: last, now, ledger_floor } = self.own(&mut tx).await?;
        self.clock.hold(now)?;
        if batch.events.iter().any(|received| received.event.is_before(ledger_floor)) {
            return Err(StoreError::Forgotten(ledger_floor));
        }
        self.learn_watch(&mut tx, watch).await?;
        steps.end(Step::Lock);
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
        let sums = self.apply_counts(&mut tx, &batch.events).await?;
        let coalesced = winners.len() + sums.len();
        if !sums.is_empty() {
            differences.extend(sums);
            differences.sort_unstable_by_key(|difference| (difference.target, difference.metric));
        }
        steps.end(Step::Rows);
        let outboxed = self.add_differences(&mut tx, last, &differences).await?;
        self.keep_late(&mut tx, now, &differences).await?;
        let kept = self.room(&mut tx, &batch.refused).await?;
        letters::keep_dead_letters(&mut tx, batch.refused.get(..kept).unwrap_or_default()).await?;
        for fence in batch.fences.values() {
            partitions::pass_fence(&mut tx, self.partition, *fence).await?;
        }
        steps.end(Step::Counters);
        fault::point("consumer:before-commit");
        // A COMMIT that fails has an unknown outcome: the whole batch runs again, and finds what it wrote.
        tx.commit().await.map_err(sql("commit a batch"))?;
        fault::point("consumer:after-commit");
        steps.end(Step::Commit);
        Ok(Found { epoch, coalesced, outboxed, kept })
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
        let taken_over = StoreError::TakenOver(format!("partition {}", self.partition));
        let mut ownership = partitions::lock_owner(tx, self.partition).await?;
        if ownership.is_none() && self.epoch.is_none() {
            // A row that isn't there can't be locked: two would take the same epoch.
            partitions::make_owner(tx, self.partition).await?;
            ownership = partitions::lock_owner(tx, self.partition).await?;
        }
        let Some(now) = ownership else { return Err(taken_over) };
        match self.epoch {
            Some(ours) if ours == now.epoch => Ok(now),
            Some(_) => Err(taken_over),
            None => {
                let epoch = now.epoch + 1;
                partitions::take_partition(tx, self.partition, epoch, &self.owner).await?;
                Ok(Ownership { epoch, ..now })
            }
        }
    }
}
