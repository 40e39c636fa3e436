//! Reads the existing targets, and the targets' counters as of one instant, for a reconcile.

use std::collections::HashMap;

use chrono::NaiveDateTime;
use futures_util::TryStreamExt;
use sqlx::{AssertSqlSafe, Connection, MySqlConnection, Row};
use tallyd_core::drift::Truth;
use tallyd_core::model::{CounterKey, Kind, Metric, Target, TargetId};
use tallyd_core::outbox::OutboxLag;

use super::outbox::{self, Asked};
use super::{Context, Result, Store, StoreError, in_shapes, micros, placeholders};

impl Store {
    pub async fn estimate_counters(&self) -> Result<u64> {
        const ACTION: &str = "estimate the number of counters";
        let mut conn = self.acquire().await?;
        conn.limit(ACTION, |connection| async move {
            let plan = sqlx::raw_sql("EXPLAIN FORMAT=TRADITIONAL SELECT COUNT(*) FROM counter")
                .fetch_one(connection)
                .await
                .context(ACTION)?;
            let rows: Option<u64> = plan.try_get_unchecked("rows").context(ACTION)?;
            Ok(rows.unwrap_or(0))
        })
        .await
    }

    pub async fn estimate_targets(&self, kind: Kind) -> Result<Option<u64>> {
        const ACTION: &str = "estimate the number of targets";
        let mut conn = self.acquire().await?;
        conn.limit(ACTION, |connection| async move {
            // The key's first two columns identify a target, and all columns identify a row. So the cardinality of the
            // first two columns is the number of targets, and the largest cardinality is the number of rows.
            let sql = "SELECT CAST(MIN(IF(SEQ_IN_INDEX = 2, CARDINALITY, NULL)) AS UNSIGNED), \
                       CAST(MAX(CARDINALITY) AS UNSIGNED) FROM information_schema.STATISTICS \
                       WHERE TABLE_SCHEMA = DATABASE() AND TABLE_NAME = 'counter' AND INDEX_NAME = 'PRIMARY'";
            let row = sqlx::query(sql).fetch_one(&mut *connection).await.context(ACTION)?;
            let (targets, rows): (Option<u64>, Option<u64>) =
                (row.try_get(0).context(ACTION)?, row.try_get(1).context(ACTION)?);
            let sql = format!(
                "EXPLAIN FORMAT=TRADITIONAL SELECT 1 FROM counter FORCE INDEX (PRIMARY) WHERE kind = {}",
                kind.0
            );
            let row = sqlx::raw_sql(AssertSqlSafe(sql)).fetch_one(connection).await.context(ACTION)?;
            let of_kind: Option<u64> = row.try_get_unchecked("rows").context(ACTION)?;
            let (Some(targets), Some(rows), Some(of_kind)) = (targets, rows.filter(|rows| *rows > 0), of_kind) else {
                return Ok(None);
            };
            Ok(u64::try_from(u128::from(targets) * u128::from(of_kind.min(rows)) / u128::from(rows)).ok())
        })
        .await
    }

    /// As of one instant. `numbers` must be sorted by key. Counts the like records of the metric `recounted`.
    pub async fn truths(
        &self,
        numbers: &[CounterKey],
        recounted: Option<Metric>,
        asked: Option<Asked<'_>>,
    ) -> Result<(HashMap<CounterKey, Truth>, OutboxLag)> {
        let mut conn = self.acquire().await?;
        conn.unlimited(|connection| async move {
            let mut tx = begin_snapshot(connection).await?;
            let mut truths = read_counted(&mut tx, numbers).await?;
            if let Some(like) = recounted {
                recount(&mut tx, like, numbers, &mut truths).await?;
            }
            let lag = match asked {
                Some(asked) => outbox::read_lag(&mut tx, &asked).await?,
                None => OutboxLag::default(),
            };
            tx.commit().await.context("read counters")?;
            Ok((truths, lag))
        })
        .await
    }
}

/// Fails on a server that is not the primary, because a replica that lags could return data that is older than the
/// fence.
pub(super) async fn check_primary(connection: &mut MySqlConnection, action: &'static str) -> Result<()> {
    // Some versions of MariaDB return the setting as a word, and all other servers return it as a number.
    let sql = "SELECT CAST(CAST(@@read_only AS CHAR) IN ('0', 'OFF') AS SIGNED)";
    let is_writable: i64 = sqlx::query_scalar(sql).fetch_one(connection).await.context(action)?;
    if is_writable == 0 { Err(StoreError::ReadOnly(action)) } else { Ok(()) }
}

pub async fn begin_snapshot(connection: &mut MySqlConnection) -> Result<sqlx::Transaction<'_, sqlx::MySql>> {
    const ACTION: &str = "begin a snapshot";
    sqlx::query("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ").execute(&mut *connection).await.context(ACTION)?;
    let mut tx =
        connection.begin_with("START TRANSACTION WITH CONSISTENT SNAPSHOT, READ ONLY").await.context(ACTION)?;
    check_primary(&mut tx, ACTION).await?;
    Ok(tx)
}

/// `numbers` must be sorted by key.
pub async fn read_counted(
    connection: &mut MySqlConnection,
    numbers: &[CounterKey],
) -> Result<HashMap<CounterKey, Truth>> {
    const ACTION: &str = "read counters";
    let mut truths = HashMap::with_capacity(numbers.len());
    for (kind, ids) in by_kind(numbers.iter().map(|(target, _)| *target)) {
        for piece in in_shapes(&ids) {
            let sql = format!(
                "SELECT target_id, metric, CAST(SUM(value) AS SIGNED), MAX(update_at) FROM counter \
                 WHERE kind = ? AND target_id IN {} GROUP BY target_id, metric",
                placeholders(1, piece.len())
            );
            let query = piece.iter().fold(sqlx::query(AssertSqlSafe(sql)).bind(kind.0), |query, id| query.bind(*id));
            let mut rows = query.fetch(&mut *connection);
            while let Some(row) = rows.try_next().await.context(ACTION)? {
                let target = Target { kind, id: TargetId(row.try_get(0).context(ACTION)?) };
                let number = (target, Metric(row.try_get(1).context(ACTION)?));
                let update_at = micros(row.try_get::<NaiveDateTime, _>(3).context(ACTION)?);
                let counted = row.try_get(2).context(ACTION)?;
                if numbers.binary_search(&number).is_ok() {
                    truths.insert(number, Truth { counted, rows: None, update_at: Some(update_at) });
                }
            }
        }
    }
    Ok(truths)
}

async fn recount(
    connection: &mut MySqlConnection,
    like: Metric,
    numbers: &[CounterKey],
    truths: &mut HashMap<CounterKey, Truth>,
) -> Result<()> {
    const ACTION: &str = "recount like records";
    let likes = || numbers.iter().filter(|(_, metric)| *metric == like);
    for number in likes() {
        truths.entry(*number).or_default().rows = Some(0);
    }
    for (kind, ids) in by_kind(likes().map(|(target, _)| *target)) {
        for piece in in_shapes(&ids) {
            let sql = format!(
                "SELECT target_id, COUNT(IF(is_del, NULL, 1)) FROM like_record \
                 WHERE kind = ? AND target_id IN {} GROUP BY target_id",
                placeholders(1, piece.len())
            );
            let query = piece.iter().fold(sqlx::query(AssertSqlSafe(sql)).bind(kind.0), |query, id| query.bind(*id));
            let mut rows = query.fetch(&mut *connection);
            while let Some(row) = rows.try_next().await.context(ACTION)? {
                let target = Target { kind, id: TargetId(row.try_get(0).context(ACTION)?) };
                truths.entry((target, like)).or_default().rows = Some(row.try_get(1).context(ACTION)?);
            }
        }
    }
    Ok(())
}

/// `targets` must be sorted.
fn by_kind(targets: impl Iterator<Item = Target>) -> Vec<(Kind, Vec<u64>)> {
    let mut kinds: Vec<(Kind, Vec<u64>)> = Vec::new();
    for Target { kind, id } in targets {
        match kinds.last_mut().filter(|(last, _)| *last == kind) {
            Some((_, ids)) if ids.last() == Some(&id.0) => {}
            Some((_, ids)) => ids.push(id.0),
            None => kinds.push((kind, vec![id.0])),
        }
    }
    kinds
}
