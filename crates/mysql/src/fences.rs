//! The fences of each partition: the last committed fence of each job, and the fences that were left in queues without
//! a consumer.
//!
//! A queue without a consumer has no events if it has as many messages as `left_fence` has confirmed rows for it. So a
//! row must never stay longer than its fence (decision 0018). These are the races:
//!
//! * A: a job publishes a fence. B: a daemon receives the fence, and commits. C: the job records the confirm. The job
//!   records the fence before A, B deletes this row, and C only changes a row that is still there.
//! * A: a server of a cluster records a fence. B: another server, which does not have this row yet, commits the batch
//!   with the fence. Both write the partition's row in `partition_owner`, so B fails and runs again.
//! * A: the broker loses its data, or MySQL returns to an older state. B: events arrive. Each consumer deletes the
//!   partition's rows before it consumes, and a job deletes them if the queue has fewer messages.
//!
//! A missing row is harmless: a job then waits for a daemon.

use std::collections::{BTreeSet, HashMap};

use sqlx::{Connection, MySqlConnection};

use super::counters::check_primary;
use super::jobs::{number_of, run_of};
use super::partitions::make_owner;
use super::text::Text;
use super::{Context, Result, Store};

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Fences {
    passed: HashMap<u16, u64>,
    /// The confirmed fences in queues without a consumer, with their partitions.
    left: BTreeSet<(u16, u64)>,
    epochs: HashMap<u16, u64>,
}

impl Fences {
    pub fn passed(&self, partition: u16) -> u64 {
        self.passed.get(&partition).copied().unwrap_or(0)
    }

    /// Returns the epoch of the partition's holder. Each session of a daemon begins a new epoch.
    pub fn epoch(&self, partition: u16) -> u64 {
        self.epochs.get(&partition).copied().unwrap_or(0)
    }

    pub fn left(&self, partition: u16) -> impl Iterator<Item = u64> {
        self.left.range((partition, 0)..=(partition, u64::MAX)).map(|(_, fence)| *fence)
    }
}

/// Records that this transaction commits all events before the fence (a job's marker in the queue). If the fence is not
/// from the job's newest run, no job passes it. The transaction has written the partition's row.
pub async fn pass(connection: &mut MySqlConnection, partition: u16, fence: u64) -> Result<()> {
    let mut text = Text::default();
    text.statement(&format!(
        "INSERT INTO partition_fence (`partition`, job, fence) SELECT {partition}, job, {fence} FROM job_lock \
         WHERE run = {run} ON DUPLICATE KEY UPDATE fence = GREATEST(fence, VALUES(fence))",
        run = run_of(fence)
    ));
    // Earlier fences of the partition are gone, too.
    text.statement(&format!("DELETE FROM left_fence WHERE `partition` = {partition} AND fence <= {fence}"));
    text.run(connection, "pass the fence").await.map(drop)
}

impl Store {
    pub async fn fences(&self, job: &'static str) -> Result<Fences> {
        const ACTION: &str = "read the fences";
        const SQL: &str = "SELECT `partition`, fence, 'passed' FROM partition_fence WHERE job = ? \
                           UNION ALL SELECT `partition`, fence, 'left' FROM left_fence WHERE is_confirmed \
                           UNION ALL SELECT `partition`, epoch, 'epoch' FROM partition_owner";
        let mut conn = self.acquire().await?;
        let rows: Vec<(u16, u64, String)> = conn
            .limit(ACTION, |connection| async move {
                check_primary(connection, ACTION).await?;
                sqlx::query_as(SQL).bind(job).fetch_all(connection).await.context(ACTION)
            })
            .await?;
        let mut fences = Fences::default();
        for (partition, number, what) in rows {
            match what.as_str() {
                "left" => drop(fences.left.insert((partition, number))),
                "passed" => drop(fences.passed.insert(partition, number)),
                _ => drop(fences.epochs.insert(partition, number)),
            }
        }
        Ok(fences)
    }

    pub async fn note_fence(&self, partition: u16, fence: u64) -> Result<()> {
        const ACTION: &str = "record a fence";
        const SQL: &str = "INSERT INTO left_fence (`partition`, fence, is_confirmed) VALUES (?, ?, FALSE) \
                           ON DUPLICATE KEY UPDATE is_confirmed = FALSE";
        let mut conn = self.acquire().await?;
        conn.limit(ACTION, |connection| async move {
            let mut tx = connection.begin().await.context(ACTION)?;
            make_owner(&mut tx, partition).await?;
            sqlx::query(SQL).bind(partition).bind(fence).execute(&mut *tx).await.context(ACTION)?;
            tx.commit().await.context(ACTION)
        })
        .await
    }

    /// Records that the broker has confirmed the fence, unless a daemon has dropped it already.
    pub async fn confirm_fence(&self, partition: u16, fence: u64) -> Result<()> {
        const ACTION: &str = "record that a fence is confirmed";
        const SQL: &str = "UPDATE left_fence SET is_confirmed = TRUE WHERE `partition` = ? AND fence = ?";
        let mut conn = self.acquire().await?;
        conn.limit(ACTION, |connection| async move {
            sqlx::query(SQL).bind(partition).bind(fence).execute(connection).await.context(ACTION).map(drop)
        })
        .await
    }

    pub async fn forget_fences(&self, partition: u16, except: Option<u64>) -> Result<()> {
        const ACTION: &str = "forget the fences that were left";
        const SQL: &str = "DELETE FROM left_fence WHERE `partition` = ? AND NOT (fence >= ? AND fence < ?)";
        let (from, until) = except.map_or((0, 0), |run| (number_of(run, 0), number_of(run + 1, 0)));
        let mut conn = self.acquire().await?;
        conn.limit(ACTION, |connection| async move {
            let query = sqlx::query(SQL).bind(partition).bind(from).bind(until);
            query.execute(connection).await.context(ACTION).map(drop)
        })
        .await
    }
}
