//! What a reconcile reads: which targets there are, and their true values with the instant they are true for.

use std::collections::HashMap;

use chrono::NaiveDateTime;
use futures_util::TryStreamExt;
use sqlx::mysql::MySqlRow;
use sqlx::{AssertSqlSafe, Connection, MySqlConnection, Row};

use super::changed::Span;
use super::repairs::{self, Intent};
use super::{Lent, Result, Store, Tried, datetime, in_shapes, jobs, micros, placeholders};
use crate::model::{Kind, Metric, Micros, Target, TargetId};

/// A target's number as MySQL has it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Truth {
    /// `SUM(value)` over the slots of `counter`.
    pub counted: i64,
    /// `COUNT(*) WHERE is_del = 0` over `like_record`; only where rows were asked for.
    pub rows: Option<i64>,
    /// The newest `at` that was applied; none where there is no counter. Every event that changes a row changes its
    /// target's counter in the same transaction.
    pub update_at: Option<Micros>,
}

/// All targets of one kind that lie in a range of ids and have a counter; like records of others may lie there, too.
#[derive(Clone, Debug)]
pub struct Range {
    /// Their kind.
    pub kind: Kind,
    /// It begins above this id.
    pub after: TargetId,
    /// It ends with this id.
    pub until: TargetId,
    /// The targets, sorted by id.
    pub targets: Vec<Target>,
    /// Each one's `SUM(value)` over the slots of `counter`, when the range was listed.
    pub counted: Vec<i64>,
    /// How many rows of `counter` they have: one for each partition that wrote a target.
    pub rows: u64,
}

/// What a range has at one instant.
#[derive(Clone, Debug, Default)]
pub struct Recount {
    /// The targets with like records, sorted by id: how many users like each.
    pub rows: Vec<(TargetId, i64)>,
    /// The counters that changed lately, sorted by id: the newest `at` that was applied to each.
    pub changed: Vec<(TargetId, Micros)>,
}

/// Targets with like records and without a counter that a range may hold.
const UNCOUNTED_MAX: usize = 10_000;

/// The highest id that there may be.
pub const LAST: TargetId = TargetId(i64::MAX as u64);

impl Store {
    /// The next targets of `kind` that have a counter, in order of id, after `after`. Fewer than `limit` are the last ones:
    /// their range goes on to the highest id, because there may be like records without a counter.
    ///
    /// # Errors
    /// MySQL's.
    pub async fn list_range(&self, kind: Kind, metric: Metric, after: TargetId, limit: usize) -> Result<Range> {
        const ACTION: &str = "list targets";
        let mut lent = self.lend().await?;
        lent.limit(ACTION, |connection| async move {
            let mut rows = sqlx::query(
                "SELECT target_id, CAST(SUM(value) AS SIGNED), COUNT(*) FROM counter \
                 WHERE kind = ? AND target_id > ? AND metric = ? GROUP BY target_id ORDER BY target_id LIMIT ?",
            )
            .bind(kind.0)
            .bind(after.0)
            .bind(metric.0)
            .bind(limit as u64)
            .fetch(connection);
            let (mut targets, mut counted) = (Vec::with_capacity(limit), Vec::with_capacity(limit));
            let mut slots = 0_i64;
            while let Some(row) = rows.try_next().await.tried(ACTION)? {
                targets.push(Target { kind, id: TargetId(row.try_get_unchecked(0).tried(ACTION)?) });
                counted.push(row.try_get_unchecked(1).tried(ACTION)?);
                slots += row.try_get_unchecked::<i64, _>(2).tried(ACTION)?;
            }
            let until = targets.last().filter(|_| targets.len() == limit).map_or(LAST, |target| target.id);
            Ok(Range { kind, after, until, targets, counted, rows: slots.unsigned_abs() })
        })
        .await
    }

    /// Recounts a range, and reads which of its counters have an `at` after `since`, all as of one instant. None where too
    /// many targets without a counter lie there.
    ///
    /// # Errors
    /// MySQL's.
    pub async fn recount_range(&self, metric: Metric, range: &Range, since: Option<Micros>) -> Result<Option<Recount>> {
        let mut lent = self.lend().await?;
        lent.unlimited(|connection| recount_range(connection, metric, range, since)).await
    }

    /// About how many rows `counter` has, by the server's statistics.
    ///
    /// # Errors
    /// MySQL's.
    pub async fn estimate_counters(&self) -> Result<u64> {
        const ACTION: &str = "estimate the number of counters";
        let mut lent = self.lend().await?;
        lent.limit(ACTION, |connection| async move {
            let plan = sqlx::raw_sql("EXPLAIN FORMAT=TRADITIONAL SELECT COUNT(*) FROM counter")
                .fetch_one(connection)
                .await
                .tried(ACTION)?;
            let rows: Option<u64> = plan.try_get_unchecked("rows").tried(ACTION)?;
            Ok(rows.unwrap_or(0))
        })
        .await
    }

    /// The next targets of `kind` that have like records, in order of id, after `after` and up to `until`.
    ///
    /// # Errors
    /// MySQL's.
    pub async fn liked_targets(
        &self,
        kind: Kind,
        after: TargetId,
        until: TargetId,
        limit: usize,
    ) -> Result<Vec<TargetId>> {
        const ACTION: &str = "list targets with like records";
        let mut lent = self.lend().await?;
        lent.limit(ACTION, |connection| async move {
            // Grouped by the key's first columns, the server jumps from target to target ("Using index for group-by"): the
            // cost grows with the targets, not with the rows.
            let ids: Vec<u64> = sqlx::query_scalar(
                "SELECT target_id FROM like_record WHERE kind = ? AND target_id > ? AND target_id <= ? \
                 GROUP BY kind, target_id ORDER BY kind, target_id LIMIT ?",
            )
            .bind(kind.0)
            .bind(after.0)
            .bind(until.0)
            .bind(limit as u64)
            .fetch_all(connection)
            .await
            .tried(ACTION)?;
            Ok(ids.into_iter().map(TargetId).collect())
        })
        .await
    }

    /// The numbers of `targets`, sorted by key, all as of one instant. With `rows`, like records are recounted too.
    ///
    /// # Errors
    /// MySQL's.
    pub async fn truths(&self, metric: Metric, targets: &[Target], rows: bool) -> Result<HashMap<Target, Truth>> {
        let mut lent = self.lend().await?;
        lent.unlimited(|connection| read_truths(connection, metric, targets, rows)).await
    }

    /// The next counters of `kind` in order of id, after `after`, each with the newest `at` that was applied.
    ///
    /// # Errors
    /// MySQL's.
    pub async fn counted_after(
        &self,
        kind: Kind,
        metric: Metric,
        after: TargetId,
        limit: usize,
    ) -> Result<Vec<(TargetId, i64, Micros)>> {
        const ACTION: &str = "read counters";
        let mut lent = self.lend().await?;
        lent.limit(ACTION, |connection| async move {
            let mut rows = sqlx::query(
                "SELECT target_id, CAST(SUM(value) AS SIGNED), MAX(update_at) FROM counter \
                 WHERE kind = ? AND target_id > ? AND metric = ? GROUP BY target_id ORDER BY target_id LIMIT ?",
            )
            .bind(kind.0)
            .bind(after.0)
            .bind(metric.0)
            .bind(limit as u64)
            .fetch(connection);
            let mut counters = Vec::new();
            while let Some(row) = rows.try_next().await.tried(ACTION)? {
                let update_at = micros(row.try_get::<NaiveDateTime, _>(2).tried(ACTION)?);
                counters.push((TargetId(row.try_get(0).tried(ACTION)?), row.try_get(1).tried(ACTION)?, update_at));
            }
            Ok(counters)
        })
        .await
    }

    /// Adds to a target's counter what it lacked of its rows, and notes it as repair `pass`. Only while `run` holds the
    /// job.
    ///
    /// # Errors
    /// MySQL's; [`super::StoreError::TakenOver`].
    pub async fn correct_counter(&self, job: &str, run: u64, pass: u64, metric: Metric, intent: Intent) -> Result<()> {
        let Intent { target, added, .. } = intent;
        const ACTION: &str = "correct a counter";
        let mut lent = self.lend().await?;
        lent.limit(ACTION, |connection| async move {
            let mut tx = connection.begin().await.tried(ACTION)?;
            jobs::hold(&mut tx, job, run).await?;
            // Added, not set: what consumers add meanwhile stays. A new row is older than every event.
            sqlx::query(
                "INSERT INTO counter (kind, target_id, metric, slot, value, update_at) VALUES (?, ?, ?, 0, ?, '1970-01-02') \
                 ON DUPLICATE KEY UPDATE value = value + VALUES(value)",
            )
            .bind(target.kind.0)
            .bind(target.id.0)
            .bind(metric.0)
            .bind(added)
            .execute(&mut *tx)
            .await
            .tried(ACTION)?;
            repairs::note_correction(&mut tx, run, pass, metric, intent).await?;
            tx.commit().await.tried(ACTION)
        })
        .await
    }

    /// Each partition's highest committed fence, of reconciles or of those who build filters, and its holder, for `partitions`
    /// partitions.
    ///
    /// # Errors
    /// MySQL's.
    pub async fn fences(&self, of_filters: bool, partitions: u16) -> Result<Vec<(u64, Option<String>)>> {
        const ACTION: &str = "read the fences";
        let mut lent: Lent = self.lend().await?;
        let rows = lent
            .limit(ACTION, |connection| async move {
                let sql = match of_filters {
                    false => "SELECT `partition`, fence, owner FROM partition_owner WHERE `partition` < ?",
                    true => "SELECT `partition`, filter_fence, owner FROM partition_owner WHERE `partition` < ?",
                };
                sqlx::query(sql).bind(partitions).fetch_all(connection).await.tried(ACTION)
            })
            .await?;
        let mut fences = vec![(0, None); usize::from(partitions)];
        for row in rows {
            let partition: u16 = row.try_get(0).tried(ACTION)?;
            if let Some(place) = fences.get_mut(usize::from(partition)) {
                *place = (row.try_get(1).tried(ACTION)?, row.try_get(2).tried(ACTION)?);
            }
        }
        Ok(fences)
    }
}

pub(super) async fn begin_snapshot(connection: &mut MySqlConnection) -> Result<sqlx::Transaction<'_, sqlx::MySql>> {
    const ACTION: &str = "begin a snapshot";
    sqlx::query("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ").execute(&mut *connection).await.tried(ACTION)?;
    connection.begin_with("START TRANSACTION WITH CONSISTENT SNAPSHOT, READ ONLY").await.tried(ACTION)
}

async fn read_truths(
    connection: &mut MySqlConnection,
    metric: Metric,
    targets: &[Target],
    rows: bool,
) -> Result<HashMap<Target, Truth>> {
    let mut tx = begin_snapshot(connection).await?;
    let mut truths = read_counted(&mut tx, metric, targets).await?;
    if rows {
        recount(&mut tx, targets, &mut truths).await?;
    }
    tx.commit().await.tried("read counters")?;
    Ok(truths)
}

pub(super) async fn read_counted(
    connection: &mut MySqlConnection,
    metric: Metric,
    targets: &[Target],
) -> Result<HashMap<Target, Truth>> {
    const ACTION: &str = "read counters";
    let mut truths = HashMap::with_capacity(targets.len());
    for (kind, ids) in by_kind(targets) {
        for piece in in_shapes(&ids) {
            let sql = format!(
                "SELECT target_id, CAST(SUM(value) AS SIGNED), MAX(update_at) FROM counter \
                 WHERE kind = ? AND target_id IN {} AND metric = ? GROUP BY target_id",
                placeholders(1, piece.len())
            );
            let query = piece.iter().fold(sqlx::query(AssertSqlSafe(sql)).bind(kind.0), |query, id| query.bind(*id));
            let mut rows = query.bind(metric.0).fetch(&mut *connection);
            while let Some(row) = rows.try_next().await.tried(ACTION)? {
                let id = TargetId(row.try_get(0).tried(ACTION)?);
                let update_at = micros(row.try_get::<NaiveDateTime, _>(2).tried(ACTION)?);
                let counted = row.try_get(1).tried(ACTION)?;
                truths.insert(Target { kind, id }, Truth { counted, rows: None, update_at: Some(update_at) });
            }
        }
    }
    Ok(truths)
}

async fn recount(
    connection: &mut MySqlConnection,
    targets: &[Target],
    truths: &mut HashMap<Target, Truth>,
) -> Result<()> {
    const ACTION: &str = "recount like records";
    for target in targets {
        truths.entry(*target).or_default().rows = Some(0);
    }
    for (kind, ids) in by_kind(targets) {
        for piece in in_shapes(&ids) {
            let sql = format!(
                "SELECT target_id, COUNT(IF(is_del, NULL, 1)) FROM like_record \
                 WHERE kind = ? AND target_id IN {} GROUP BY target_id",
                placeholders(1, piece.len())
            );
            let query = piece.iter().fold(sqlx::query(AssertSqlSafe(sql)).bind(kind.0), |query, id| query.bind(*id));
            let mut rows = query.fetch(&mut *connection);
            while let Some(row) = rows.try_next().await.tried(ACTION)? {
                let target = Target { kind, id: TargetId(row.try_get(0).tried(ACTION)?) };
                truths.entry(target).or_default().rows = Some(row.try_get(1).tried(ACTION)?);
            }
        }
    }
    Ok(())
}

async fn recount_range(
    connection: &mut MySqlConnection,
    metric: Metric,
    range: &Range,
    since: Option<Micros>,
) -> Result<Option<Recount>> {
    const ACTION: &str = "recount like records";
    let mut tx = begin_snapshot(connection).await?;
    let mut recount = Recount::default();
    if let Some(since) = since {
        recount.changed = changed_since(&mut tx, metric, range, since).await?;
    }
    let limit = range.targets.len() + UNCOUNTED_MAX;
    // A sum of decimals and each comparison cost a tenth of the whole scan.
    let mut rows = sqlx::query(
        "SELECT target_id, COUNT(IF(is_del, NULL, 1)) FROM like_record \
         WHERE kind = ? AND target_id BETWEEN ? AND ? GROUP BY target_id ORDER BY target_id LIMIT ?",
    )
    .bind(range.kind.0)
    .bind(range.after.0 + 1)
    .bind(range.until.0)
    .bind(limit as u64)
    .fetch(&mut *tx);
    recount.rows.reserve(range.targets.len());
    while let Some(row) = rows.try_next().await.tried(ACTION)? {
        let liked = (TargetId(row.try_get_unchecked(0).tried(ACTION)?), row.try_get_unchecked(1).tried(ACTION)?);
        recount.rows.push(liked);
    }
    drop(rows);
    tx.commit().await.tried(ACTION)?;
    Ok(if recount.rows.len() < limit { Some(recount) } else { None })
}

async fn changed_since(
    connection: &mut MySqlConnection,
    metric: Metric,
    range: &Range,
    since: Micros,
) -> Result<Vec<(TargetId, Micros)>> {
    const ACTION: &str = "read what changed lately";
    let rows = sqlx::query(
        "SELECT target_id, MAX(update_at) FROM counter WHERE kind = ? AND target_id > ? AND target_id <= ? \
           AND metric = ? AND update_span >= ? AND update_at > ? GROUP BY target_id ORDER BY target_id",
    )
    .bind(range.kind.0)
    .bind(range.after.0)
    .bind(range.until.0)
    .bind(metric.0)
    .bind(Span::of(since).0)
    .bind(datetime(since))
    .fetch_all(connection)
    .await
    .tried(ACTION)?;
    let read = |row: &MySqlRow| Ok((TargetId(row.try_get(0)?), micros(row.try_get(1)?)));
    rows.iter().map(read).collect::<std::result::Result<_, sqlx::Error>>().tried(ACTION)
}

pub(super) fn target(row: &MySqlRow, column: usize) -> std::result::Result<Target, sqlx::Error> {
    Ok(Target { kind: Kind(row.try_get(column)?), id: TargetId(row.try_get(column + 1)?) })
}

fn by_kind(targets: &[Target]) -> Vec<(Kind, Vec<u64>)> {
    let runs = targets.chunk_by(|a, b| a.kind == b.kind);
    runs.filter_map(|run| Some((run.first()?.kind, run.iter().map(|target| target.id.0).collect()))).collect()
}
