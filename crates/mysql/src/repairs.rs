//! The log of every number that a reconcile changed, and how far a run has come.

use std::time::Duration;

use sqlx::{AssertSqlSafe, Connection, MySqlConnection};
use tallyd_core::model::CounterKey;

use super::{Context, Result, Store, in_shapes, jobs, placeholders};

/// A number that will be changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Intent {
    pub number: CounterKey,
    /// The number, as of the cut.
    pub before: i64,
    pub added: i64,
}

/// Rows that one statement of the pruning deletes.
const PRUNE_ROWS: u64 = 10_000;

impl Store {
    /// Notes what is about to be changed in `Redis`, as repair `pass` of `run`. Only while `run` holds the job.
    ///
    /// # Errors
    /// MySQL's; [`super::StoreError::TakenOver`].
    pub async fn note_repairs(&self, job: &str, run: u64, pass: u64, intents: &[Intent]) -> Result<()> {
        const ACTION: &str = "note repairs";
        let mut conn = self.acquire().await?;
        conn.limit(ACTION, |connection| async move {
            let mut tx = connection.begin().await.context(ACTION)?;
            jobs::hold(&mut tx, job, run).await?;
            insert(&mut tx, run, pass, "redis", None, intents).await?;
            tx.commit().await.context(ACTION)
        })
        .await
    }

    /// Notes what became of repairs of `pass`.
    pub async fn note_outcomes(&self, pass: u64, outcomes: &[(CounterKey, &'static str)]) -> Result<()> {
        const ACTION: &str = "note what became of repairs";
        let mut conn = self.acquire().await?;
        conn.limit(ACTION, |connection| async move {
            let mut tx = connection.begin().await.context(ACTION)?;
            for outcome in ["done", "below-zero", "stale"] {
                let those: Vec<CounterKey> =
                    outcomes.iter().filter(|(_, of)| *of == outcome).map(|(number, _)| *number).collect();
                for piece in in_shapes(&those) {
                    let sql = format!(
                        "UPDATE repair SET outcome = ? WHERE pass = ? AND (kind, target_id, metric) IN ({})",
                        placeholders(piece.len(), 3)
                    );
                    let mut query = sqlx::query(AssertSqlSafe(sql)).bind(outcome).bind(pass);
                    for (target, metric) in piece {
                        query = query.bind(target.kind.0).bind(target.id.0).bind(metric.0);
                    }
                    query.execute(&mut *tx).await.context(ACTION)?;
                }
            }
            tx.commit().await.context(ACTION)
        })
        .await
    }

    /// Forgets repairs that are older than `keep`.
    pub async fn prune_repairs(&self, keep: Duration) -> Result<u64> {
        const ACTION: &str = "forget old repairs";
        let mut pruned = 0;
        loop {
            let mut conn = self.acquire().await?;
            let rows = conn
                .limit(ACTION, |connection| async move {
                    sqlx::query("DELETE FROM repair WHERE repaired_at < NOW(6) - INTERVAL ? SECOND LIMIT ?")
                        .bind(keep.as_secs())
                        .bind(PRUNE_ROWS)
                        .execute(connection)
                        .await
                        .context(ACTION)
                })
                .await?
                .rows_affected();
            pruned += rows;
            if rows < PRUNE_ROWS {
                return Ok(pruned);
            }
        }
    }
}

/// Notes corrections of rows of `counter`, in their transaction.
pub(super) async fn note_corrections(
    connection: &mut MySqlConnection,
    run: u64,
    pass: u64,
    intents: &[Intent],
) -> Result<()> {
    insert(connection, run, pass, "mysql", Some("done"), intents).await
}

async fn insert(
    connection: &mut MySqlConnection,
    run: u64,
    pass: u64,
    store: &'static str,
    outcome: Option<&'static str>,
    intents: &[Intent],
) -> Result<()> {
    for piece in in_shapes(intents) {
        let group = "(?, ?, ?, ?, ?, ?, ?, ?, ?, NOW(6))";
        let sql = format!(
            "INSERT INTO repair (pass, kind, target_id, metric, store, run, before_it, added, outcome, repaired_at) \
             VALUES {}",
            vec![group; piece.len()].join(", ")
        );
        let mut query = sqlx::query(AssertSqlSafe(sql));
        for Intent { number: (target, metric), before, added } in piece {
            query = query.bind(pass).bind(target.kind.0).bind(target.id.0).bind(metric.0).bind(store).bind(run);
            query = query.bind(*before).bind(*added).bind(outcome);
        }
        query.execute(&mut *connection).await.context("note repairs")?;
    }
    Ok(())
}
