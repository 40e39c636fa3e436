//! Writes the rows and counters of an import. Each transaction first checks the job's lock, and records the run's
//! progress.
//!
//! For imported likes, each counter has a separate row in the import's slot. When an import adds to this row, it writes
//! the earliest possible time as the time of the change. So a reconcile of recent changes skips imported counters.
//! After the import, the counters must be loaded into Redis.

use sqlx::{AssertSqlSafe, Connection, MySqlConnection, Row};
use tallyd_core::coalesce::{Before, LikeState, Pair, differences};
use tallyd_core::import::{EARLIEST, Key, before_import};
use tallyd_core::model::{CounterKey, Difference, Kind, Metric, Micros, Target, TargetId, UserId};
use tallyd_core::outbox::IMPORTS;

use tallyd_mysql::{Context, Result, Store, StoreError, Text, in_shapes, jobs, likes, micros, placeholders};

pub const JOB: &str = "import";

/// The maximum number of rows of one plain INSERT. If one row of an INSERT already exists, all rows of this INSERT are
/// first read and then written.
const INSERT_ROWS: usize = 1_000;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Written {
    pub added: u64,
    pub changed: u64,
    /// Rows that were skipped because the existing row is newer or has the same version.
    pub kept: u64,
    pub likes: i64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Liked {
    pub key: Key,
    pub at: Micros,
}

/// The rows must be sorted by key. `is_signed`: see [`before_import`].
pub(crate) async fn write_import(
    store: &Store,
    run: u64,
    metric: Metric,
    (rows, is_signed): (&[(Pair, LikeState)], bool),
    checkpoint: &str,
) -> Result<Written> {
    const ACTION: &str = "write imported rows";
    let write = async |connection: &mut MySqlConnection| {
        let mut tx = connection.begin().await.context(ACTION)?;
        jobs::require_lock(&mut tx, JOB, run).await?;
        let mut met = Vec::with_capacity(rows.len());
        for piece in rows.chunks(INSERT_ROWS) {
            met.extend(write_rows(&mut tx, piece, is_signed).await?);
        }
        let differences = differences(metric, rows, &met);
        add(&mut tx, differences).await?;
        note_checkpoint(&mut tx, run, checkpoint).await?;
        tx.commit().await.context(ACTION)?;
        Ok(written(rows, &met))
    };
    store.tried(ACTION, write).await
}

/// Only likes that still have the given version. The rows must be sorted by key.
pub async fn take_out(
    store: &Store,
    run: u64,
    metric: Metric,
    rows: &[(Pair, Micros)],
    checkpoint: &str,
) -> Result<u64> {
    const ACTION: &str = "remove imported rows";
    let pairs: Vec<Pair> = rows.iter().map(|(pair, _)| *pair).collect();
    let write = async |connection: &mut MySqlConnection| {
        let mut tx = connection.begin().await.context(ACTION)?;
        jobs::require_lock(&mut tx, JOB, run).await?;
        let old = likes::old_states(&mut tx, &pairs).await?;
        let is_same = |(pair, at): &&(Pair, Micros)| old.get(pair) == Some(&LikeState { at: *at, liked: true });
        let gone: Vec<(Pair, LikeState)> =
            rows.iter().filter(is_same).map(|(pair, at)| (*pair, LikeState { at: *at, liked: false })).collect();
        likes::update_states(&mut tx, &gone).await?;
        let met = vec![Before::Older(true); gone.len()];
        add(&mut tx, differences(metric, &gone, &met)).await?;
        note_checkpoint(&mut tx, run, checkpoint).await?;
        tx.commit().await.context(ACTION)?;
        Ok(gone.len() as u64)
    };
    store.tried(ACTION, write).await
}

/// Changes only the rows in the import's slot. The counters must be sorted by target.
pub(crate) async fn level_numbers(
    store: &Store,
    run: u64,
    (kind, metric): (Kind, Metric),
    numbers: &[(TargetId, i64)],
    checkpoint: &str,
) -> Result<u64> {
    const ACTION: &str = "write imported counters";
    let write = async |connection: &mut MySqlConnection| {
        let mut tx = connection.begin().await.context(ACTION)?;
        jobs::require_lock(&mut tx, JOB, run).await?;
        let mut changed = 0;
        for piece in in_shapes(numbers) {
            changed += level(&mut tx, (kind, metric), piece).await?;
        }
        note_checkpoint(&mut tx, run, checkpoint).await?;
        tx.commit().await.context(ACTION)?;
        Ok(changed)
    };
    store.tried(ACTION, write).await
}

/// Returns at most `limit` likes in the order of their keys. The keys are above `after` and at most `until`.
pub(crate) async fn liked_rows(
    store: &Store,
    kind: Kind,
    (after, until): (Key, Key),
    limit: usize,
) -> Result<Vec<Liked>> {
    let (of_range, bounds) = of_range(after, until);
    let sql = format!(
        "SELECT target_id, user_id, update_at FROM like_record WHERE kind = ? AND {of_range} AND is_del = 0 \
         ORDER BY kind, target_id, user_id LIMIT ?"
    );
    let mut conn = store.acquire().await?;
    let rows = conn.unlimited(|connection| async move {
        let query = bounds.iter().fold(sqlx::query(AssertSqlSafe(sql)).bind(kind.0), |query, bound| query.bind(*bound));
        query.bind(limit as u64).fetch_all(connection).await.context("read like records")
    });
    rows.await?.iter().map(read_liked).collect()
}

pub(crate) async fn imported_likes(store: &Store, kind: Kind, metric: Metric) -> Result<u64> {
    const ACTION: &str = "sum imported likes";
    let mut conn = store.acquire().await?;
    let sum: i64 = conn.unlimited(|connection| async move {
        let sql = "SELECT CAST(COALESCE(SUM(value), 0) AS SIGNED) FROM counter WHERE kind = ? AND metric = ? AND slot = ?";
        let query = sqlx::query_scalar(sql).bind(kind.0).bind(metric.0).bind(IMPORTS);
        query.fetch_one(connection).await.context(ACTION)
    })
    .await?;
    Ok(u64::try_from(sum).unwrap_or(0))
}

pub(crate) async fn count_likes(store: &Store, kind: Kind, target: TargetId) -> Result<i64> {
    const ACTION: &str = "count like records";
    let mut conn = store.acquire().await?;
    conn.unlimited(|connection| async move {
        let sql = "SELECT COUNT(*) FROM like_record WHERE kind = ? AND target_id = ? AND is_del = 0";
        sqlx::query_scalar(sql).bind(kind.0).bind(target.0).fetch_one(connection).await.context(ACTION)
    })
    .await
}

/// The targets must be sorted. A missing counter is 0.
pub async fn numbers_of(store: &Store, (kind, metric): (Kind, Metric), targets: &[TargetId]) -> Result<Vec<i64>> {
    let keys: Vec<CounterKey> = targets.iter().map(|id| (Target { kind, id: *id }, metric)).collect();
    let mut conn = store.acquire().await?;
    let found = conn.unlimited(|connection| tallyd_mysql::counters::read_counted(connection, &keys)).await?;
    Ok(keys.iter().map(|key| found.get(key).map_or(0, |truth| truth.counted)).collect())
}

/// A few ranges of the primary key, so that MySQL reads each row of a target once, even if the target's rows fill
/// several pages.
pub(super) fn of_range((from, from_user): Key, (to, to_user): Key) -> (&'static str, Vec<u64>) {
    const ONE_TARGET: &str = "target_id = ? AND user_id > ? AND user_id <= ?";
    const TARGETS: &str = "((target_id = ? AND user_id > ?) OR (target_id > ? AND target_id < ?) \
                           OR (target_id = ? AND user_id <= ?))";
    match from == to {
        true => (ONE_TARGET, vec![from.0, from_user.0, to_user.0]),
        false => (TARGETS, vec![from.0, from_user.0, from.0, to.0, to.0, to_user.0]),
    }
}

/// Writes rows, and returns the former state of each row. Tries a plain INSERT of all rows before anything else,
/// because in a first import nearly all rows are new.
async fn write_rows(
    connection: &mut MySqlConnection,
    rows: &[(Pair, LikeState)],
    is_signed: bool,
) -> Result<Vec<Before>> {
    let mut text = Text::default();
    text.statement("INSERT INTO like_record (kind, target_id, user_id, is_del, update_at) VALUES ");
    for ((target, user), state) in rows {
        let (target_id, user_id) = (target.id.0.cast_signed(), user.0.cast_signed());
        text.row([target.kind.0.into(), target_id, user_id, (!state.liked).into()], state.at);
    }
    // Removes the comma after the last row.
    text.push("");
    match text.run(connection, "insert like records").await {
        Ok(_) => return Ok(vec![Before::Absent; rows.len()]),
        // MySQL has rolled back only this statement. The transaction continues.
        Err(error) if error.number() == Some(1062) => {}
        Err(error) => return Err(error),
    }
    let pairs: Vec<Pair> = rows.iter().map(|(pair, _)| *pair).collect();
    let old = likes::old_states(connection, &pairs).await?;
    let met = before_import(rows, &old, is_signed);
    likes::write_winners(connection, rows, &met).await?;
    Ok(met)
}

fn written(rows: &[(Pair, LikeState)], met: &[Before]) -> Written {
    let mut written = Written::default();
    for ((_, state), met) in rows.iter().zip(met) {
        let was = match met {
            Before::Absent => {
                written.added += 1;
                false
            }
            Before::Older(was) => {
                written.changed += 1;
                *was
            }
            Before::NotOlder => {
                written.kept += 1;
                continue;
            }
        };
        written.likes += i64::from(state.liked) - i64::from(was);
    }
    written
}

async fn add(connection: &mut MySqlConnection, differences: Vec<Difference>) -> Result<()> {
    let mut differences = differences;
    differences.retain(|difference| difference.delta != 0);
    differences.iter_mut().for_each(|difference| difference.at = EARLIEST);
    let mut text = Text::default();
    likes::add_differences(&mut text, IMPORTS, &differences);
    text.run(connection, "add to counters").await.map(drop)
}

async fn note_checkpoint(connection: &mut MySqlConnection, run: u64, checkpoint: &str) -> Result<()> {
    sqlx::query("UPDATE job_run SET checkpoint = ? WHERE run = ?")
        .bind(checkpoint)
        .bind(run)
        .execute(connection)
        .await
        .context("record the run's progress")
        .map(drop)
}

async fn level(
    connection: &mut MySqlConnection,
    (kind, metric): (Kind, Metric),
    numbers: &[(TargetId, i64)],
) -> Result<u64> {
    const ACTION: &str = "read imported counters";
    let sql = format!(
        "SELECT target_id, CAST(COALESCE(SUM(IF(slot = ?, 0, value)), 0) AS SIGNED), \
         CAST(COALESCE(SUM(IF(slot = ?, value, 0)), 0) AS SIGNED) FROM counter \
         WHERE kind = ? AND metric = ? AND target_id IN {} GROUP BY target_id",
        placeholders(1, numbers.len())
    );
    let query = sqlx::query(AssertSqlSafe(sql)).bind(IMPORTS).bind(IMPORTS).bind(kind.0).bind(metric.0);
    let query = numbers.iter().fold(query, |query, (id, _)| query.bind(id.0));
    let mut parts = std::collections::HashMap::new();
    for row in query.fetch_all(&mut *connection).await.context(ACTION)? {
        let (id, others, own): (u64, i64, i64) =
            (row.try_get(0).context(ACTION)?, row.try_get(1).context(ACTION)?, row.try_get(2).context(ACTION)?);
        parts.insert(id, (others, own));
    }
    let mut text = Text::default();
    text.statement("INSERT INTO counter (kind, target_id, metric, slot, value, update_at) VALUES ");
    let mut changed = 0;
    for (id, wanted) in numbers {
        let (others, own) = parts.get(&id.0).copied().unwrap_or((0, 0));
        let part = wanted.checked_sub(others).ok_or(StoreError::OutOfRange("import a counter"))?;
        if part != own {
            changed += 1;
            text.row([kind.0.into(), id.0.cast_signed(), metric.0.into(), IMPORTS.into(), part], EARLIEST);
        }
    }
    if changed > 0 {
        text.push("ON DUPLICATE KEY UPDATE value = VALUES(value)");
        text.run(connection, "write imported counters").await?;
    }
    Ok(changed)
}

fn read_liked(row: &sqlx::mysql::MySqlRow) -> Result<Liked> {
    const ACTION: &str = "read like records";
    let (target, user) = (row.try_get_unchecked(0).context(ACTION)?, row.try_get_unchecked(1).context(ACTION)?);
    Ok(Liked { key: (TargetId(target), UserId(user)), at: micros(row.try_get(2).context(ACTION)?) })
}
