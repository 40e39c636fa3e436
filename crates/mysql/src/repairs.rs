//! Logs every change that a reconcile or a recount makes to a counter, and corrects the table `counter`
//! (decision 0036).

use std::time::Duration;

use sqlx::{AssertSqlSafe, Connection, MySqlConnection, Row};
use tallyd_core::model::{Addition, CounterKey, Metric};
use tallyd_core::outbox::CORRECTIONS;
use tallyd_core::raised_again::{AllTooHigh, RaisedAgain, TooHigh};

use super::conn::TRIES;
use super::{Context, Result, Store, changed, in_shapes, jobs, outbox, placeholders, target};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Intent {
    pub number: CounterKey,
    pub before: i64,
    pub added: i64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RedisFollows {
    /// The daemon adds the correction to Redis from the outbox of corrections.
    Outbox,
    /// The next `changed` reconcile compares these counters before all others, and repairs Redis.
    NextReconcile,
    /// The same run later compares Redis with MySQL, and repairs Redis.
    SameRun,
}

/// The maximum number of corrections in one transaction. This number is small because consumers wait for the
/// transaction's locks.
pub const CORRECTIONS_MAX: usize = 100;

/// The outcome of a repair that a run planned but did not make, because a writer changes counters without events.
pub const HELD: &str = "held";

/// The maximum number of rows that the query for lowered counters returns. These rows need a few MiB of memory. A
/// reconcile needs only a hundred of these rows to find out whether API servers raise lowered counters again.
const TOO_HIGH_MAX: u64 = 100_000;

const PRUNE_ROWS: u64 = 10_000;

impl Store {
    pub async fn note_repairs(&self, job: &str, run: u64, pass: u64, intents: &[Intent]) -> Result<()> {
        const ACTION: &str = "record repairs";
        let mut conn = self.acquire().await?;
        conn.limit(ACTION, |connection| async move {
            let mut tx = connection.begin().await.context(ACTION)?;
            jobs::require_lock(&mut tx, job, run).await?;
            insert(&mut tx, run, pass, "redis", None, intents).await?;
            tx.commit().await.context(ACTION)
        })
        .await
    }

    pub async fn note_outcomes(&self, pass: u64, outcomes: &[(CounterKey, &'static str)]) -> Result<()> {
        const ACTION: &str = "record the outcomes of repairs";
        let mut conn = self.acquire().await?;
        conn.limit(ACTION, |connection| async move {
            let mut tx = connection.begin().await.context(ACTION)?;
            for outcome in ["done", "below-zero", "stale", HELD] {
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

    /// Only runs that compared all or all changed counters, and that completed or ended because of a safety limit.
    pub async fn raised_again(&self, run: u64) -> Result<RaisedAgain> {
        const ACTION: &str = "read the counters that the last runs lowered";
        let mut conn = self.acquire().await?;
        conn.limit(ACTION, |connection| async move {
            let runs: Vec<u64> = sqlx::query_scalar(
                "SELECT run FROM job_run WHERE job = 'reconcile' AND run < ? AND mode IN ('changed', 'full', 'rebuild') \
                 AND outcome IN ('done', 'braked') ORDER BY run DESC LIMIT 2",
            )
            .bind(run)
            .fetch_all(&mut *connection)
            .await
            .context(ACTION)?;
            let mut found = Vec::new();
            for run in runs {
                found.push(too_high(connection, run).await?);
            }
            let mut found = found.into_iter();
            let last = found.next().unwrap_or_default();
            Ok(RaisedAgain::new(&found.next().unwrap_or_default(), last))
        })
        .await
    }

    /// In one transaction, which also ensures that Redis gets the corrections. The intents must be sorted by key, at
    /// most [`CORRECTIONS_MAX`]. Returns the number of counters for which the table of hints had no room.
    pub async fn correct_counters(
        &self,
        (job, run, pass): (&str, u64, u64),
        follows: RedisFollows,
        intents: &[Intent],
    ) -> Result<u64> {
        const ACTION: &str = "correct counters";
        // This function cannot use `tried`, because the future of `tried` is not `Send` for every lifetime, and the
        // scheduler's jobs can move to another thread.
        let mut tries = 1;
        loop {
            let mut conn = self.acquire().await?;
            let corrected =
                conn.limit(ACTION, |connection| correct(connection, (job, run, pass), follows, intents)).await;
            match corrected {
                Err(error) if (error.is_contention() || error.is_lock_timeout()) && tries < TRIES => tries += 1,
                corrected => return corrected,
            }
        }
    }

    pub async fn prune_repairs(&self, keep: Duration) -> Result<u64> {
        const ACTION: &str = "delete old repairs";
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

async fn too_high(connection: &mut MySqlConnection, run: u64) -> Result<AllTooHigh> {
    const ACTION: &str = "read the counters that the last runs lowered";
    // A pass's number contains the run's number, so the query finds the run's rows by their key.
    let rows = sqlx::query(
        "SELECT kind, target_id, metric, added, outcome = ? FROM repair WHERE pass BETWEEN ? AND ? \
         AND store = 'redis' AND added < 0 AND outcome IN ('done', ?) ORDER BY pass LIMIT ?",
    )
    .bind(HELD)
    .bind(jobs::number_of(run, 0))
    .bind(jobs::number_of(run, u64::MAX))
    .bind(HELD)
    .bind(TOO_HIGH_MAX)
    .fetch_all(connection)
    .await
    .context(ACTION)?;
    let mut found = AllTooHigh::new();
    for row in &rows {
        let number = (target(row, 0).context(ACTION)?, Metric(row.try_get(2).context(ACTION)?));
        let by = row.try_get::<i64, _>(3).context(ACTION)?.unsigned_abs();
        let is_left: bool = row.try_get(4).context(ACTION)?;
        found.insert(number, TooHigh { by, left: if is_left { by } else { 0 } });
    }
    Ok(found)
}

async fn correct(
    connection: &mut MySqlConnection,
    (job, run, pass): (&str, u64, u64),
    follows: RedisFollows,
    intents: &[Intent],
) -> Result<u64> {
    const ACTION: &str = "correct counters";
    let mut tx = connection.begin().await.context(ACTION)?;
    jobs::require_lock(&mut tx, job, run).await?;
    for piece in in_shapes(intents) {
        // The statement adds to the value instead of setting it. So the statement does not overwrite concurrent
        // additions by consumers. A new row gets a time that is earlier than the time of every event.
        let sql = format!(
            "INSERT INTO counter (kind, target_id, metric, slot, value, update_at) VALUES {} \
             ON DUPLICATE KEY UPDATE value = value + VALUES(value)",
            vec!["(?, ?, ?, 0, ?, '1970-01-02')"; piece.len()].join(", ")
        );
        let mut query = sqlx::query(AssertSqlSafe(sql));
        for Intent { number: (target, metric), added, .. } in piece {
            query = query.bind(target.kind.0).bind(target.id.0).bind(metric.0).bind(added);
        }
        query.execute(&mut *tx).await.context(ACTION)?;
    }
    insert(&mut tx, run, pass, "mysql", Some("done"), intents).await?;
    let without_hint = propagate_to_redis(&mut tx, follows, intents).await?;
    tx.commit().await.context(ACTION)?;
    Ok(without_hint)
}

/// Ensures that Redis gets the corrections. This function runs in the transaction that corrects `counter`. Returns the
/// number of counters that got no hint for the next reconcile.
async fn propagate_to_redis(
    connection: &mut MySqlConnection,
    follows: RedisFollows,
    intents: &[Intent],
) -> Result<u64> {
    match follows {
        RedisFollows::Outbox => {
            let addition = |Intent { number: (target, metric), added, .. }: &Intent| Addition {
                target: *target,
                metric: *metric,
                delta: *added,
            };
            let additions: Vec<Addition> = intents.iter().map(addition).collect();
            outbox::append(connection, CORRECTIONS, &additions).await?;
            Ok(0)
        }
        RedisFollows::NextReconcile => {
            let seen: Vec<(CounterKey, i64)> = intents.iter().map(|intent| (intent.number, -intent.added)).collect();
            changed::keep_hints(connection, &seen).await
        }
        RedisFollows::SameRun => Ok(0),
    }
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
        query.execute(&mut *connection).await.context("record repairs")?;
    }
    Ok(())
}
