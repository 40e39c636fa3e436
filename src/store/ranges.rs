//! Ranges of ids, in which a run looks at every target: listed, then counted as of one instant.

use chrono::NaiveDateTime;
use futures_util::TryStreamExt;
use sqlx::mysql::MySqlRow;
use sqlx::{MySqlConnection, Row};

use super::changed::Span;
use super::counters::begin_snapshot;
use super::outbox::{self, Since};
use super::{Result, Store, Tried, datetime, micros};
use crate::marks::Marks;
use crate::model::{Kind, Metric, Micros, Target, TargetId};

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
    /// Sorted by id: how many users like each target with like records; of other metrics what `counter` says.
    pub rows: Vec<(TargetId, i64)>,
    /// The counters that changed lately, sorted by id: the newest `at` that was applied to each.
    pub changed: Vec<(TargetId, Micros)>,
    /// Of a metric that the daemons add to Redis: what followed the rows of the outboxes that were there before the samples.
    pub since: Since,
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

    /// Reads a range's numbers of a metric of which `counter` is the truth, and which of them have an `at` after `since`, all as of one
    /// instant; and the rows of the outboxes after `applied`, where that is asked for.
    ///
    /// # Errors
    /// MySQL's.
    pub async fn count_range(
        &self,
        metric: Metric,
        range: &Range,
        since: Option<Micros>,
        applied: Option<&Marks>,
    ) -> Result<Recount> {
        const ACTION: &str = "read counters";
        let mut lent = self.lend().await?;
        lent.unlimited(|connection| async move {
            let mut tx = begin_snapshot(connection).await?;
            let mut recount = Recount { rows: Vec::with_capacity(range.targets.len()), ..Recount::default() };
            let mut rows = sqlx::query(
                "SELECT target_id, CAST(SUM(value) AS SIGNED), MAX(update_at) FROM counter \
                 WHERE kind = ? AND target_id BETWEEN ? AND ? AND metric = ? GROUP BY target_id ORDER BY target_id",
            )
            .bind(range.kind.0)
            .bind(range.after.0 + 1)
            .bind(range.until.0)
            .bind(metric.0)
            .fetch(&mut *tx);
            while let Some(row) = rows.try_next().await.tried(ACTION)? {
                let id = TargetId(row.try_get_unchecked(0).tried(ACTION)?);
                let update_at = micros(row.try_get::<NaiveDateTime, _>(2).tried(ACTION)?);
                recount.rows.push((id, row.try_get_unchecked(1).tried(ACTION)?));
                if since.is_some_and(|since| update_at > since) {
                    recount.changed.push((id, update_at));
                }
            }
            drop(rows);
            if let Some(applied) = applied {
                recount.since = outbox::read_since(&mut tx, applied, metric).await?;
            }
            tx.commit().await.tried(ACTION)?;
            Ok(recount)
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
