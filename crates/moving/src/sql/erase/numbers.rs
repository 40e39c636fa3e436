//! Counts and deletes the rows that contain a target's counters.

use sqlx::{AssertSqlSafe, Row};
use tallyd_core::model::Target;

use tallyd_mysql::{Context, Result, Store};

const BY_TARGET: [&str; 4] = ["counter", "number_set", "recent_delta", "drift_seen"];

const DELETED_ROWS: u64 = 1_000;

pub async fn count_numbers(store: &Store, target: Target) -> Result<Vec<(&'static str, u64)>> {
    const ACTION: &str = "count the rows of a target";
    let mut conn = store.acquire().await?;
    // `repair` has no index by target, so this query reads several hundred thousand rows.
    conn.unlimited(|connection| async move {
        let mut counts = Vec::new();
        for table in BY_TARGET.into_iter().chain(["repair"]) {
            let sql = format!("SELECT COUNT(*) FROM {table} WHERE kind = ? AND target_id = ?");
            let query = sqlx::query_scalar(AssertSqlSafe(sql)).bind(target.kind.0).bind(target.id.0);
            let rows: i64 = query.fetch_one(&mut *connection).await.context(ACTION)?;
            counts.push((table, rows.unsigned_abs()));
        }
        Ok(counts)
    })
    .await
}

pub async fn erase_numbers(store: &Store, run: u64, target: Target) -> Result<Vec<(&'static str, u64)>> {
    const ACTION: &str = "delete the rows of a target";
    let mut counts = Vec::new();
    for table in BY_TARGET {
        let sql = format!("DELETE FROM {table} WHERE kind = ? AND target_id = ? LIMIT {DELETED_ROWS}");
        let (mut erased, mut last) = (0, DELETED_ROWS);
        while last == DELETED_ROWS {
            last = super::erase(store, ACTION, run, &sql, |query| query.bind(target.kind.0).bind(target.id.0)).await?;
            erased += last;
        }
        counts.push((table, erased));
    }
    counts.push(("repair", erase_repairs(store, run, target).await?));
    Ok(counts)
}

/// The table has no index by target, so a scan without locks finds the rows first, and a reconcile that inserts
/// rows does not wait.
async fn erase_repairs(store: &Store, run: u64, target: Target) -> Result<u64> {
    const ACTION: &str = "delete the repairs of a target";
    let mut conn = store.acquire().await?;
    let passes: Vec<(u64, u8)> = conn
        .unlimited(|connection| async move {
            let rows = sqlx::query("SELECT pass, metric FROM repair WHERE kind = ? AND target_id = ?");
            let rows = rows.bind(target.kind.0).bind(target.id.0).fetch_all(connection).await.context(ACTION)?;
            let read = |row: &sqlx::mysql::MySqlRow| Ok((row.try_get(0)?, row.try_get(1)?));
            rows.iter().map(read).collect::<std::result::Result<_, sqlx::Error>>().context(ACTION)
        })
        .await?;
    drop(conn);
    let mut erased = 0;
    for (pass, metric) in passes {
        let sql = "DELETE FROM repair WHERE pass = ? AND kind = ? AND target_id = ? AND metric = ?";
        erased += super::erase(store, ACTION, run, sql, |query| {
            query.bind(pass).bind(target.kind.0).bind(target.id.0).bind(metric)
        })
        .await?;
    }
    Ok(erased)
}
