//! Which names the codes of kinds and metrics have had here, and whether there is anything with a code.

use std::time::Duration;

use sqlx::{AssertSqlSafe, Row};
use tallyd_core::model::{Kind, Metric};

use super::{Context, Result, Store, StoreError};

/// What a code is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Of {
    /// `[kinds]`, table `kind_name`.
    Kinds,
    /// `[metrics]`, table `metric_name`.
    Metrics,
}

impl Of {
    /// The section of config.toml.
    pub fn section(self) -> &'static str {
        match self {
            Self::Kinds => "kinds",
            Self::Metrics => "metrics",
        }
    }

    /// The table and its column.
    fn table(self) -> (&'static str, &'static str) {
        match self {
            Self::Kinds => ("kind_name", "kind"),
            Self::Metrics => ("metric_name", "metric"),
        }
    }
}

/// A code that is known in MySQL.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Registered {
    pub code: u8,
    pub name: String,
    /// A configuration was without it, and nothing had it.
    pub removed: bool,
}

/// A row that is noted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Noted {
    /// The code is new.
    New,
    /// It was gone and known by this name, and is back, by this name or another one.
    Was(String),
    /// The code is gone, and this was its name.
    Removed,
}

impl Store {
    /// The codes that are known, in their order.
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

    /// Notes what became of a code. False where somebody else was first: then it must be judged again.
    pub async fn note_name(&self, of: Of, (code, name): (u8, &str), noted: &Noted) -> Result<bool> {
        const ACTION: &str = "note the name of a code";
        let (table, column) = of.table();
        let mut conn = self.acquire().await?;
        let done = conn.limit(ACTION, |connection| async move {
            let sql = match noted {
                Noted::New => format!("INSERT INTO {table} (name, {column}) VALUES (?, ?)"),
                // The condition is what this rests on.
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
            // Rows that were found: the library asks for that.
            Ok(query.execute(connection).await.context(ACTION)?.rows_affected() > 0)
        });
        match done.await {
            Err(error) if error.is_contention() => Ok(false),
            done => done,
        }
    }

    /// Gives a code another name of the same meaning. `false` where it no longer has the name `from`.
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

    /// Whether there is a like or a number of that kind.
    pub async fn holds_kind(&self, kind: Kind) -> Result<bool> {
        const ACTION: &str = "look for a kind";
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

    /// Whether there is a number of that metric; none where that isn't known within `limit`. No index begins with the metric: the
    /// narrowest one that has it is read, those that changed last first, until one is found.
    pub async fn holds_metric(&self, metric: Metric, limit: Duration) -> Result<Option<bool>> {
        const ACTION: &str = "look for a metric";
        let mut conn = self.acquire().await?;
        // No time at all would mean any time to both.
        let limit = limit.max(Duration::from_millis(1));
        // The first comment is for MariaDB alone, the second one for MySQL.
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
