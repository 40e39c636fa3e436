//! Reads `like_record` for an export, and writes to the site's server.

use std::error::Error;

use sqlx::{AssertSqlSafe, Connection, Row};
use tallyd_core::model::{Kind, Micros, TargetId, UserId};

use tallyd_mysql::Text;
use tallyd_mysql::site_query::QueryError;
use tallyd_mysql::{Context, Result, Store, datetime, micros};

/// A row of `like_record`, without the kind, which the caller knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LikeRow {
    pub target: TargetId,
    pub user: UserId,
    pub liked: bool,
    pub at: Micros,
}

pub(crate) fn time_literal(at: Micros) -> String {
    format!("'{}'", datetime(at).format("%Y-%m-%d %H:%M:%S%.6f"))
}

/// The targets must be sorted by id.
pub(crate) async fn likes_since(
    store: &Store,
    kind: Kind,
    targets: &[TargetId],
    after: (TargetId, UserId),
    since: Micros,
    limit: usize,
) -> Result<Vec<LikeRow>> {
    const ACTION: &str = "read changed like records";
    if targets.is_empty() {
        return Ok(Vec::new());
    }
    let mut conn = store.acquire().await?;
    // If a target has millions of rows, this query takes seconds, because there is no index by time.
    conn.unlimited(|connection| async move {
        let sql = format!(
            "SELECT target_id, user_id, is_del, update_at FROM like_record WHERE kind = ? AND target_id IN ({}) \
             AND (target_id > ? OR (target_id = ? AND user_id > ?)) AND update_at >= ? ORDER BY target_id, user_id LIMIT ?",
            vec!["?"; targets.len()].join(", ")
        );
        let mut query = sqlx::query(AssertSqlSafe(sql)).bind(kind.0);
        for target in targets {
            query = query.bind(target.0);
        }
        let (target, UserId(user)) = after;
        let query = query.bind(target.0).bind(target.0).bind(user).bind(datetime(since)).bind(limit as u64);
        let read = |row: &sqlx::mysql::MySqlRow| {
            Ok(LikeRow {
                target: TargetId(row.try_get(0)?),
                user: UserId(row.try_get(1)?),
                liked: !row.try_get::<bool, _>(2)?,
                at: micros(row.try_get(3)?),
            })
        };
        let rows = query.fetch_all(connection).await.context(ACTION)?;
        rows.iter().map(read).collect::<std::result::Result<_, sqlx::Error>>().context(ACTION)
    })
    .await
}

/// Runs the site's own statements one after the other, in one transaction.
///
/// # Errors
/// Returns [`QueryError::Query`] with the server's text if a statement is wrong. Returns another error if the
/// server is unreachable.
pub(crate) async fn write_site(store: &Store, statements: &[String]) -> std::result::Result<(), QueryError> {
    const ACTION: &str = "write to the site's table";
    let written = store.tried(ACTION, async |connection| {
        let mut tx = connection.begin().await.context(ACTION)?;
        let mut text = Text::default();
        // Without the line break, a comment at the end of a statement would hide the statements after it.
        statements.iter().for_each(|statement| text.statement(&format!("{statement}\n")));
        text.run(&mut tx, ACTION).await?;
        tx.commit().await.context(ACTION)
    });
    match written.await {
        Err(error) if error.is_of_statement() => {
            Err(QueryError::Query(error.source().map_or_else(String::new, ToString::to_string)))
        }
        written => Ok(written?),
    }
}
