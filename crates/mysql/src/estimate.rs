//! The number of targets by MySQL's statistics, without reading rows.

use sqlx::{AssertSqlSafe, Row};
use tallyd_core::model::Kind;

use super::{Context, Result, Store};

impl Store {
    /// Estimates how many targets of the kind have a counter; `None` where MySQL has no statistics.
    pub async fn estimate_targets(&self, kind: Kind) -> Result<Option<u64>> {
        const ACTION: &str = "estimate the number of targets";
        let mut conn = self.acquire().await?;
        conn.limit(ACTION, |connection| async move {
            // The number of different values in the key's first two columns, which are targets, and in all of them, which are rows.
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
}
