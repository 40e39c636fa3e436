//! The transaction of a batch: rows, counters, hints, dead letters and fences are committed together, or not at all.

use std::sync::Arc;
use std::time::Duration;

use sqlx::MySqlConnection;
use tracing::{debug, info};

use super::Partition;
use super::batch::Batch;
use super::counting::Steps;
use super::dead_letter_quota::DeadLetterQuota;
use super::rows::{Counts, EventCapture, LikeRows};
use tallyd_base::config::{Config, Derived, Rules, Writes};
use tallyd_base::runtime::fault;
use tallyd_base::telemetry::{Step, telemetry};
use tallyd_core::coalesce::Pair;
use tallyd_core::mapping::Trial;
use tallyd_core::model::{Addition, CounterKey, Difference, Metric, Micros};
use tallyd_core::partition::{Claim, PartitionName};
use tallyd_mysql::{Store, StoreError, Text, changed, fences, letters, likes, maps, outbox, partitions};

/// Maximum number of hints (counters that the next reconcile must check) that one batch records.
const KEPT_MAX: usize = 1_000;

pub(super) struct Transaction {
    partition: u16,
    like: Metric,
    rules: Derived<Arc<Rules>>,
    pub ownership: Ownership,
    capture: EventCapture,
    pub like_rows: LikeRows,
    pub counts: Counts,
    drift_hints: DriftHints,
    pub quota: DeadLetterQuota,
    /// The definition of the partition's map, while its trial continues.
    trial: Option<[u8; 32]>,
    pub steps: Steps,
}

pub(super) struct Committed {
    pub epoch: u64,
    pub rows: usize,
    pub outboxed: bool,
    /// The number of dead letters that the transaction kept. These are the first dead letters of the batch.
    pub letters: usize,
    pub stopped: Option<Trial>,
}

impl Transaction {
    pub(super) fn new(
        partition: &Partition,
        config: &Config,
        reads_first: bool,
        (quota, trial): (DeadLetterQuota, Option<[u8; 32]>),
    ) -> Self {
        let Partition { number, owner, live, .. } = partition;
        let like = config.metrics.like();
        let like_rows = LikeRows {
            metric: like,
            has_filters: config.filter.is_on(),
            reads_first,
            coarse: partition.map.as_ref().map(|map| map.at.unit).filter(|unit| unit.is_coarse()),
        };
        Self {
            partition: *number,
            like,
            rules: live.derive(|config| Arc::new(Rules::from(config))),
            ownership: Ownership { partition: *number, name: partition.name(), owner: owner.clone(), epoch: None },
            capture: EventCapture::new(like),
            like_rows,
            counts: Counts::default(),
            drift_hints: DriftHints { overlap: live.derive(|config| config.reconcile.overlap.0) },
            quota,
            trial,
            steps: Steps::default(),
        }
    }

    /// Runs the transaction. The partition's row is locked first. If this fails, the caller must roll back.
    pub(super) async fn run(&mut self, tx: &mut MySqlConnection, batch: &Batch) -> Result<Committed, StoreError> {
        let rules = Arc::clone(self.rules.get());
        let owner = self.ownership.begin(tx, batch.is_behind).await?;
        batch.clock.check(owner.now)?;
        if batch.events.iter().any(|received| received.event.is_before(owner.ledger_floor)) {
            return Err(StoreError::Forgotten(owner.ledger_floor));
        }
        self.capture.refresh(tx, owner.watch).await?;
        self.steps.end(Step::Lock);
        let mut likes = self.like_rows.write(tx, &batch.events, &self.capture).await?;
        // If API servers count likes, they also add the users of these likes to Bloom filters.
        likes.likers.retain(|(target, _)| rules.of(target.kind, self.like).writer == Writes::Daemon);
        let counts = self.counts.apply(tx, &batch.events, &rules, &self.capture).await?;
        let rows = likes.rows + counts.len();
        let mut differences = merge(likes.differences, counts);
        date_by_commit(&mut differences, owner.now, &rules);
        self.steps.end(Step::Rows);
        let outboxed = add_to_counters(tx, (self.partition, owner.outbox), &differences, &likes.likers, &rules).await?;
        self.drift_hints.keep(tx, owner.now, &differences, &rules).await?;
        let letters = self.quota.admit(tx, &batch.refused).await?;
        letters::keep_dead_letters(tx, letters).await?;
        let trial = self.try_map(tx, batch).await?;
        for fence in batch.fences.values() {
            fences::pass(tx, self.partition, *fence).await?;
        }
        self.steps.end(Step::Counters);
        fault::point("consumer:before-commit");
        // A failed COMMIT has an unknown outcome, so the whole batch is written again. If the COMMIT succeeded, the
        // second try finds the rows of the first.
        partitions::commit(tx).await?;
        fault::point("consumer:after-commit");
        self.trial = self.trial.filter(|_| trial.is_some_and(|trial| !trial.is_over()));
        let stopped = trial.filter(|trial| trial.is_stopped);
        Ok(Committed { epoch: owner.epoch, rows, outboxed, letters: letters.len(), stopped })
    }
}

impl Transaction {
    async fn try_map(&self, tx: &mut MySqlConnection, batch: &Batch) -> Result<Option<Trial>, StoreError> {
        let Some(definition) = self.trial else { return Ok(None) };
        let Some(trial) = maps::lock_trial(tx, self.partition, definition).await? else { return Ok(None) };
        if trial.is_stopped {
            return Err(StoreError::TakenOver(self.ownership.name.to_string()));
        }
        if trial.is_over() {
            return Ok(Some(trial));
        }
        let trial = trial.with(batch.events.len(), batch.refused.len());
        maps::note_trial(tx, self.partition, trial).await?;
        Ok(Some(trial))
    }
}

/// Numbers that the daemon counts get MySQL's time, so that a `changed` reconcile finds them even if events are late or
/// the sender's clock is wrong. A settable number keeps a later time of its sender, because a set event must see that a
/// newer count was applied.
fn date_by_commit(differences: &mut [Difference], now: Micros, rules: &Rules) {
    for it in differences {
        let ruled = rules.of(it.target.kind, it.metric);
        if ruled.writer == Writes::Daemon {
            it.at = if ruled.settable { it.at.max(now) } else { now };
        }
    }
}

fn merge(mut differences: Vec<Difference>, counts: Vec<Difference>) -> Vec<Difference> {
    if !counts.is_empty() {
        differences.extend(counts);
        differences.sort_unstable_by_key(|difference| (difference.target, difference.metric));
    }
    differences
}

async fn add_to_counters(
    tx: &mut MySqlConnection,
    (partition, last): (u16, u64),
    differences: &[Difference],
    likers: &[Pair],
    rules: &Rules,
) -> Result<bool, StoreError> {
    let by_daemon = |it: &&Difference| it.delta != 0 && rules.of(it.target.kind, it.metric).writer == Writes::Daemon;
    let additions: Vec<Addition> = differences.iter().filter(by_daemon).map(Difference::addition).collect();
    let mut text = Text::default();
    likes::add_differences(&mut text, partition, differences);
    outbox::append_after(&mut text, partition, last, &additions, likers);
    text.run(tx, "add to counters").await?;
    Ok(!(additions.is_empty() && likers.is_empty()))
}

/// Checks that this session still owns the partition. Each transaction compares the epoch of this session with the
/// epoch in the partition's row.
pub(super) struct Ownership {
    partition: u16,
    name: PartitionName,
    owner: String,
    /// `None` until the first batch is committed, because a standby daemon must not take over the partition.
    epoch: Option<u64>,
}

impl Ownership {
    /// The first step of each transaction. Takes over the partition with the first batch. Fails with `TakenOver` if
    /// another daemon has.
    async fn begin(&self, tx: &mut MySqlConnection, is_behind: bool) -> Result<partitions::Ownership, StoreError> {
        let mut row = partitions::begin(tx, self.partition, is_behind).await?;
        if row.is_none() && self.epoch.is_none() {
            // A row that does not exist cannot be locked, so two daemons could take the same epoch.
            partitions::make_owner(tx, self.partition).await?;
            row = partitions::lock_owner(tx, self.partition).await?;
        }
        match row.map(|row| (row, Claim::of(row.epoch, self.epoch))) {
            Some((row, Claim::Keeps)) => Ok(row),
            Some((row, Claim::Takes(epoch))) => {
                partitions::take_partition(tx, self.partition, epoch, &self.owner).await?;
                Ok(partitions::Ownership { epoch, ..row })
            }
            Some((_, Claim::TakenOver)) | None => Err(StoreError::TakenOver(self.name.to_string())),
        }
    }

    pub(super) fn committed(&mut self, epoch: u64) {
        let Self { partition, ref name, .. } = *self;
        telemetry().partition(partition).writes();
        if self.epoch.replace(epoch).is_none() {
            telemetry().consumer.takeover(partition);
            info!(event = "partition-taken", partition, epoch, "this daemon now writes {name}");
        }
    }

    pub(super) async fn release(&self, store: &Store) {
        let Some(epoch) = self.epoch else { return };
        let released = async {
            let mut conn = store.acquire().await?;
            conn.limit("release the partition", |connection| {
                partitions::release_partition(connection, self.partition, epoch)
            })
            .await
        };
        if let Err(error) = released.await {
            debug!(event = "release-failed", partition = self.partition, "{:#}", anyhow::Error::from(error));
        }
    }
}

/// A `changed` reconcile finds targets by the time of their newest event. Without a hint, it would miss events that are
/// applied late, such as replayed dead letters, whose effect an earlier reconcile can have removed from Redis.
struct DriftHints {
    overlap: Derived<Duration>,
}

impl DriftHints {
    async fn keep(
        &mut self,
        tx: &mut MySqlConnection,
        now: Micros,
        differences: &[Difference],
        rules: &Rules,
    ) -> Result<(), StoreError> {
        let looks_back: Duration = *self.overlap.get() / 2;
        let by_api = |it: &Difference| rules.of(it.target.kind, it.metric).writer == Writes::Api;
        if late(differences, now.before(looks_back), by_api).is_empty() {
            return Ok(());
        }
        // In a backlog, ordinary events are also older than `looks_back`. An event needs a hint only if a reconcile
        // began after the event. Otherwise the next run lists the event's target, because each run lists all targets
        // that changed since the previous run began.
        let Some(began) = changed::last_reconcile(tx).await? else { return Ok(()) };
        let late = late(differences, began.before(looks_back), by_api);
        let late: Vec<(CounterKey, i64)> = late.into_iter().map(|key| (key, 0)).collect();
        changed::keep_hints(tx, &late).await?;
        Ok(())
    }
}

/// Returns the counters that changed before `before` and that API servers count in Redis, sorted by key.
fn late(differences: &[Difference], before: Micros, by_api: impl Fn(&Difference) -> bool) -> Vec<CounterKey> {
    let is_late = |it: &&Difference| it.delta != 0 && it.at < before && by_api(it);
    let mut late: Vec<CounterKey> =
        differences.iter().filter(is_late).map(|it| (it.target, it.metric)).take(KEPT_MAX).collect();
    late.sort_unstable();
    late
}

#[cfg(test)]
mod tests {
    use super::*;
    use tallyd_base::config::{Kinds, Metrics, Rule};
    use tallyd_core::model::{Kind, Target, TargetId};

    const METRICS: [(&str, u8); 3] = [("like", 1), ("unread", 2), ("comment", 3)];

    #[test]
    fn numbers_of_the_daemon_are_dated_by_their_commit() {
        let (kinds, metrics) = (
            Kinds([("video".to_owned(), 1)].into()),
            Metrics(METRICS.map(|(name, code)| (name.to_owned(), code)).into()),
        );
        let blocks = [
            Rule { settable: true, ..Rule::of("unread") },
            Rule { writer: Writes::Api, settable: true, ..Rule::of("comment") },
        ];
        let rules = Rules::new(&kinds, &metrics, &blocks);
        for (code, at, dated) in [(1, 3, 5), (1, 9, 5), (2, 3, 5), (2, 9, 9), (3, 3, 3), (3, 9, 9)] {
            let target = Target { kind: Kind(1), id: TargetId(1) };
            let mut one = [Difference { target, metric: Metric(code), delta: 1, at: Micros(at) }];
            date_by_commit(&mut one, Micros(5), &rules);
            assert_eq!(one[0].at, Micros(dated), "{code} at {at}");
        }
    }

    #[test]
    fn only_changes_that_are_old_are_late() {
        let of = |id, metric, delta, at| Difference {
            target: Target { kind: Kind(1), id: TargetId(id) },
            metric: Metric(metric),
            delta,
            at: Micros(at),
        };
        let differences = [of(1, 3, 1, 9), of(1, 1, 1, 9), of(2, 1, 0, 9), of(3, 1, 1, 10), of(4, 1, 1, 9)];
        let found = late(&differences, Micros(10), |it| it.target.id != TargetId(4));
        let found: Vec<(u8, u64)> = found.iter().map(|(target, metric)| (metric.0, target.id.0)).collect();
        assert_eq!(found, [(1, 1), (3, 1)]);
        let many: Vec<Difference> = (0..5_000).map(|id| of(id, 1, 1, 1)).collect();
        assert_eq!(late(&many, Micros(10), |_| true).len(), KEPT_MAX);
    }
}
