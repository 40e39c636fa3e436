//! Who writes a partition, how far it has come, and what a reconcile wants to see of it.
//!
//! Each batch writes its partition's row first of all: a daemon that was paused and wakes up after a takeover finds another
//! epoch there and writes nothing. A lock alone would do on one server. Where several may be written to (Galera, group
//! replication) they don't see each other's locks: there, of two transactions that write one row, the one that commits
//! second fails, and one that has only locked it does not.

use chrono::NaiveDateTime;
use sqlx::{AssertSqlSafe, MySqlConnection, Row};
use tallyd_core::coalesce::{Pair, State};
use tallyd_core::event::LikeEvent;
use tallyd_core::model::{CounterKey, Metric, Micros};

use super::jobs::run_of;
use super::text::Text;
use super::{Context, Result, datetime, in_shapes, micros, placeholders, target};

/// The number that a partition's next rows follow.
pub(super) const LAST: &str = "GREATEST(outbox, CAST(TIMESTAMPDIFF(MICROSECOND, '1970-01-01', NOW(6)) AS UNSIGNED))";

/// What the owner's row says to the batch that has written it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ownership {
    /// Grows with each takeover.
    pub epoch: u64,
    /// The watch that a reconcile keeps on some targets now.
    pub watch: Option<u64>,
    /// The number that the next rows of the partition's outbox follow.
    pub outbox: u64,
    /// MySQL's clock.
    pub now: Micros,
    /// What is older may be gone from the ledger.
    pub ledger_floor: Micros,
}

/// Locks the partition's row until the transaction ends, by writing to it, and reads it. None where nobody ever held the
/// partition.
pub async fn lock_owner(connection: &mut MySqlConnection, partition: u16) -> Result<Option<Ownership>> {
    const ACTION: &str = "lock the partition's row";
    let mut text = Text::default();
    text.statement(&format!("UPDATE partition_owner SET batches = batches + 1 WHERE `partition` = {partition}"));
    text.statement(&format!(
        "SELECT epoch, IF(watch_until > NOW(6), watch, NULL), {LAST}, CAST(NOW(6) AS DATETIME(6)), ledger_floor \
         FROM partition_owner WHERE `partition` = {partition}"
    ));
    let rows = text.run(connection, ACTION).await?;
    let read = |row: &sqlx::mysql::MySqlRow| {
        let now = micros(row.try_get::<NaiveDateTime, _>(3)?);
        let ledger_floor = Micros(i64::from(row.try_get::<u32, _>(4)?) * 1_000_000);
        Ok(Ownership { epoch: row.try_get(0)?, watch: row.try_get(1)?, outbox: row.try_get(2)?, now, ledger_floor })
    };
    rows.first().map(read).transpose().context("read the partition's row")
}

/// Makes the partition's row where there is none, and locks it either way.
pub async fn make_owner(connection: &mut MySqlConnection, partition: u16) -> Result<()> {
    sqlx::query(
        "INSERT INTO partition_owner (`partition`, epoch, owner, taken_at, ledger_floor) \
         SELECT ?, 0, NULL, NOW(6), COALESCE(MAX(ledger_floor), 0) FROM partition_owner AS others \
         ON DUPLICATE KEY UPDATE batches = partition_owner.batches + 1",
    )
    .bind(partition)
    .execute(connection)
    .await
    .context("make the partition's row")?;
    Ok(())
}

/// Makes `owner` the partition's holder, and every earlier holder's epoch void.
pub async fn take_partition(connection: &mut MySqlConnection, partition: u16, epoch: u64, owner: &str) -> Result<()> {
    sqlx::query(
        "INSERT INTO partition_owner (`partition`, epoch, owner, taken_at) VALUES (?, ?, ?, NOW(6)) \
         ON DUPLICATE KEY UPDATE epoch = VALUES(epoch), owner = VALUES(owner), taken_at = VALUES(taken_at)",
    )
    .bind(partition)
    .bind(epoch)
    .bind(owner)
    .execute(connection)
    .await
    .context("take the partition")?;
    Ok(())
}

/// Notes that the holder of `epoch` has written and given back all it had.
pub async fn release_partition(connection: &mut MySqlConnection, partition: u16, epoch: u64) -> Result<()> {
    sqlx::query("UPDATE partition_owner SET owner = NULL WHERE `partition` = ? AND epoch = ?")
        .bind(partition)
        .bind(epoch)
        .execute(connection)
        .await
        .context("release the partition")?;
    Ok(())
}

/// Notes for the fence's job that every event before the fence is committed with this transaction. A fence that no run with a lock sent
/// is ignored.
pub async fn pass_fence(connection: &mut MySqlConnection, partition: u16, fence: u64) -> Result<()> {
    sqlx::query(
        "INSERT INTO partition_fence (`partition`, job, fence) SELECT ?, job, ? FROM job_lock WHERE run = ? \
         ON DUPLICATE KEY UPDATE fence = GREATEST(fence, VALUES(fence))",
    )
    .bind(partition)
    .bind(fence)
    .bind(run_of(fence))
    .execute(connection)
    .await
    .context("pass the fence")?;
    Ok(())
}

/// The numbers of that watch.
pub async fn watched_numbers(connection: &mut MySqlConnection, watch: u64) -> Result<Vec<CounterKey>> {
    const ACTION: &str = "read the watched targets";
    let rows = sqlx::query("SELECT kind, target_id, metric FROM watched_target WHERE watch = ?")
        .bind(watch)
        .fetch_all(connection)
        .await
        .context(ACTION)?;
    rows.iter()
        .map(|row| Ok((target(row, 0)?, Metric(row.try_get(2)?))))
        .collect::<std::result::Result<_, sqlx::Error>>()
        .context(ACTION)
}

/// Logs events of watched targets, and the states that their rows had before.
pub async fn log_watched(
    connection: &mut MySqlConnection,
    watch: u64,
    events: &[LikeEvent],
    former: &[(Pair, State)],
) -> Result<()> {
    let seen =
        events.iter().map(|event| ((event.target, event.user), State { at: event.at, liked: event.liked }, false));
    let rows: Vec<_> = seen.chain(former.iter().map(|(pair, state)| (*pair, *state, true))).collect();
    for piece in in_shapes(&rows) {
        let sql = format!(
            "INSERT INTO watched_event (watch, kind, target_id, user_id, update_at, is_del, is_former) VALUES {} \
             ON DUPLICATE KEY UPDATE watch = VALUES(watch)",
            placeholders(piece.len(), 7)
        );
        let mut query = sqlx::query(AssertSqlSafe(sql));
        for ((target, user), state, is_former) in piece {
            query = query.bind(watch).bind(target.kind.0).bind(target.id.0).bind(user.0);
            query = query.bind(datetime(state.at)).bind(!state.liked).bind(*is_former);
        }
        query.execute(&mut *connection).await.context("log watched events")?;
    }
    Ok(())
}

/// Who writes a partition.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Owner {
    pub partition: u16,
    /// Host and process; none where it was given back in order.
    pub owner: Option<String>,
    /// Grows with each takeover.
    pub epoch: u64,
    /// When the last one took it.
    pub taken_at: Micros,
}

/// How many partitions are in use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Noted {
    pub partitions: u16,
    /// The daemon that came with so many: host and process.
    pub raised_by: String,
}

impl super::Store {
    /// Who writes which partition, by their numbers; not those that nobody has ever written.
    pub async fn partition_owners(&self) -> Result<Vec<Owner>> {
        const ACTION: &str = "read who writes the partitions";
        let mut conn = self.acquire().await?;
        conn.limit(ACTION, |connection| async move {
            let rows =
                sqlx::query("SELECT `partition`, owner, epoch, taken_at FROM partition_owner ORDER BY `partition`")
                    .fetch_all(connection)
                    .await
                    .context(ACTION)?;
            let read = |row: &sqlx::mysql::MySqlRow| {
                let taken_at = micros(row.try_get::<NaiveDateTime, _>(3)?);
                Ok(Owner { partition: row.try_get(0)?, owner: row.try_get(1)?, epoch: row.try_get(2)?, taken_at })
            };
            rows.iter().map(read).collect::<std::result::Result<_, sqlx::Error>>().context(ACTION)
        })
        .await
    }

    /// How many partitions are in use; none where no daemon has ever run.
    pub async fn noted_partitions(&self) -> Result<Option<Noted>> {
        let mut conn = self.acquire().await?;
        conn.limit("read how many partitions are in use", read_noted).await
    }

    /// Notes that `partitions` are in use, unless more are, and says how many are. To be called before an event can come to any of them.
    pub async fn note_partitions(&self, partitions: u16, owner: &str) -> Result<u16> {
        const ACTION: &str = "note how many partitions are in use";
        let mut conn = self.acquire().await?;
        conn.limit(ACTION, |connection| async move {
            if let Some(noted) = read_noted(connection).await?.filter(|noted| noted.partitions >= partitions) {
                return Ok(noted.partitions);
            }
            // Two may come at once: the higher number stays. Columns are set from left to right.
            sqlx::query(
                "INSERT INTO partition_count (one, partitions, raised_at, raised_by) VALUES (1, ?, NOW(6), ?) \
                 ON DUPLICATE KEY UPDATE raised_at = IF(partitions < VALUES(partitions), VALUES(raised_at), raised_at), \
                     raised_by = IF(partitions < VALUES(partitions), VALUES(raised_by), raised_by), \
                     partitions = GREATEST(partitions, VALUES(partitions))",
            )
            .bind(partitions)
            .bind(owner)
            .execute(&mut *connection)
            .await
            .context(ACTION)?;
            Ok(read_noted(connection).await?.map_or(partitions, |noted| noted.partitions))
        })
        .await
    }
}

impl super::Store {
    /// Notes that `to` partitions are in use and no longer `from`. `false` where another number is noted.
    pub async fn lower_partitions(&self, from: u16, to: u16) -> Result<bool> {
        const ACTION: &str = "note that fewer partitions are in use";
        let mut conn = self.acquire().await?;
        conn.limit(ACTION, |connection| async move {
            let update = sqlx::query("UPDATE partition_count SET partitions = ? WHERE one = 1 AND partitions = ?");
            Ok(update.bind(to).bind(from).execute(connection).await.context(ACTION)?.rows_affected() > 0)
        })
        .await
    }
}

/// How many partitions are in use, as of the connection's transaction.
pub(super) async fn read_noted(connection: &mut MySqlConnection) -> Result<Option<Noted>> {
    const ACTION: &str = "read how many partitions are in use";
    let row = sqlx::query("SELECT partitions, raised_by FROM partition_count WHERE one = 1");
    let row = row.fetch_optional(connection).await.context(ACTION)?;
    row.map(|row| Ok(Noted { partitions: row.try_get(0)?, raised_by: row.try_get(1)? })).transpose().context(ACTION)
}
