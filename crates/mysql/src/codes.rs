//! Records the codes of kinds and metrics with their names, and checks whether a code is in use.

use std::time::Duration;

use sqlx::{AssertSqlSafe, Row};
use tallyd_core::model::{Kind, Metric};

use super::{Context, Result, Store, StoreError};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Of {
    Kinds,
    Metrics,
}

impl Of {
    pub fn section(self) -> &'static str {
        match self {
            Self::Kinds => "kinds",
            Self::Metrics => "metrics",
        }
    }

    fn table(self) -> (&'static str, &'static str) {
        match self {
            Self::Kinds => ("kind_name", "kind"),
            Self::Metrics => ("metric_name", "metric"),
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Registered {
    pub code: u8,
    pub name: String,
    /// Whether the code is marked as removed. A daemon marks a code when its configuration no longer contains the code
    /// and no row uses the code.
    pub removed: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Noted {
    New,
    Was(String),
    Removed,
}

impl Store {
    pub async fn registered(&self, of: Of) -> Result<Vec<Registered>> {
        const ACTION: &str = "read the names of codes";
        let (table, column) = of.table();
        let mut conn = self.acquire().await?;
        conn.limit(ACTION, |connection| async move {
            let sql = format!("SELECT {column}, name, removed_at IS NOT NULL FROM {table} ORDER BY {column}");
            let rows = sqlx::query(AssertSqlSafe(sql)).fetch_all(connection).await.context(ACTION)?;
            let read = |row: &sqlx::mysql::MySqlRow| {
                Ok(Registered {
                    code: row.try_get(0).context(ACTION)?,
                    name: row.try_get(1).context(ACTION)?,
                    removed: row.try_get_unchecked::<i64, _>(2).context(ACTION)? != 0,
                })
            };
            rows.iter().map(read).collect()
        })
        .await
    }

    /// Returns `false` if another process changed the code first: the caller must then check it again.
    pub async fn note_name(&self, of: Of, (code, name): (u8, &str), noted: &Noted) -> Result<bool> {
        const ACTION: &str = "record the name of a code";
        let (table, column) = of.table();
        let mut conn = self.acquire().await?;
        let done = conn.limit(ACTION, |connection| async move {
            let sql = match noted {
                Noted::New => format!("INSERT INTO {table} (name, {column}) VALUES (?, ?)"),
                // The condition on the name ensures that no other process has changed the row.
                Noted::Was(_) => {
                    format!(
                        "UPDATE {table} SET name = ?, removed_at = NULL \
                         WHERE {column} = ? AND name = ? AND removed_at IS NOT NULL"
                    )
                }
                Noted::Removed => {
                    format!(
                        "UPDATE {table} SET name = ?, removed_at = UTC_TIMESTAMP(6) WHERE {column} = ? AND name = ?"
                    )
                }
            };
            let query = sqlx::query(AssertSqlSafe(sql)).bind(name).bind(code);
            let query = match noted {
                Noted::New => query,
                Noted::Was(former) => query.bind(former),
                Noted::Removed => query.bind(name),
            };
            // The library requests the number of matching rows, so the count includes rows that the statement did not
            // change.
            Ok(query.execute(connection).await.context(ACTION)?.rows_affected() > 0)
        });
        match done.await {
            Err(error) if error.is_contention() => Ok(false),
            done => done,
        }
    }

    pub async fn rename_code(&self, of: Of, code: u8, from: &str, to: &str) -> Result<bool> {
        const ACTION: &str = "rename a code";
        let (table, column) = of.table();
        let mut conn = self.acquire().await?;
        conn.limit(ACTION, |connection| async move {
            let sql = format!("UPDATE {table} SET name = ? WHERE {column} = ? AND name = ?");
            let update = sqlx::query(AssertSqlSafe(sql)).bind(to).bind(code).bind(from);
            Ok(update.execute(connection).await.context(ACTION)?.rows_affected() > 0)
        })
        .await
    }

    pub async fn is_kind_in_use(&self, kind: Kind) -> Result<bool> {
        const ACTION: &str = "check whether a kind is in use";
        let mut conn = self.acquire().await?;
        conn.limit(ACTION, |connection| async move {
            let found: i64 = sqlx::query_scalar(
                "SELECT EXISTS (SELECT 1 FROM like_record WHERE kind = ?) OR EXISTS (SELECT 1 FROM counter WHERE kind = ?)",
            )
            .bind(kind.0)
            .bind(kind.0)
            .fetch_one(connection)
            .await
            .context(ACTION)?;
            Ok(found != 0)
        })
        .await
    }

    /// `None` after `limit`. No index begins with the metric, so the query reads the narrowest index that contains it,
    /// from the latest changes on.
    pub async fn is_metric_in_use(&self, metric: Metric, limit: Duration) -> Result<Option<bool>> {
        const ACTION: &str = "check whether a metric is in use";
        let mut conn = self.acquire().await?;
        // In MySQL and MariaDB, zero means that there is no limit.
        let limit = limit.max(Duration::from_millis(1));
        // Only MariaDB reads the first comment, and only MySQL reads the second comment.
        let sql = format!(
            "/*M! SET STATEMENT max_statement_time = {} FOR */ SELECT /*+ MAX_EXECUTION_TIME({}) */ 1 \
             FROM counter FORCE INDEX (counter_update_span) WHERE metric = {} ORDER BY update_span DESC LIMIT 1",
            limit.as_secs_f32(),
            limit.as_millis(),
            metric.0
        );
        let found = conn.limit(ACTION, |connection| async move {
            let row = sqlx::raw_sql(AssertSqlSafe(sql)).fetch_optional(connection).await.context(ACTION)?;
            Ok(Some(row.is_some()))
        });
        match found.await {
            Err(StoreError::Timeout { .. }) => Ok(None),
            Err(error) if error.is_out_of_time() => Ok(None),
            found => found,
        }
    }
}
