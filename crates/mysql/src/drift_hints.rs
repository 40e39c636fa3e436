//! Targets at which the next `changed` reconcile looks first.

use chrono::NaiveDateTime;
use sqlx::mysql::MySqlRow;
use sqlx::{AssertSqlSafe, MySqlConnection, Row};
use tallyd_core::model::{CounterKey, Metric, Micros};

use super::{Context, Result, Store, in_shapes, micros, placeholders, target};

/// Targets that are kept at most: a run looks at half as many first of all.
const KEPT_MAX: usize = 10_000;

impl Store {
    /// Keeps numbers, each with by how much Redis is off where that is known, as many as there is room for. Says for how many there was
    /// none.
    pub async fn keep_drift_seen(&self, seen: &[(CounterKey, i64)]) -> Result<u64> {
        let mut conn = self.acquire().await?;
        conn.limit(ACTION, |connection| keep(connection, seen)).await
    }

    /// Up to `limit` of the numbers that are kept, those that were seen first, sorted by key, with the time at which each
    /// was seen last.
    pub async fn drift_seen(&self, limit: usize) -> Result<Vec<(CounterKey, Micros)>> {
        const ACTION: &str = "read which drifts were seen";
        let mut conn = self.acquire().await?;
        conn.limit(ACTION, |connection| async move {
            let rows = sqlx::query("SELECT kind, target_id, metric, seen_at FROM drift_seen ORDER BY seen_at LIMIT ?")
                .bind(limit as u64)
                .fetch_all(connection)
                .await
                .context(ACTION)?;
            let read = |row: &MySqlRow| Ok(((target(row, 0)?, Metric(row.try_get(2)?)), micros(row.try_get(3)?)));
            let mut seen: Vec<(CounterKey, Micros)> =
                rows.iter().map(read).collect::<std::result::Result<_, sqlx::Error>>().context(ACTION)?;
            seen.sort_unstable();
            Ok(seen)
        })
        .await
    }

    /// Forgets those of `seen` that were not kept again since.
    pub async fn forget_drift_seen(&self, seen: &[(CounterKey, Micros)]) -> Result<()> {
        const ACTION: &str = "forget drifts that were seen";
        let Some(newest) = seen.iter().map(|(_, at)| *at).max() else { return Ok(()) };
        let mut conn = self.acquire().await?;
        conn.limit(ACTION, |connection| async move {
            for piece in in_shapes(seen) {
                let sql = format!(
                    "DELETE FROM drift_seen WHERE seen_at <= ? AND (kind, target_id, metric) IN ({})",
                    placeholders(piece.len(), 3)
                );
                let mut query = sqlx::query(AssertSqlSafe(sql)).bind(super::datetime(newest));
                for ((target, metric), _) in piece {
                    query = query.bind(target.kind.0).bind(target.id.0).bind(metric.0);
                }
                query.execute(&mut *connection).await.context(ACTION)?;
            }
            Ok(())
        })
        .await
    }
}

const ACTION: &str = "keep drifts that were seen";

/// When the last reconcile began, if any has.
pub async fn last_reconcile(connection: &mut MySqlConnection) -> Result<Option<Micros>> {
    const ACTION: &str = "read when the last reconcile began";
    let sql = "SELECT started_at FROM job_run WHERE job = 'reconcile' ORDER BY run DESC LIMIT 1";
    let began: Option<NaiveDateTime> = sqlx::query_scalar(sql).fetch_optional(connection).await.context(ACTION)?;
    Ok(began.map(micros))
}

/// Keeps them in a transaction of the caller's. Gives for how many there was no room.
pub async fn keep(connection: &mut MySqlConnection, seen: &[(CounterKey, i64)]) -> Result<u64> {
    // Those that are there already need no room, and must not be taken for ones that were seen no more.
    for piece in in_shapes(seen) {
        let sql = format!(
            "UPDATE drift_seen SET seen_at = NOW(6) WHERE (kind, target_id, metric) IN ({})",
            placeholders(piece.len(), 3)
        );
        let mut query = sqlx::query(AssertSqlSafe(sql));
        for ((target, metric), _) in piece {
            query = query.bind(target.kind.0).bind(target.id.0).bind(metric.0);
        }
        query.execute(&mut *connection).await.context(ACTION)?;
    }
    let kept: i64 =
        sqlx::query_scalar("SELECT COUNT(*) FROM drift_seen").fetch_one(&mut *connection).await.context(ACTION)?;
    let room = KEPT_MAX.saturating_sub(usize::try_from(kept).unwrap_or(KEPT_MAX));
    // Sorted by whoever calls, so that two of them don't wait for each other.
    let (new, beyond) = seen.split_at(room.min(seen.len()));
    for piece in in_shapes(new) {
        let sql = format!(
            "INSERT INTO drift_seen (kind, target_id, metric, drift, seen_at) VALUES {} \
             ON DUPLICATE KEY UPDATE drift = VALUES(drift), seen_at = VALUES(seen_at)",
            vec!["(?, ?, ?, ?, NOW(6))"; piece.len()].join(", ")
        );
        let mut query = sqlx::query(AssertSqlSafe(sql));
        for ((target, metric), drift) in piece {
            query = query.bind(target.kind.0).bind(target.id.0).bind(metric.0).bind(drift);
        }
        query.execute(&mut *connection).await.context(ACTION)?;
    }
    let mut without_room = beyond.len() as u64;
    for piece in in_shapes(beyond) {
        let sql = format!(
            "SELECT COUNT(*) FROM drift_seen WHERE (kind, target_id, metric) IN ({})",
            placeholders(piece.len(), 3)
        );
        let mut query = sqlx::query_scalar::<_, i64>(AssertSqlSafe(sql));
        for ((target, metric), _) in piece {
            query = query.bind(target.kind.0).bind(target.id.0).bind(metric.0);
        }
        let known = query.fetch_one(&mut *connection).await.context(ACTION)?;
        without_room = without_room.saturating_sub(known.unsigned_abs());
    }
    Ok(without_room)
}
