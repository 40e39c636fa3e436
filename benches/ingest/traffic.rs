//! Reads the traffic between a writer and MySQL from the server's counters.

use anyhow::{Context, Result};
use serde::Serialize;
use sqlx::{MySqlPool, Row};

/// The server's counters, or their increase during a measurement.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Traffic {
    /// Statements. Each statement needs a round trip, unless several statements are sent together.
    pub statements: f64,
    /// The number of bytes sent in both directions.
    pub bytes: f64,
}

impl Traffic {
    /// Reads the server's counters. The counters include all clients, so no other client must use the server during a
    /// measurement.
    pub async fn of_server(pool: &MySqlPool) -> Result<Self> {
        let rows =
            sqlx::query("SHOW GLOBAL STATUS WHERE Variable_name IN ('Questions', 'Bytes_received', 'Bytes_sent')");
        let mut traffic = Self::default();
        for row in rows.fetch_all(pool).await.context("read MySQL's status counters")? {
            let (name, value): (String, String) = (row.try_get(0)?, row.try_get(1)?);
            let value: f64 = value.parse().with_context(|| format!("read {name}"))?;
            *(if name == "Questions" { &mut traffic.statements } else { &mut traffic.bytes }) += value;
        }
        Ok(traffic)
    }

    /// Returns the traffic since `before` for one event or one batch. `each` is the number of events or batches.
    pub fn since(self, before: Self, each: u64) -> Self {
        let per = |now: f64, then: f64| (now - then) / each.max(1) as f64;
        Self { statements: per(self.statements, before.statements), bytes: per(self.bytes, before.bytes) }
    }
}

/// Returns the bytes on disk for each row of a table, calculated from MySQL's count of the table's pages.
pub async fn row_bytes(pool: &MySqlPool, table: &str) -> Result<f64> {
    sqlx::query(sqlx::AssertSqlSafe(format!("ANALYZE TABLE {table}"))).fetch_all(pool).await?;
    let sql = format!(
        "SELECT CAST(data_length + index_length AS DOUBLE) / (SELECT GREATEST(COUNT(*), 1) FROM {table}) \
         FROM information_schema.tables WHERE table_schema = DATABASE() AND table_name = '{table}'"
    );
    Ok(sqlx::query_scalar(sqlx::AssertSqlSafe(sql)).fetch_one(pool).await?)
}
