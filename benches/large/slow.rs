//! Reads the durations of the daemon's statements from MySQL's log of slow statements.

use anyhow::Result;
use serde::Serialize;
use sqlx::{AssertSqlSafe, MySqlPool};

use crate::site::Site;

/// Number of statements that are reported.
const TOLD: u32 = 5;

/// MySQL logs a statement if the statement takes at least this number of seconds.
const SECONDS_LEAST: f64 = 0.02;

/// A statement of the daemon.
#[derive(Clone, Debug, Serialize)]
pub struct Statement {
    pub ms: f64,
    /// Its beginning.
    pub sql: String,
}

/// Reads the statements that the server adds to its log of slow statements after the `Log` is created.
pub struct Log {
    pool: MySqlPool,
    account: String,
    /// The server's original settings.
    before: (String, String, f64),
}

impl Log {
    /// Starts the log. The server logs only the statements of connections that are opened after this call, such as the
    /// daemon's.
    pub async fn start(site: &Site) -> Result<Self> {
        let pool = site.world.pool.clone();
        let before: (i64, String, f64) = sqlx::query_as(
            "SELECT CAST(@@global.slow_query_log AS SIGNED), @@global.log_output, CAST(@@global.long_query_time AS DOUBLE)",
        )
        .fetch_one(&pool)
        .await?;
        let before = (before.0.to_string(), before.1, before.2);
        set(&pool, ("1", "TABLE", SECONDS_LEAST)).await?;
        sqlx::raw_sql("TRUNCATE mysql.slow_log").execute(&pool).await?;
        Ok(Self { pool, account: site.account.clone(), before })
    }

    /// Returns the longest statements, and restores the server's settings.
    pub async fn end(self) -> Result<Vec<Statement>> {
        let (on, output, seconds) = &self.before;
        set(&self.pool, (on, output, *seconds)).await?;
        let longest: Vec<(f64, String)> = sqlx::query_as(
            "SELECT CAST(TIME_TO_SEC(query_time) * 1000 AS DOUBLE), CONVERT(LEFT(sql_text, 300) USING utf8mb4) FROM mysql.slow_log \
             WHERE user_host LIKE CONCAT(?, '[%') ORDER BY query_time DESC LIMIT ?",
        )
        .bind(&self.account)
        .bind(TOLD)
        .fetch_all(&self.pool)
        .await?;
        sqlx::raw_sql("TRUNCATE mysql.slow_log").execute(&self.pool).await?;
        Ok(longest.into_iter().map(|(ms, sql)| Statement { ms, sql }).collect())
    }
}

async fn set(pool: &MySqlPool, (on, output, seconds): (&str, &str, f64)) -> Result<()> {
    let sql =
        format!("SET GLOBAL log_output = '{output}', GLOBAL long_query_time = {seconds}, GLOBAL slow_query_log = {on}");
    sqlx::raw_sql(AssertSqlSafe(sql)).execute(pool).await?;
    Ok(())
}
