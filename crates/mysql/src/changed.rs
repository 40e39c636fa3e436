//! Which targets changed lately.

use sqlx::Row;
use sqlx::mysql::MySqlRow;
use tallyd_core::model::{CounterKey, Kind, Metric, Micros, Target, TargetId};

use super::{Context, Result, Store, datetime, target};

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
}
