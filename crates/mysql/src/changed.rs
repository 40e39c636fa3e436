//! Which counters the next `changed` reconcile compares: first hints, of drifts that were seen and of events that were applied late, and then
//! what changed lately.

use chrono::NaiveDateTime;
use sqlx::mysql::MySqlRow;
use sqlx::{AssertSqlSafe, MySqlConnection, Row};
use tallyd_core::model::{CounterKey, Kind, Metric, Micros, Target, TargetId};

use super::{Context, Result, Store, datetime, in_shapes, micros, placeholders, target};

/// Hints that are kept at most: a run compares half as many first of all.
const HINTS_MAX: usize = 10_000;

const KEEP: &str = "keep drifts that were seen";

/// Where the last page ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChangedBefore {
    /// The last row's `update_span`.
    pub span: Span,
    /// The last row's number.
    pub number: CounterKey,
}

impl ChangedBefore {
    /// Before the first page.
    pub const NEWEST: Self = Self {
        span: Span(u32::MAX as u64),
        number: (Target { kind: Kind(u8::MAX), id: TargetId(u64::MAX) }, Metric(u8::MAX)),
    };
}

/// Five minutes, numbered since the epoch: the column `update_span`, in which the index of what changed lately is kept.
/// An index on `update_at` itself would move an entry with every change of a counter, and tell no more.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Span(pub u64);

impl Span {
    const MICROS: u64 = 5 * 60 * 1_000_000;

    /// The span of that instant, as the column's expression has it; the first one for what is before the epoch.
    pub fn of(at: Micros) -> Self {
        Self(u64::try_from(at.0).unwrap_or(0) / Self::MICROS)
    }
}

impl Store {
    /// About how many counter rows changed since `since`: the whole span that it is in counts.
    pub async fn count_changed(&self, since: Micros) -> Result<u64> {
        const ACTION: &str = "count changed targets";
        let mut conn = self.acquire().await?;
        conn.unlimited(|connection| async move {
            let rows: i64 = sqlx::query_scalar("SELECT COUNT(*) FROM counter WHERE update_span >= ?")
                .bind(Span::of(since).0)
                .fetch_one(connection)
                .await
                .context(ACTION)?;
            Ok(rows.unsigned_abs())
        })
        .await
    }

    /// The next page of counter rows that changed since `since`, newest first: a number with several slots may come
    /// twice. Fewer than `limit` rows mean the end.
    ///
    /// Newest first, because a row that changes meanwhile moves to where the pages came from: the list ends however much
    /// changes, and begins with what changes all the time.
    pub async fn changed_numbers(
        &self,
        since: Micros,
        before: ChangedBefore,
        limit: usize,
    ) -> Result<Vec<ChangedBefore>> {
        const ACTION: &str = "list changed counters";
        let mut conn = self.acquire().await?;
        conn.limit(ACTION, |connection| async move {
            // The span in each branch: the server goes on in the index where the last page ended.
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

    /// Keeps numbers, each with by how much Redis is off where that is known, as many as there is room for. Says for how many there was
    /// none.
    pub async fn keep_drift_seen(&self, seen: &[(CounterKey, i64)]) -> Result<u64> {
        let mut conn = self.acquire().await?;
        conn.limit(KEEP, |connection| keep_hints(connection, seen)).await
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

/// When the last reconcile began, if any has.
pub async fn last_reconcile(connection: &mut MySqlConnection) -> Result<Option<Micros>> {
    const ACTION: &str = "read when the last reconcile began";
    let sql = "SELECT started_at FROM job_run WHERE job = 'reconcile' ORDER BY run DESC LIMIT 1";
    let began: Option<NaiveDateTime> = sqlx::query_scalar(sql).fetch_optional(connection).await.context(ACTION)?;
    Ok(began.map(micros))
}

/// Keeps hints in a transaction of the caller's, sorted by key. Returns for how many there was no room.
pub async fn keep_hints(connection: &mut MySqlConnection, seen: &[(CounterKey, i64)]) -> Result<u64> {
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
        query.execute(&mut *connection).await.context(KEEP)?;
    }
    let kept: i64 =
        sqlx::query_scalar("SELECT COUNT(*) FROM drift_seen").fetch_one(&mut *connection).await.context(KEEP)?;
    let room = HINTS_MAX.saturating_sub(usize::try_from(kept).unwrap_or(HINTS_MAX));
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
