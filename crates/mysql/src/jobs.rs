//! Who runs a job, since when, and how the last runs ended. A job runs once over all daemons and shells.
//!
//! The lease is a hint (a frozen holder comes back after it); what must hold is fenced: a write checks, in its own
//! transaction, that `job_lock` still names its run.

use std::hash::{BuildHasher, RandomState};
use std::sync::LazyLock;
use std::time::Duration;

use chrono::NaiveDateTime;
use sqlx::{Connection, MySqlConnection, Row};
use tallyd_core::model::Micros;

use super::{Context, Result, Store, StoreError, datetime, micros};

/// How long a lease lasts without being renewed.
pub const LEASE: Duration = Duration::from_secs(30);

/// A lease that ends later is void: the clock was put back since. More than a lease, because the clocks of servers differ.
pub(super) const LEASE_MAX: Duration = Duration::from_secs(60);

/// A random number of this process. A failover that lost commits can give the number of a run to two processes.
static TOKEN: LazyLock<u64> = LazyLock::new(|| RandomState::new().hash_one(std::process::id()));

/// A run may number so many fences, watches and repairs of its own (2^24): number = run * 2^24 + n, so that numbers grow
/// from run to run, and each names its run.
const NUMBERS_BITS: u32 = 24;

/// The `n`th number of a run.
pub fn number_of(run: u64, n: u64) -> u64 {
    (run << NUMBERS_BITS) | (n & ((1 << NUMBERS_BITS) - 1))
}

/// The run that a number belongs to.
pub fn run_of(number: u64) -> u64 {
    number >> NUMBERS_BITS
}

/// The answer to "may I run?".
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Lock {
    /// Yes, as this run.
    Taken(u64),
    /// Not now: that one does.
    Held {
        /// Who runs it: host and process.
        owner: String,
        /// When its lease ends unless it is renewed, in seconds.
        lease_s: i64,
    },
}

/// What became of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// All was done.
    Done,
    /// It stays due.
    Failed,
    /// It would have changed too much: not due before its time comes again.
    LimitExceeded,
    /// It can't be done before a person has mended something: not due before its time comes again.
    Refused,
    /// It was told to stop, or its time was over. It stays due.
    Stopped,
    /// It only looked. What is due stays due.
    DryRun,
}

impl Outcome {
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
    /// Takes the job's lock for [`LEASE`] and notes the run's start.
    pub async fn take_job(&self, job: &str, mode: &str, owner: &str) -> Result<Lock> {
        let mut conn = self.acquire().await?;
        conn.limit("take the job's lock", |connection| take(connection, job, mode, owner)).await
    }

    /// Makes the lease last from now.
    ///
    /// # Errors
    /// [`StoreError::TakenOver`] when the lease ran out and another run has begun; MySQL's.
    pub async fn renew_job(&self, job: &str, run: u64) -> Result<()> {
        let mut conn = self.acquire().await?;
        conn.limit("renew the job's lease", |connection| async move {
            hold(connection, job, run).await?;
            sqlx::query("UPDATE job_run SET heartbeat_at = NOW(6) WHERE run = ?")
                .bind(run)
                .execute(connection)
                .await
                .context("note that the run is alive")?;
            Ok(())
        })
        .await
    }

    /// Notes the run's end and gives the lock back. `cut` is what a reconcile has compared up to.
    pub async fn finish_job(
        &self,
        job: &str,
        run: u64,
        outcome: Outcome,
        cut: Option<Micros>,
        report: &str,
    ) -> Result<()> {
        let mut conn = self.acquire().await?;
        conn.limit("note the run's end", |connection| async move {
            sqlx::query("UPDATE job_run SET finished_at = NOW(6), outcome = ?, cut = ?, report = ? WHERE run = ?")
                .bind(outcome.name())
                .bind(cut.map(datetime))
                .bind(report)
                .bind(run)
                .execute(&mut *connection)
                .await
                .context("note the run's end")?;
            // Long ago by any clock: this one can be put back.
            sqlx::query("UPDATE job_lock SET lease_until = '1970-01-02' WHERE job = ? AND run = ? AND token = ?")
                .bind(job)
                .bind(run)
                .bind(*TOKEN)
                .execute(connection)
                .await
                .context("give the job's lock back")?;
            Ok(())
        })
        .await
    }

    /// Notes that the run is alive, and gives the time that was noted.
    pub async fn stamp(&self, run: u64) -> Result<Micros> {
        const ACTION: &str = "note that the run is alive";
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

    /// The newest time that was noted of the run, as this server knows it: a replica may be behind.
    pub async fn stamp_seen(&self, run: u64) -> Result<Option<Micros>> {
        let mut conn = self.acquire().await?;
        conn.limit("look whether the run is alive", |connection| read_stamp(connection, run)).await
    }

    /// Up to where, by Redis' clock, any run of the job has compared everything in that layout; none where none has. What is later
    /// than `now` is void: the clock was ahead then.
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

    /// When the last run of this mode began that was done in full, or is not to be tried again before its time. One that began in the
    /// future says nothing: the clock was ahead then.
    pub async fn last_done(&self, job: &str, mode: &str) -> Result<Option<Micros>> {
        const SQL: &str = "SELECT started_at FROM job_run WHERE job = ? AND mode = ? \
                           AND outcome IN ('done', 'braked', 'refused') AND started_at <= NOW(6) ORDER BY finished_at DESC LIMIT 1";
        self.time_of_run(SQL, job, mode).await
    }

    /// When the last run of this mode ended that was done; none where none ever was.
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

    /// Forgets runs of one mode that are over for longer than `keep`, some thousand of them at most. The last one of each outcome stays: it
    /// says what is due, and where to go on.
    pub async fn forget_runs(&self, job: &str, mode: &str, keep: Duration) -> Result<()> {
        const ACTION: &str = "forget old runs";
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

/// Holds the job's row until the transaction ends, if it still names `run`, and makes the lease last from now: first in every
/// transaction of a job that writes what must not be written twice. By writing to it, as `partitions` says.
///
/// # Errors
/// [`StoreError::TakenOver`] when another run has begun; MySQL's.
pub async fn hold(connection: &mut MySqlConnection, job: &str, run: u64) -> Result<()> {
    const SQL: &str = "UPDATE job_lock SET writes = writes + 1, lease_until = NOW(6) + INTERVAL ? SECOND \
                       WHERE job = ? AND run = ? AND token = ?";
    let held = sqlx::query(SQL)
        .bind(LEASE.as_secs())
        .bind(job)
        .bind(run)
        .bind(*TOKEN)
        .execute(connection)
        .await
        .context("check the job's lock")?;
    if held.rows_affected() == 0 { Err(taken_over(job)) } else { Ok(()) }
}

async fn read_stamp(connection: &mut MySqlConnection, run: u64) -> Result<Option<Micros>> {
    let stamp: Option<Option<NaiveDateTime>> = sqlx::query_scalar("SELECT heartbeat_at FROM job_run WHERE run = ?")
        .bind(run)
        .fetch_optional(connection)
        .await
        .context("read when the run was last alive")?;
    Ok(stamp.flatten().map(micros))
}

async fn take(connection: &mut MySqlConnection, job: &str, mode: &str, owner: &str) -> Result<Lock> {
    const ACTION: &str = "take the job's lock";
    const GIVE: &str =
        "UPDATE job_lock SET run = ?, owner = ?, token = ?, lease_until = NOW(6) + INTERVAL ? SECOND WHERE job = ?";
    let mut tx = connection.begin().await.context(ACTION)?;
    // The row first, so that two that come at once wait for each other instead of both finding none.
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
        .context("note the run's start")?;
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

/// The run that held the lock before, if it never said how it ended: its process died, or hangs, and if it ever wakes up its writes are void.
async fn close(connection: &mut MySqlConnection, run: u64) -> Result<()> {
    sqlx::query(
        "UPDATE job_run SET finished_at = COALESCE(heartbeat_at, started_at), outcome = 'failed', report = ? \
         WHERE run = ? AND finished_at IS NULL",
    )
    .bind(r#"{"error":"its process ended, or could not tell MySQL that it lives"}"#)
    .bind(run)
    .execute(connection)
    .await
    .context("note that a run has died")
    .map(drop)
}

fn taken_over(job: &str) -> StoreError {
    StoreError::TakenOver(format!("the job {job}"))
}
