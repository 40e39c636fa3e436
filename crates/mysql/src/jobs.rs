//! The lock and the runs of each job: which run holds the lock, when each run began, and how earlier runs ended. At any
//! time, a job has at most one run among all daemons and commands.
//!
//! The lease alone does not protect writes, because the holder's process can freeze and resume after its lease has
//! ended. A fence protects the writes: each transaction checks that `job_lock` still contains the transaction's run
//! (decision 0041).

use std::hash::{BuildHasher, RandomState};
use std::sync::LazyLock;
use std::time::Duration;

use chrono::NaiveDateTime;
use sqlx::{Connection, MySqlConnection, Row};
use tallyd_core::model::Micros;

use super::{Context, Result, Store, StoreError, datetime, micros};

/// A lease ends after this duration unless the run renews it.
pub const LEASE: Duration = Duration::from_secs(30);

/// If a lease would last longer than this from now, the daemon ignores the lease. Such a lease exists only after a
/// clock was set back. The limit is longer than a lease, because the clocks of servers differ.
pub(super) const LEASE_MAX: Duration = Duration::from_secs(60);

/// A random number that identifies this process. If a failover loses commits, two processes can have the same run
/// number. The token then distinguishes these processes.
pub(super) static TOKEN: LazyLock<u64> = LazyLock::new(|| RandomState::new().hash_one(std::process::id()));

/// A run numbers its fences, watches and repairs `(run << 24) + n`, so that a later run has higher numbers and each
/// number shows its run.
const NUMBERS_BITS: u32 = 24;

pub fn number_of(run: u64, n: u64) -> u64 {
    (run << NUMBERS_BITS) | (n & ((1 << NUMBERS_BITS) - 1))
}

pub fn run_of(number: u64) -> u64 {
    number >> NUMBERS_BITS
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Lock {
    Taken(u64),
    Held {
        owner: String,
        /// The number of seconds after which the holder's lease ends, unless the holder renews the lease.
        lease_s: i64,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RunOutcome {
    Done,
    /// The run failed. The job stays due.
    Failed,
    /// The run's changes would have exceeded a safety limit. The job is not due before its next scheduled time.
    LimitExceeded,
    /// A person must correct something before the job can succeed. The job is not due before its next scheduled time.
    Refused,
    /// The run was stopped or reached its time limit. The job stays due.
    Stopped,
    /// The run was a dry run and changed nothing. If the job was due, it stays due.
    DryRun,
}

impl RunOutcome {
    fn name(self) -> &'static str {
        match self {
            Self::Done => "done",
            Self::Failed => "failed",
            Self::LimitExceeded => "braked",
            Self::Refused => "refused",
            Self::Stopped => "stopped",
            Self::DryRun => "dry-run",
        }
    }
}

impl Store {
    pub async fn take_job(&self, job: &str, mode: &str, owner: &str) -> Result<Lock> {
        let mut conn = self.acquire().await?;
        conn.limit("acquire the job's lock", |connection| take(connection, job, mode, owner)).await
    }

    pub async fn renew_job(&self, job: &str, run: u64) -> Result<()> {
        let mut conn = self.acquire().await?;
        conn.limit("renew the job's lease", |connection| async move {
            require_lock(connection, job, run).await?;
            sqlx::query("UPDATE job_run SET heartbeat_at = NOW(6) WHERE run = ?")
                .bind(run)
                .execute(connection)
                .await
                .context("record that the run is alive")?;
            Ok(())
        })
        .await
    }

    pub async fn finish_job(
        &self,
        job: &str,
        run: u64,
        outcome: RunOutcome,
        cut: Option<Micros>,
        report: &str,
    ) -> Result<()> {
        let mut conn = self.acquire().await?;
        conn.limit("record the run's end", |connection| async move {
            sqlx::query("UPDATE job_run SET finished_at = NOW(6), outcome = ?, cut = ?, report = ? WHERE run = ?")
                .bind(outcome.name())
                .bind(cut.map(datetime))
                .bind(report)
                .bind(run)
                .execute(&mut *connection)
                .await
                .context("record the run's end")?;
            // A date in 1970 is in the past, even if someone sets the clock back.
            sqlx::query("UPDATE job_lock SET lease_until = '1970-01-02' WHERE job = ? AND run = ? AND token = ?")
                .bind(job)
                .bind(run)
                .bind(*TOKEN)
                .execute(connection)
                .await
                .context("release the job's lock")?;
            Ok(())
        })
        .await
    }

    pub async fn stamp(&self, run: u64) -> Result<Micros> {
        const ACTION: &str = "record that the run is alive";
        let mut conn = self.acquire().await?;
        conn.limit(ACTION, |connection| async move {
            sqlx::query("UPDATE job_run SET heartbeat_at = NOW(6) WHERE run = ?")
                .bind(run)
                .execute(&mut *connection)
                .await
                .context(ACTION)?;
            Ok(read_stamp(connection, run).await?.unwrap_or(Micros(0)))
        })
        .await
    }

    pub async fn stamp_seen(&self, run: u64) -> Result<Option<Micros>> {
        let mut conn = self.acquire().await?;
        conn.limit("check whether the run is alive", |connection| read_stamp(connection, run)).await
    }

    /// By Redis' clock. Ignores instants after `now`, which come from a clock that was ahead.
    pub async fn last_cut(&self, job: &str, layout: &str, now: Micros) -> Result<Option<Micros>> {
        const ACTION: &str = "read the last cut";
        const SQL: &str = "SELECT MAX(cut) FROM job_run WHERE job = ? AND outcome = 'done' AND layout = ? AND cut <= ?";
        let mut conn = self.acquire().await?;
        conn.limit(ACTION, |connection| async move {
            let query = sqlx::query_scalar(SQL).bind(job).bind(layout).bind(datetime(now));
            let cut: Option<NaiveDateTime> = query.fetch_one(connection).await.context(ACTION)?;
            Ok(cut.map(micros))
        })
        .await
    }

    /// Only completed runs, and runs that ended `braked` or `refused`. A start in the future comes from a wrong clock
    /// and is ignored.
    pub async fn last_done(&self, job: &str, mode: &str) -> Result<Option<Micros>> {
        const SQL: &str = "SELECT started_at FROM job_run WHERE job = ? AND mode = ? \
                           AND outcome IN ('done', 'braked', 'refused') AND started_at <= NOW(6) ORDER BY finished_at DESC LIMIT 1";
        self.time_of_run(SQL, job, mode).await
    }

    pub async fn last_success(&self, job: &str, mode: &str) -> Result<Option<Micros>> {
        const SQL: &str = "SELECT finished_at FROM job_run WHERE job = ? AND mode = ? \
                           AND outcome = 'done' ORDER BY finished_at DESC LIMIT 1";
        self.time_of_run(SQL, job, mode).await
    }

    async fn time_of_run(&self, sql: &'static str, job: &str, mode: &str) -> Result<Option<Micros>> {
        const ACTION: &str = "read the last run";
        let mut conn = self.acquire().await?;
        conn.limit(ACTION, |connection| async move {
            let query = sqlx::query_scalar(sql).bind(job).bind(mode);
            let time: Option<NaiveDateTime> = query.fetch_optional(connection).await.context(ACTION)?;
            Ok(time.map(micros))
        })
        .await
    }

    /// At most a thousand rows in one call. The newest row of each outcome stays: from these, the scheduler computes
    /// the next start and the position at which the next run continues.
    pub async fn forget_runs(&self, job: &str, mode: &str, keep: Duration) -> Result<()> {
        const ACTION: &str = "delete old runs";
        const SQL: &str = "DELETE FROM job_run WHERE job = ? AND mode = ? AND finished_at < NOW(6) - INTERVAL ? SECOND \
                           AND run NOT IN (SELECT run FROM (SELECT MAX(run) AS run FROM job_run \
                               WHERE job = ? AND mode = ? GROUP BY outcome) AS kept) LIMIT 1000";
        let mut conn = self.acquire().await?;
        conn.limit(ACTION, |connection| async move {
            let query = sqlx::query(SQL).bind(job).bind(mode).bind(keep.as_secs()).bind(job).bind(mode);
            query.execute(connection).await.context(ACTION).map(drop)
        })
        .await
    }
}

/// A job must call this in every transaction whose writes must not happen twice. The row is written and not only
/// locked: the header of `partitions` says why.
pub async fn require_lock(connection: &mut MySqlConnection, job: &str, run: u64) -> Result<()> {
    const SQL: &str = "UPDATE job_lock SET writes = writes + 1, lease_until = NOW(6) + INTERVAL ? SECOND \
                       WHERE job = ? AND run = ? AND token = ?";
    let renewed = sqlx::query(SQL)
        .bind(LEASE.as_secs())
        .bind(job)
        .bind(run)
        .bind(*TOKEN)
        .execute(connection)
        .await
        .context("check the job's lock")?;
    if renewed.rows_affected() == 0 { Err(taken_over(job)) } else { Ok(()) }
}

async fn read_stamp(connection: &mut MySqlConnection, run: u64) -> Result<Option<Micros>> {
    let stamp: Option<Option<NaiveDateTime>> = sqlx::query_scalar("SELECT heartbeat_at FROM job_run WHERE run = ?")
        .bind(run)
        .fetch_optional(connection)
        .await
        .context("read the time at which the run was last alive")?;
    Ok(stamp.flatten().map(micros))
}

async fn take(connection: &mut MySqlConnection, job: &str, mode: &str, owner: &str) -> Result<Lock> {
    const ACTION: &str = "acquire the job's lock";
    const GIVE: &str =
        "UPDATE job_lock SET run = ?, owner = ?, token = ?, lease_until = NOW(6) + INTERVAL ? SECOND WHERE job = ?";
    let mut tx = connection.begin().await.context(ACTION)?;
    // This statement inserts the job's row if the row is missing. If two runs begin at the same time, the second run
    // waits here for the first.
    sqlx::query(
        "INSERT INTO job_lock (job, run, owner, lease_until) VALUES (?, 0, '', '1970-01-02') \
         ON DUPLICATE KEY UPDATE job = VALUES(job)",
    )
    .bind(job)
    .execute(&mut *tx)
    .await
    .context(ACTION)?;
    let row = sqlx::query(
        "SELECT owner, CAST(CEIL(TIMESTAMPDIFF(MICROSECOND, NOW(6), lease_until) / 1000000) AS SIGNED), run \
         FROM job_lock WHERE job = ? FOR UPDATE",
    )
    .bind(job)
    .fetch_one(&mut *tx)
    .await
    .context(ACTION)?;
    let (holder, lease_s): (String, i64) = (row.try_get(0).context(ACTION)?, row.try_get(1).context(ACTION)?);
    if lease_s > 0 && lease_s.unsigned_abs() <= LEASE_MAX.as_secs() {
        return Ok(Lock::Held { owner: holder, lease_s });
    }
    close(&mut tx, row.try_get(2).context(ACTION)?).await?;
    let started = sqlx::query("INSERT INTO job_run (job, mode, owner, started_at) VALUES (?, ?, ?, NOW(6))")
        .bind(job)
        .bind(mode)
        .bind(owner)
        .execute(&mut *tx)
        .await
        .context("record the run's start")?;
    let run = started.last_insert_id();
    sqlx::query(GIVE)
        .bind(run)
        .bind(owner)
        .bind(*TOKEN)
        .bind(LEASE.as_secs())
        .bind(job)
        .execute(&mut *tx)
        .await
        .context(ACTION)?;
    tx.commit().await.context(ACTION)?;
    Ok(Lock::Taken(run))
}

/// Records the end of the previous holder's run, if that run never recorded its outcome. In this case the run's process
/// has crashed or hangs. If the process resumes, all its transactions fail.
async fn close(connection: &mut MySqlConnection, run: u64) -> Result<()> {
    sqlx::query(
        "UPDATE job_run SET finished_at = COALESCE(heartbeat_at, started_at), outcome = 'failed', report = ? \
         WHERE run = ? AND finished_at IS NULL",
    )
    .bind(r#"{"error":"its process ended, or could not renew its lease in MySQL; or the run panicked"}"#)
    .bind(run)
    .execute(connection)
    .await
    .context("record that a run has crashed")
    .map(drop)
}

fn taken_over(job: &str) -> StoreError {
    StoreError::TakenOver(format!("the job {job}"))
}
