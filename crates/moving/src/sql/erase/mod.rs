//! Finds and deletes all data about a user or a target. Every deletion is fenced: its transaction holds the job's lock.

pub mod boards;
pub mod numbers;
pub mod traces;

use sqlx::mysql::MySqlRow;
use sqlx::{AssertSqlSafe, Connection, Row};
use tallyd_core::model::{Kind, Micros, Target, TargetId, UserId};

use tallyd_mysql::{Context, Result, Store, jobs, micros, placeholders};
use tallyd_mysql::{TRIPLE_SHAPES, in_shapes_of, target};

/// The erase job. A run must hold this job's lock before the run can delete data.
pub const JOB: &str = "erase";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LikeRow {
    pub target: Target,
    pub user: UserId,
    pub liked: bool,
    pub at: Micros,
}

/// The name of an index of `like_record` that begins with the user, if the site has one.
pub(crate) async fn index_by_user(store: &Store) -> Result<Option<String>> {
    const ACTION: &str = "find an index by user";
    let mut conn = store.acquire().await?;
    conn.limit(ACTION, |connection| async move {
        let sql = "SELECT INDEX_NAME FROM information_schema.STATISTICS WHERE TABLE_SCHEMA = DATABASE() \
                   AND TABLE_NAME = 'like_record' AND COLUMN_NAME = 'user_id' AND SEQ_IN_INDEX = 1 LIMIT 1";
        sqlx::query_scalar(sql).fetch_optional(connection).await.context(ACTION)
    })
    .await
}

pub(crate) async fn likes_by_index(
    store: &Store,
    index: &str,
    user: UserId,
    after: Target,
    limit: u64,
) -> Result<Vec<LikeRow>> {
    const ACTION: &str = "read the likes of a user";
    let index = index.replace('`', "``");
    let sql = format!(
        "SELECT kind, target_id, user_id, is_del, update_at FROM like_record FORCE INDEX (`{index}`) \
         WHERE user_id = ? AND (kind > ? OR (kind = ? AND target_id > ?)) ORDER BY kind, target_id LIMIT ?"
    );
    let mut conn = store.acquire().await?;
    conn.unlimited(|connection| async move {
        let query = sqlx::query(AssertSqlSafe(sql)).bind(user.0).bind(after.kind.0).bind(after.kind.0);
        let rows = query.bind(after.id.0).bind(limit).fetch_all(connection).await.context(ACTION)?;
        read_all(&rows).context(ACTION)
    })
    .await
}

pub(crate) async fn likes_among(store: &Store, user: UserId, kind: Kind, targets: &[TargetId]) -> Result<Vec<LikeRow>> {
    const ACTION: &str = "find the likes of a user";
    let mut conn = store.acquire().await?;
    conn.limit(ACTION, |connection| async move {
        let mut found = Vec::new();
        for piece in in_shapes_of(TRIPLE_SHAPES, targets) {
            let sql = format!(
                "SELECT kind, target_id, user_id, is_del, update_at FROM like_record \
                 WHERE (kind, target_id, user_id) IN ({})",
                placeholders(piece.len(), 3)
            );
            let query = sqlx::query(AssertSqlSafe(sql));
            let query = piece.iter().fold(query, |query, id| query.bind(kind.0).bind(id.0).bind(user.0));
            let rows = query.fetch_all(&mut *connection).await.context(ACTION)?;
            found.extend(read_all(&rows).context(ACTION)?);
        }
        Ok(found)
    })
    .await
}

pub(crate) async fn likes_of_target(store: &Store, target: Target, after: UserId, limit: u64) -> Result<Vec<LikeRow>> {
    const ACTION: &str = "read the likes of a target";
    let mut conn = store.acquire().await?;
    conn.limit(ACTION, |connection| async move {
        let rows = sqlx::query(
            "SELECT kind, target_id, user_id, is_del, update_at FROM like_record \
             WHERE kind = ? AND target_id = ? AND user_id > ? ORDER BY user_id LIMIT ?",
        )
        .bind(target.kind.0)
        .bind(target.id.0)
        .bind(after.0)
        .bind(limit)
        .fetch_all(connection)
        .await
        .context(ACTION)?;
        read_all(&rows).context(ACTION)
    })
    .await
}

/// Deletes those rows of `pairs` that are unlikes. A row that has become a like meanwhile is not deleted. `pairs`
/// must be sorted by key. Returns the number of deleted rows.
pub(crate) async fn erase_unlikes(store: &Store, run: u64, pairs: &[(Target, UserId)]) -> Result<u64> {
    const ACTION: &str = "delete like records";
    let mut erased = 0;
    for piece in in_shapes_of(TRIPLE_SHAPES, pairs) {
        // The condition uses no `IN` with a list of rows, because MariaDB reads and locks the whole table if such a
        // list has only one row.
        let one = "(kind = ? AND target_id = ? AND user_id = ?)";
        let sql = format!("DELETE FROM like_record WHERE is_del = 1 AND ({})", vec![one; piece.len()].join(" OR "));
        erased += erase(store, ACTION, run, &sql, |query| {
            piece.iter().fold(query, |query, (target, user)| query.bind(target.kind.0).bind(target.id.0).bind(user.0))
        })
        .await?;
    }
    Ok(erased)
}

async fn erase(
    store: &Store,
    action: &'static str,
    run: u64,
    sql: &str,
    bind: impl for<'q> Fn(Query<'q>) -> Query<'q>,
) -> Result<u64> {
    store
        .tried(action, async |connection| {
            let mut tx = connection.begin().await.context(action)?;
            jobs::require_lock(&mut tx, JOB, run).await?;
            let query = bind(sqlx::query(AssertSqlSafe(sql.to_owned())));
            let rows = query.execute(&mut *tx).await.context(action)?.rows_affected();
            tx.commit().await.context(action)?;
            Ok(rows)
        })
        .await
}

type Query<'q> = sqlx::query::Query<'q, sqlx::MySql, sqlx::mysql::MySqlArguments>;

fn read_all(rows: &[MySqlRow]) -> std::result::Result<Vec<LikeRow>, sqlx::Error> {
    let read = |row: &MySqlRow| {
        Ok(LikeRow {
            target: target(row, 0)?,
            user: UserId(row.try_get(2)?),
            liked: !row.try_get::<bool, _>(3)?,
            at: micros(row.try_get(4)?),
        })
    };
    rows.iter().map(read).collect()
}
