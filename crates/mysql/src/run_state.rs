//! Data that a run records for later runs: its checkpoint, and the layouts that it found (decision 0034). Also lists
//! ended and active runs.

use std::time::Duration;

use sqlx::mysql::{MySqlArguments, MySqlRow};
use sqlx::query::Query;
use sqlx::{AssertSqlSafe, MySql, Row};
use tallyd_core::model::Micros;

use super::jobs::LEASE_MAX;
use super::{Context, Result, Store, datetime, micros};

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LastMarks {
    pub newest: Option<String>,
    /// The time since the run of this checkpoint ended or last renewed its lease.
    pub newest_age: Duration,
    pub done: Option<String>,
    pub done_age: Option<Duration>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RunRow {
    pub run: u64,
    pub mode: String,
    pub owner: String,
    pub started_at: Micros,
    pub finished_at: Micros,
    /// `done`, `failed`, `braked`, `refused` or `stopped`.
    pub outcome: String,
    pub report: String,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RunningRow {
    pub run: u64,
    pub job: String,
    pub mode: String,
    pub owner: String,
    pub started_at: Micros,
}

impl Store {
    /// Returns at most `limit` runs of one mode that ended at `since` or later, newest first. Skips dry runs.
    pub async fn ended_runs(&self, job: &str, mode: &str, since: Micros, limit: u64) -> Result<Vec<RunRow>> {
        const ACTION: &str = "read how the last runs ended";
        let mut conn = self.acquire().await?;
        conn.limit(ACTION, |connection| async move {
            let rows = sqlx::query(
                "SELECT run, mode, owner, started_at, finished_at, COALESCE(outcome, ''), COALESCE(report, '') FROM job_run \
                 WHERE job = ? AND mode = ? AND finished_at >= ? AND outcome <> 'dry-run' \
                 ORDER BY finished_at DESC LIMIT ?",
            )
            .bind(job)
            .bind(mode)
            .bind(datetime(since))
            .bind(limit)
            .fetch_all(connection)
            .await
            .context(ACTION)?;
            let read = |row: &MySqlRow| {
                Ok(RunRow {
                    run: row.try_get(0)?,
                    mode: row.try_get(1)?,
                    owner: row.try_get(2)?,
                    started_at: micros(row.try_get(3)?),
                    finished_at: micros(row.try_get(4)?),
                    outcome: row.try_get(5)?,
                    report: row.try_get(6)?,
                })
            };
            rows.iter().map(read).collect::<std::result::Result<_, sqlx::Error>>().context(ACTION)
        })
        .await
    }

    pub async fn running_jobs(&self) -> Result<Vec<RunningRow>> {
        const ACTION: &str = "read which jobs run";
        let mut conn = self.acquire().await?;
        conn.limit(ACTION, |connection| async move {
            let rows = sqlx::query(
                "SELECT job_run.job, job_run.mode, job_run.owner, job_run.started_at, job_run.run FROM job_lock \
                 JOIN job_run ON job_run.run = job_lock.run \
                 WHERE job_lock.lease_until > NOW(6) AND job_lock.lease_until <= NOW(6) + INTERVAL ? SECOND",
            )
            .bind(LEASE_MAX.as_secs())
            .fetch_all(connection)
            .await
            .context(ACTION)?;
            let read = |row: &MySqlRow| {
                Ok(RunningRow {
                    job: row.try_get(0)?,
                    mode: row.try_get(1)?,
                    owner: row.try_get(2)?,
                    started_at: micros(row.try_get(3)?),
                    run: row.try_get(4)?,
                })
            };
            rows.iter().map(read).collect::<std::result::Result<_, sqlx::Error>>().context(ACTION)
        })
        .await
    }

    /// Returns the number of reconciles that ended in the last hour and loaded buckets. The reports of the runs say
    /// whether they loaded buckets.
    pub async fn loads_of_last_hour(&self, job: &str) -> Result<u64> {
        const ACTION: &str = "count the reconciles that loaded buckets";
        const SQL: &str = "SELECT COUNT(*) FROM job_run WHERE job = ? AND finished_at > NOW(6) - INTERVAL 1 HOUR \
                           AND report LIKE '%\"buckets_loaded\":%' AND report NOT LIKE '%\"buckets_loaded\":0,%'";
        let mut conn = self.acquire().await?;
        conn.limit(ACTION, |connection| async move {
            let loads: i64 = sqlx::query_scalar(SQL).bind(job).fetch_one(connection).await.context(ACTION)?;
            Ok(loads.unsigned_abs())
        })
        .await
    }

    pub async fn note_checkpoint(&self, run: u64, checkpoint: &str) -> Result<()> {
        let sql = sqlx::query("UPDATE job_run SET checkpoint = ? WHERE run = ?").bind(checkpoint.to_owned());
        self.note_of_run("record the run's progress", sql.bind(run)).await
    }

    pub async fn last_checkpoint(
        &self,
        job: &str,
        mode: &str,
        before: u64,
        unless_done: bool,
    ) -> Result<Option<(u64, String)>> {
        const ACTION: &str = "read the last run's progress";
        let mut conn = self.acquire().await?;
        conn.limit(ACTION, |connection| async move {
            let row = sqlx::query(
                "SELECT run, checkpoint FROM job_run WHERE job = ? AND mode = ? AND run < ? AND checkpoint IS NOT NULL \
                 AND (NOT ? OR \
                      run > COALESCE((SELECT MAX(run) FROM job_run WHERE job = ? AND mode = ? AND outcome = 'done'), 0)) \
                 ORDER BY run DESC LIMIT 1",
            )
            .bind(job)
            .bind(mode)
            .bind(before)
            .bind(unless_done)
            .bind(job)
            .bind(mode)
            .fetch_optional(connection)
            .await
            .context(ACTION)?;
            row.map(|row| Ok((row.try_get(0)?, row.try_get(1)?))).transpose().context(ACTION)
        })
        .await
    }

    pub async fn last_marks(&self, job: &str, mode: &str, run: u64) -> Result<LastMarks> {
        const ACTION: &str = "read the last runs' checkpoints";
        // A run's renewal of its lease also updates the time at which the run was last alive.
        const SELECT: &str = "SELECT checkpoint, CAST(TIMESTAMPDIFF(SECOND, \
             COALESCE(finished_at, heartbeat_at, started_at), NOW(6)) AS SIGNED) \
             FROM job_run WHERE job = ? AND mode = ? AND run < ? AND checkpoint IS NOT NULL";
        let mut conn = self.acquire().await?;
        conn.limit(ACTION, |connection| async move {
            let mut found = Vec::new();
            for condition in ["", " AND outcome = 'done'"] {
                let sql = format!("{SELECT}{condition} ORDER BY run DESC LIMIT 1");
                let row: Option<(String, i64)> = sqlx::query_as(AssertSqlSafe(sql))
                    .bind(job)
                    .bind(mode)
                    .bind(run)
                    .fetch_optional(&mut *connection)
                    .await
                    .context(ACTION)?;
                found.push(row.map(|(mark, age_s)| (mark, Duration::from_secs(u64::try_from(age_s).unwrap_or(0)))));
            }
            let (done, newest) = (found.pop().flatten(), found.pop().flatten());
            Ok(LastMarks {
                newest_age: newest.as_ref().map_or(Duration::MAX, |(_, age)| *age),
                newest: newest.map(|(mark, _)| mark),
                done_age: done.as_ref().map(|(_, age)| *age),
                done: done.map(|(mark, _)| mark),
            })
        })
        .await
    }

    pub async fn forget_marks(&self, job: &str, mode: &str) -> Result<()> {
        const SQL: &str = "UPDATE job_run SET checkpoint = NULL WHERE job = ? AND mode = ? AND checkpoint IS NOT NULL";
        let sql = sqlx::query(SQL).bind(job.to_owned()).bind(mode.to_owned());
        self.note_of_run("delete the runs' checkpoints", sql).await
    }

    pub async fn last_layouts(&self, job: &str, run: u64) -> Result<Option<Vec<String>>> {
        const ACTION: &str = "read the last run's layouts";
        let mut conn = self.acquire().await?;
        conn.limit(ACTION, |connection| async move {
            let row: Option<(String, Option<String>)> = sqlx::query_as(
                "SELECT layout, also FROM job_run WHERE job = ? AND run < ? AND layout IS NOT NULL ORDER BY run DESC LIMIT 1",
            )
            .bind(job)
            .bind(run)
            .fetch_optional(connection)
            .await
            .context(ACTION)?;
            Ok(row.map(|(layout, also)| std::iter::once(layout).chain(also).collect()))
        })
        .await
    }

    pub async fn note_daemon_layouts(&self, layout: &str, also: Option<&str>) -> Result<()> {
        let sql = sqlx::query(
            "INSERT INTO partition_count (one, partitions, raised_at, raised_by, layout, also) VALUES (1, 0, NOW(6), '', ?, ?) \
             ON DUPLICATE KEY UPDATE layout = VALUES(layout), also = VALUES(also)",
        );
        let sql = sql.bind(layout.to_owned()).bind(also.map(str::to_owned));
        self.note_of_run("record the daemon's layouts", sql).await
    }

    pub async fn daemon_layouts(&self) -> Result<Vec<String>> {
        const ACTION: &str = "read the daemon's layouts";
        let mut conn = self.acquire().await?;
        conn.limit(ACTION, |connection| async move {
            let query = sqlx::query_as("SELECT layout, also FROM partition_count WHERE one = 1");
            let row: Option<(Option<String>, Option<String>)> =
                query.fetch_optional(connection).await.context(ACTION)?;
            Ok(row.into_iter().flat_map(|(layout, also)| layout.into_iter().chain(also)).collect())
        })
        .await
    }

    pub async fn note_layouts(&self, run: u64, layout: &str, also: Option<&str>) -> Result<()> {
        let sql = sqlx::query("UPDATE job_run SET layout = ?, also = ? WHERE run = ?").bind(layout.to_owned());
        self.note_of_run("record the run's layouts", sql.bind(also.map(str::to_owned)).bind(run)).await
    }

    async fn note_of_run(&self, action: &'static str, sql: Query<'_, MySql, MySqlArguments>) -> Result<()> {
        let mut conn = self.acquire().await?;
        conn.limit(action, |connection| async move { sql.execute(connection).await.context(action).map(drop) }).await
    }
}
