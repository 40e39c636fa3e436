//! What a batch reads and writes, statement by statement. The transaction that holds them is `consumer/flush.rs`.
//!
//! Exact also when two writers share a (target, user) pair: rows that exist are locked by the read, and rows that
//! don't are inserted without an "or update", so that of two writers the second fails (1062) and runs again.

use std::collections::HashMap;

use chrono::NaiveDateTime;
use sqlx::{AssertSqlSafe, MySqlConnection, Row};

use super::{Result, Tried, datetime, in_shapes, micros, placeholders};
use crate::event::LikeEvent;
use crate::model::{Kind, Metric, Micros, Target, TargetId, UserId};

/// A row's key: (kind, target, user), in the order of the primary key.
pub type Pair = (Target, UserId);

/// A row's state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct State {
    /// Its version.
    pub at: Micros,
    /// Whether the user likes the target.
    pub liked: bool,
}

/// A counter row's difference.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Difference {
    /// The target.
    pub target: Target,
    /// What is added.
    pub delta: i64,
    /// The newest `at` that was applied.
    pub at: Micros,
}

/// What can never be applied, as it is kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeadLetter {
    /// The message's body.
    pub body: Vec<u8>,
    /// Its headers as JSON.
    pub headers: String,
    /// The reason's code.
    pub reason: &'static str,
    /// The reason as a sentence.
    pub error: String,
    /// Where it came from.
    pub queue: String,
    /// When it was refused.
    pub first_seen: Micros,
}

/// What the owner's row says to the batch that has locked it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ownership {
    /// Grows with each takeover.
    pub epoch: u64,
    /// The watch that a reconcile keeps on some targets now.
    pub watch: Option<u64>,
}

/// Locks the partition's row until the transaction ends. None where nobody ever held the partition.
///
/// # Errors
/// MySQL's.
pub async fn lock_owner(connection: &mut MySqlConnection, partition: u16) -> Result<Option<Ownership>> {
    let row = sqlx::query(
        "SELECT epoch, IF(watch_until > NOW(6), watch, NULL) FROM partition_owner WHERE `partition` = ? FOR UPDATE",
    )
    .bind(partition)
    .fetch_optional(connection)
    .await
    .tried("lock the partition's row")?;
    row.map(|row| Ok(Ownership { epoch: row.try_get(0)?, watch: row.try_get(1)? }))
        .transpose()
        .tried("read the partition's row")
}

/// Makes `owner` the partition's holder, and every earlier holder's epoch void.
///
/// # Errors
/// MySQL's.
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
    .tried("take the partition")?;
    Ok(())
}

/// Notes that the holder of `epoch` has written and given back all it had.
///
/// # Errors
/// MySQL's.
pub async fn release_partition(connection: &mut MySqlConnection, partition: u16, epoch: u64) -> Result<()> {
    sqlx::query("UPDATE partition_owner SET owner = NULL WHERE `partition` = ? AND epoch = ?")
        .bind(partition)
        .bind(epoch)
        .execute(connection)
        .await
        .tried("release the partition")?;
    Ok(())
}

/// Notes that every event before the fence is committed with this transaction. A fence that no running job sent is
/// ignored: whoever can publish could forge one.
///
/// # Errors
/// MySQL's.
pub async fn pass_fence(connection: &mut MySqlConnection, partition: u16, fence: u64, run: u64) -> Result<()> {
    sqlx::query(
        "UPDATE partition_owner SET fence = GREATEST(fence, ?) \
         WHERE `partition` = ? AND EXISTS (SELECT 1 FROM job_lock WHERE run = ?)",
    )
    .bind(fence)
    .bind(partition)
    .bind(run)
    .execute(connection)
    .await
    .tried("pass the fence")?;
    Ok(())
}

/// Reads and locks the states of `pairs`, which are sorted by key. Pairs without a row are not in the answer.
///
/// # Errors
/// MySQL's.
pub async fn old_states(connection: &mut MySqlConnection, pairs: &[Pair]) -> Result<HashMap<Pair, State>> {
    const ACTION: &str = "read the old states";
    let mut states = HashMap::with_capacity(pairs.len());
    for piece in in_shapes(pairs) {
        let sql = format!(
            "SELECT kind, target_id, user_id, is_del, update_at FROM like_record \
             WHERE (kind, target_id, user_id) IN ({}) FOR UPDATE",
            placeholders(piece.len(), 3)
        );
        let mut query = sqlx::query(AssertSqlSafe(sql));
        for (target, user) in piece {
            query = query.bind(target.kind.0).bind(target.id.0).bind(user.0);
        }
        for row in query.fetch_all(&mut *connection).await.tried(ACTION)? {
            let (pair, state) = read_state(&row).tried(ACTION)?;
            states.insert(pair, state);
        }
    }
    Ok(states)
}

fn read_state(row: &sqlx::mysql::MySqlRow) -> std::result::Result<(Pair, State), sqlx::Error> {
    let target = Target { kind: Kind(row.try_get(0)?), id: TargetId(row.try_get(1)?) };
    let state = State { liked: !row.try_get::<bool, _>(3)?, at: micros(row.try_get::<NaiveDateTime, _>(4)?) };
    Ok(((target, UserId(row.try_get(2)?)), state))
}

/// Inserts rows that [`old_states`] did not find, sorted by key.
///
/// # Errors
/// MySQL's; 1062 when another writer was first: the whole transaction runs again.
pub async fn insert_states(connection: &mut MySqlConnection, rows: &[(Pair, State)]) -> Result<()> {
    write_states(connection, rows, "").await
}

/// Writes rows that [`old_states`] has locked, sorted by key.
///
/// # Errors
/// MySQL's.
pub async fn update_states(connection: &mut MySqlConnection, rows: &[(Pair, State)]) -> Result<()> {
    write_states(connection, rows, "ON DUPLICATE KEY UPDATE is_del = VALUES(is_del), update_at = VALUES(update_at)")
        .await
}

async fn write_states(connection: &mut MySqlConnection, rows: &[(Pair, State)], on_duplicate: &str) -> Result<()> {
    for piece in in_shapes(rows) {
        let sql = format!(
            "INSERT INTO like_record (kind, target_id, user_id, is_del, update_at) VALUES {} {on_duplicate}",
            placeholders(piece.len(), 5)
        );
        let mut query = sqlx::query(AssertSqlSafe(sql));
        for ((target, user), state) in piece {
            query =
                query.bind(target.kind.0).bind(target.id.0).bind(user.0).bind(!state.liked).bind(datetime(state.at));
        }
        query.execute(&mut *connection).await.tried("write like records")?;
    }
    Ok(())
}

/// Adds each target's difference to the counter row of this partition's slot, sorted by key.
///
/// # Errors
/// MySQL's.
pub async fn add_differences(
    connection: &mut MySqlConnection,
    metric: Metric,
    slot: u16,
    differences: &[Difference],
) -> Result<()> {
    for piece in in_shapes(differences) {
        // Left to right: the version is last, so that what stands before it could still compare with the old one.
        let sql = format!(
            "INSERT INTO counter (kind, target_id, metric, slot, value, update_at) VALUES {} \
             ON DUPLICATE KEY UPDATE value = value + VALUES(value), update_at = GREATEST(update_at, VALUES(update_at))",
            placeholders(piece.len(), 6)
        );
        let mut query = sqlx::query(AssertSqlSafe(sql));
        for Difference { target, delta, at } in piece {
            query =
                query.bind(target.kind.0).bind(target.id.0).bind(metric.0).bind(slot).bind(*delta).bind(datetime(*at));
        }
        query.execute(&mut *connection).await.tried("add to counters")?;
    }
    Ok(())
}

/// Keeps dead letters, one by one: they are few, and may be large. A redelivered one is kept once.
///
/// # Errors
/// MySQL's.
pub async fn keep_dead_letters(connection: &mut MySqlConnection, letters: &[DeadLetter]) -> Result<()> {
    for letter in letters {
        sqlx::query(
            "INSERT INTO dead_letter (body, headers, reason, error, queue, first_seen) VALUES (?, ?, ?, ?, ?, ?) \
             ON DUPLICATE KEY UPDATE id = id",
        )
        .bind(&letter.body)
        .bind(&letter.headers)
        .bind(letter.reason)
        .bind(&letter.error)
        .bind(&letter.queue)
        .bind(datetime(letter.first_seen))
        .execute(&mut *connection)
        .await
        .tried("keep a dead letter")?;
    }
    Ok(())
}

/// The targets of that watch.
///
/// # Errors
/// MySQL's.
pub async fn watched_targets(connection: &mut MySqlConnection, watch: u64) -> Result<Vec<Target>> {
    const ACTION: &str = "read the watched targets";
    let rows = sqlx::query("SELECT kind, target_id FROM watched_target WHERE watch = ?")
        .bind(watch)
        .fetch_all(connection)
        .await
        .tried(ACTION)?;
    rows.iter()
        .map(|row| Ok(Target { kind: Kind(row.try_get(0)?), id: TargetId(row.try_get(1)?) }))
        .collect::<std::result::Result<_, sqlx::Error>>()
        .tried(ACTION)
}

/// Logs events of watched targets, and the states that their rows had before.
///
/// # Errors
/// MySQL's.
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
        query.execute(&mut *connection).await.tried("log watched events")?;
    }
    Ok(())
}
