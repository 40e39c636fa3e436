//! Stores each partition's owner and last outbox number, and logs events while a reconcile watches targets.
//!
//! Each batch first writes its partition's row. If another daemon has taken over the partition of a frozen one, the
//! frozen daemon's batch finds a higher epoch (number of takeovers) in this row, and writes nothing (decision 0001). On
//! a single server, a lock on the row would be enough. But servers of one cluster (Galera, group replication) do not
//! know each other's locks: the second commit fails only if both transactions write the same row.

use std::time::Duration;

use chrono::NaiveDateTime;
use sqlx::{AssertSqlSafe, MySqlConnection, Row};
use tallyd_connect::fault;
use tallyd_core::coalesce::{LikeState, Pair};
use tallyd_core::event::LikeEvent;
use tallyd_core::model::{CounterKey, Metric, Micros};

use super::text::Text;
use super::{Context, Result, datetime, in_shapes, micros, placeholders, target};

/// An SQL expression. The partition's next outbox row gets the value of this expression plus one.
pub(super) const LAST: &str = "GREATEST(outbox, CAST(TIMESTAMPDIFF(MICROSECOND, '1970-01-01', NOW(6)) AS UNSIGNED))";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ownership {
    /// The epoch. Each takeover raises the epoch.
    pub epoch: u64,
    pub watch: Option<u64>,
    /// The partition's next outbox row gets this number plus one.
    pub outbox: u64,
    pub now: Micros,
    /// The floor of the ledger of applied events. Entries older than the floor are possibly deleted already.
    pub ledger_floor: Micros,
}

/// Begins a batch's transaction and locks the partition's row, in one packet (on Galera in one for each statement). The
/// result is that of [`lock_owner`]. The transaction must end with [`commit`] or [`crate::or_rollback`].
pub async fn begin(connection: &mut MySqlConnection, partition: u16, is_behind: bool) -> Result<Option<Ownership>> {
    let mut text = Text::default();
    text.statement("BEGIN");
    lock(text, connection, partition, &format!(", is_behind = {is_behind}")).await
}

/// Commits a batch. If COMMIT fails, its outcome is unknown.
pub async fn commit(connection: &mut MySqlConnection) -> Result<()> {
    const ACTION: &str = "commit a batch";
    if fault::strikes("commit") {
        // MySQL commits after the client has given up.
        let late = sqlx::raw_sql("DO SLEEP(1); COMMIT").execute(connection);
        let late = tokio::time::timeout(Duration::from_millis(100), late).await;
        return late.unwrap_or(Err(sqlx::Error::Io(std::io::ErrorKind::TimedOut.into()))).map(drop).context(ACTION);
    }
    sqlx::raw_sql("COMMIT").execute(connection).await.context(ACTION)?;
    Ok(())
}

/// Writes to the partition's row, and then reads the row. The write locks the row until the transaction ends. Returns
/// `None` if no daemon ever held the partition.
pub async fn lock_owner(connection: &mut MySqlConnection, partition: u16) -> Result<Option<Ownership>> {
    lock(Text::default(), connection, partition, "").await
}

async fn lock(
    mut text: Text,
    connection: &mut MySqlConnection,
    partition: u16,
    also: &str,
) -> Result<Option<Ownership>> {
    const ACTION: &str = "lock the partition's row";
    text.statement(&format!("UPDATE partition_owner SET batches = batches + 1{also} WHERE `partition` = {partition}"));
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

pub async fn make_owner(connection: &mut MySqlConnection, partition: u16) -> Result<()> {
    sqlx::query(
        "INSERT INTO partition_owner (`partition`, epoch, owner, taken_at, ledger_floor) \
         SELECT ?, 0, NULL, NOW(6), COALESCE(MAX(ledger_floor), 0) FROM partition_owner AS others \
         ON DUPLICATE KEY UPDATE batches = partition_owner.batches + 1",
    )
    .bind(partition)
    .execute(connection)
    .await
    .context("create the partition's row")?;
    Ok(())
}

/// Makes `owner` the partition's holder, with a new epoch. After that, the batches of earlier holders write nothing.
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
    .context("acquire the partition")?;
    Ok(())
}

pub async fn release_partition(connection: &mut MySqlConnection, partition: u16, epoch: u64) -> Result<()> {
    sqlx::query("UPDATE partition_owner SET owner = NULL WHERE `partition` = ? AND epoch = ?")
        .bind(partition)
        .bind(epoch)
        .execute(connection)
        .await
        .context("release the partition")?;
    Ok(())
}

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

pub async fn log_watched(
    connection: &mut MySqlConnection,
    watch: u64,
    events: &[LikeEvent],
    former: &[(Pair, LikeState)],
) -> Result<()> {
    let seen =
        events.iter().map(|event| ((event.target, event.user), LikeState { at: event.at, liked: event.liked }, false));
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

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Owner {
    pub partition: u16,
    pub owner: Option<String>,
    pub epoch: u64,
    pub taken_at: Micros,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Noted {
    pub partitions: u16,
    pub raised_by: String,
}

impl super::Store {
    pub async fn partition_owners(&self) -> Result<Vec<Owner>> {
        const ACTION: &str = "read the partitions' owners";
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

    /// Returns the number of batches of all partitions in which more messages waited when the last batch was written.
    pub async fn batches_behind(&self) -> Result<Option<u64>> {
        const ACTION: &str = "read whether consumers are behind";
        let mut conn = self.acquire().await?;
        conn.limit(ACTION, |connection| async move {
            let sql = "SELECT CAST(SUM(batches) AS UNSIGNED) FROM partition_owner WHERE is_behind";
            sqlx::query_scalar(sql).fetch_one(connection).await.context(ACTION)
        })
        .await
    }

    pub async fn noted_partitions(&self) -> Result<Option<Noted>> {
        let mut conn = self.acquire().await?;
        conn.limit("read how many partitions are in use", read_noted).await
    }

    /// Raises the recorded number of partitions in use to `partitions`, unless it is already higher. Returns the
    /// recorded number. The caller must do this before an event can reach a new partition (decision 0003).
    pub async fn note_partitions(&self, partitions: u16, owner: &str) -> Result<u16> {
        const ACTION: &str = "record how many partitions are in use";
        let mut conn = self.acquire().await?;
        conn.limit(ACTION, |connection| async move {
            if let Some(noted) = read_noted(connection).await?.filter(|noted| noted.partitions >= partitions) {
                return Ok(noted.partitions);
            }
            // If two daemons record different numbers at the same time, the higher number stays. MySQL assigns columns
            // from left to right, so `partitions` is assigned last.
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
    pub async fn lower_partitions(&self, from: u16, to: u16) -> Result<bool> {
        const ACTION: &str = "record that fewer partitions are in use";
        let mut conn = self.acquire().await?;
        conn.limit(ACTION, |connection| async move {
            let update = sqlx::query("UPDATE partition_count SET partitions = ? WHERE one = 1 AND partitions = ?");
            Ok(update.bind(to).bind(from).execute(connection).await.context(ACTION)?.rows_affected() > 0)
        })
        .await
    }
}

pub(super) async fn read_noted(connection: &mut MySqlConnection) -> Result<Option<Noted>> {
    const ACTION: &str = "read how many partitions are in use";
    let row = sqlx::query("SELECT partitions, raised_by FROM partition_count WHERE one = 1");
    let row = row.fetch_optional(connection).await.context(ACTION)?;
    row.map(|row| Ok(Noted { partitions: row.try_get(0)?, raised_by: row.try_get(1)? })).transpose().context(ACTION)
}
