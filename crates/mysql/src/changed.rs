//! Selects the counters that the next `changed` reconcile compares. The reconcile compares the hints first, and then
//! the counters that changed recently. A hint is a counter with late events, or a counter in which an earlier run found
//! drift (a difference between Redis and MySQL; decision 0035).

use chrono::NaiveDateTime;
use sqlx::mysql::MySqlRow;
use sqlx::{AssertSqlSafe, MySqlConnection, Row};
use tallyd_core::model::{CounterKey, Kind, Metric, Micros, Target, TargetId};

use super::{Context, Result, Store, datetime, in_shapes, micros, placeholders, target};

/// The maximum number of hints in the table. One run compares at most `HINTS_MAX / 2` hints.
const HINTS_MAX: usize = 10_000;

const KEEP: &str = "record hints of drifts";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChangedBefore {
    pub span: Span,
    pub number: CounterKey,
}

impl ChangedBefore {
    pub const NEWEST: Self = Self {
        span: Span(u32::MAX as u64),
        number: (Target { kind: Kind(u8::MAX), id: TargetId(u64::MAX) }, Metric(u8::MAX)),
    };
}

/// The number of five-minute spans since the epoch, as in the column `update_span`. With an index on `update_at`, every
/// change of a counter would move an index entry (docs/performance.md).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Span(pub u64);

impl Span {
    const MICROS: u64 = 5 * 60 * 1_000_000;

    pub fn of(at: Micros) -> Self {
        Self(u64::try_from(at.0).unwrap_or(0) / Self::MICROS)
    }
}

impl Store {
    /// A counter with several slots can appear more than once. The newest rows come first: a row that changes meanwhile
    /// moves to a page that was already read, so the list ends, and begins with the counters that change constantly.
    pub async fn changed_numbers(
        &self,
        since: Micros,
        before: ChangedBefore,
        limit: usize,
    ) -> Result<Vec<ChangedBefore>> {
        const ACTION: &str = "list changed counters";
        let mut conn = self.acquire().await?;
        conn.limit(ACTION, |connection| async move {
            // Each alternative of the OR compares `update_span`. So MySQL can start to read the index at the entry
            // where the last page ended.
            let rows = sqlx::query(
                "SELECT CAST(update_span AS UNSIGNED), kind, target_id, metric FROM counter \
                 WHERE update_at >= ? AND ((update_span >= ? AND update_span < ?) \
                   OR (update_span = ? AND kind < ?) \
                   OR (update_span = ? AND kind = ? AND target_id < ?) \
                   OR (update_span = ? AND kind = ? AND target_id = ? AND metric < ?)) \
                 ORDER BY update_span DESC, kind DESC, target_id DESC, metric DESC LIMIT ?",
            );
            let ChangedBefore { span: Span(span), number: (Target { kind, id }, metric) } = before;
            let rows = rows.bind(datetime(since)).bind(Span::of(since).0).bind(span);
            let rows = rows.bind(span).bind(kind.0);
            let rows = rows.bind(span).bind(kind.0).bind(id.0);
            let rows = rows.bind(span).bind(kind.0).bind(id.0).bind(metric.0);
            let rows = rows.bind(limit as u64).fetch_all(connection).await.context(ACTION)?;
            let read = |row: &MySqlRow| {
                Ok(ChangedBefore { span: Span(row.try_get(0)?), number: (target(row, 1)?, Metric(row.try_get(3)?)) })
            };
            rows.iter().map(read).collect::<std::result::Result<_, sqlx::Error>>().context(ACTION)
        })
        .await
    }

    pub async fn keep_drift_seen(&self, seen: &[(CounterKey, i64)]) -> Result<u64> {
        let mut conn = self.acquire().await?;
        conn.limit(KEEP, |connection| keep_hints(connection, seen)).await
    }

    pub async fn drift_seen(&self, limit: usize) -> Result<Vec<(CounterKey, Micros)>> {
        const ACTION: &str = "read hints of drifts";
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

    pub async fn forget_drift_seen(&self, seen: &[(CounterKey, Micros)]) -> Result<()> {
        const ACTION: &str = "delete hints of drifts";
        let Some(newest) = seen.iter().map(|(_, at)| *at).max() else { return Ok(()) };
        let mut conn = self.acquire().await?;
        conn.limit(ACTION, |connection| async move {
            for piece in in_shapes(seen) {
                let sql = format!(
                    "DELETE FROM drift_seen WHERE seen_at <= ? AND (kind, target_id, metric) IN ({})",
                    placeholders(piece.len(), 3)
                );
                let mut query = sqlx::query(AssertSqlSafe(sql)).bind(datetime(newest));
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

pub async fn last_reconcile(connection: &mut MySqlConnection) -> Result<Option<Micros>> {
    const ACTION: &str = "read when the last reconcile began";
    let sql = "SELECT started_at FROM job_run WHERE job = 'reconcile' ORDER BY run DESC LIMIT 1";
    let began: Option<NaiveDateTime> = sqlx::query_scalar(sql).fetch_optional(connection).await.context(ACTION)?;
    Ok(began.map(micros))
}

pub async fn keep_hints(connection: &mut MySqlConnection, seen: &[(CounterKey, i64)]) -> Result<u64> {
    // Hints that are already in the table need no space. These hints get a new time, so a run that has just checked the
    // counters does not delete the hints.
    for piece in in_shapes(seen) {
        let sql = format!(
            "UPDATE drift_seen SET seen_at = NOW(6) WHERE (kind, target_id, metric) IN ({})",
            placeholders(piece.len(), 3)
        );
        let mut query = sqlx::query(AssertSqlSafe(sql));
        for ((target, metric), _) in piece {
            query = query.bind(target.kind.0).bind(target.id.0).bind(metric.0);
        }
        query.execute(&mut *connection).await.context(KEEP)?;
    }
    let kept: i64 =
        sqlx::query_scalar("SELECT COUNT(*) FROM drift_seen").fetch_one(&mut *connection).await.context(KEEP)?;
    let room = HINTS_MAX.saturating_sub(usize::try_from(kept).unwrap_or(HINTS_MAX));
    // Callers sort the hints, so two transactions do not deadlock.
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
        query.execute(&mut *connection).await.context(KEEP)?;
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
        let known = query.fetch_one(&mut *connection).await.context(KEEP)?;
        without_room = without_room.saturating_sub(known.unsigned_abs());
    }
    Ok(without_room)
}
