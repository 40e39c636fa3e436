//! Erases a user or target from rows that also contain other data. These are rows of the outbox, of dead letters and of
//! runs. This module removes the data of the subject (the erased user or target), and keeps the other data.

use sqlx::{Connection, Row};
use tallyd_core::erase::Subject;
use tallyd_core::model::Target;

use tallyd_mysql::{Context, Result, Store};

const OUTBOX_PAGE: u64 = 100;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamedRow {
    pub partition: u16,
    pub number: u64,
    pub body: String,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamedRun {
    pub run: u64,
    pub report: String,
    pub checkpoint: String,
}

pub(crate) async fn outbox_naming(
    store: &Store,
    partition: u16,
    after: u64,
    subject: &Subject,
) -> Result<(Vec<NamedRow>, Option<u64>)> {
    const ACTION: &str = "search the outbox";
    let needle = match subject {
        Subject::User(user) => format!(":{user} "),
        Subject::Target { target, .. } => format!(" {}:{}:", target.kind, target.id),
    };
    let mut conn = store.acquire().await?;
    conn.limit(ACTION, |connection| async move {
        let rows = sqlx::query(
            "SELECT number, IF(LOCATE(?, CONCAT(' ', body, ' ')) > 0, body, NULL) FROM outbox \
             WHERE `partition` = ? AND number > ? ORDER BY number LIMIT ?",
        )
        .bind(needle.into_bytes())
        .bind(partition)
        .bind(after)
        .bind(OUTBOX_PAGE)
        .fetch_all(connection)
        .await
        .context(ACTION)?;
        let (mut named, mut last) = (Vec::new(), None);
        for row in &rows {
            let number = row.try_get(0).context(ACTION)?;
            let body: Option<Vec<u8>> = row.try_get_unchecked(1).context(ACTION)?;
            let body = body.map(|body| String::from_utf8_lossy(&body).into_owned());
            named.extend(body.map(|body| NamedRow { partition, number, body }));
            last = Some(number);
        }
        Ok((named, last))
    })
    .await
}

pub(crate) async fn rewrite_outbox(
    store: &Store,
    run: u64,
    NamedRow { partition, number, body }: &NamedRow,
) -> Result<u64> {
    const ACTION: &str = "rewrite a row of the outbox";
    const APPLIED: &str = "number <= (SELECT applied FROM outbox_state WHERE `partition` = ?)";
    if body.is_empty() {
        let sql = format!("DELETE FROM outbox WHERE `partition` = ? AND number = ? AND {APPLIED}");
        return super::erase(store, ACTION, run, &sql, |query| query.bind(partition).bind(number).bind(partition))
            .await;
    }
    let sql = format!("UPDATE outbox SET body = ? WHERE `partition` = ? AND number = ? AND {APPLIED}");
    let bytes = body.as_bytes();
    super::erase(store, ACTION, run, &sql, |query| {
        query.bind(bytes.to_vec()).bind(partition).bind(number).bind(partition)
    })
    .await
}

/// Returns false, and changes nothing, if the letter no longer has the body `former`. If another letter has the new
/// body already, this one is deleted, and the other becomes open if this one was.
pub(crate) async fn rewrite_dead_letter(store: &Store, id: u64, former: &[u8], body: &[u8]) -> Result<bool> {
    const ACTION: &str = "rewrite a dead letter";
    let mut conn = store.acquire().await?;
    conn.limit(ACTION, |connection| async move {
        let mut tx = connection.begin().await.context(ACTION)?;
        let was_open: Option<i64> =
            sqlx::query_scalar("SELECT replayed_at IS NULL FROM dead_letter WHERE id = ? AND body = ? FOR UPDATE")
                .bind(id)
                .bind(former)
                .fetch_optional(&mut *tx)
                .await
                .context(ACTION)?;
        let Some(was_open) = was_open else { return Ok(false) };
        let other: Option<u64> =
            sqlx::query_scalar("SELECT id FROM dead_letter WHERE digest = UNHEX(SHA2(?, 256)) AND id <> ? FOR UPDATE")
                .bind(body)
                .bind(id)
                .fetch_optional(&mut *tx)
                .await
                .context(ACTION)?;
        if let Some(other) = other {
            let sql = "UPDATE dead_letter SET replayed_at = IF(? = 1, NULL, replayed_at) WHERE id = ?";
            sqlx::query(sql).bind(was_open).bind(other).execute(&mut *tx).await.context(ACTION)?;
            sqlx::query("DELETE FROM dead_letter WHERE id = ?").bind(id).execute(&mut *tx).await.context(ACTION)?;
        } else {
            let sql = "UPDATE dead_letter SET body = ? WHERE id = ?";
            sqlx::query(sql).bind(body).bind(id).execute(&mut *tx).await.context(ACTION)?;
        }
        tx.commit().await.context(ACTION)?;
        Ok(true)
    })
    .await
}

/// Counts the rows about the subject that a running reconcile has logged. The reconcile needs these rows, and
/// deletes them at its end.
pub(crate) async fn watched_of(store: &Store, subject: &Subject) -> Result<u64> {
    const ACTION: &str = "count the rows that a reconcile has logged";
    let mut conn = store.acquire().await?;
    conn.limit(ACTION, |connection| async move {
        let rows: i64 = match subject {
            Subject::User(user) => {
                let sql = "SELECT COUNT(*) FROM watched_event WHERE user_id = ?";
                sqlx::query_scalar(sql).bind(user.0).fetch_one(connection).await.context(ACTION)?
            }
            Subject::Target { target: Target { kind, id }, .. } => {
                let sql = "SELECT (SELECT COUNT(*) FROM watched_target WHERE kind = ? AND target_id = ?) \
                           + (SELECT COUNT(*) FROM watched_event WHERE kind = ? AND target_id = ?) \
                           + (SELECT COUNT(*) FROM watched_count WHERE kind = ? AND target_id = ?)";
                let query = sqlx::query_scalar(sql).bind(kind.0).bind(id.0).bind(kind.0).bind(id.0);
                query.bind(kind.0).bind(id.0).fetch_one(connection).await.context(ACTION)?
            }
        };
        Ok(rows.unsigned_abs())
    })
    .await
}

pub(crate) async fn runs_naming(store: &Store, run: u64, id: &str) -> Result<Vec<NamedRun>> {
    const ACTION: &str = "search the reports of runs";
    let id = format!("%{id}%");
    let mut conn = store.acquire().await?;
    conn.unlimited(|connection| async move {
        let rows = sqlx::query(
            "SELECT run, COALESCE(report, ''), COALESCE(checkpoint, '') FROM job_run \
             WHERE run <> ? AND (report LIKE ? OR checkpoint LIKE ?)",
        )
        .bind(run)
        .bind(&id)
        .bind(&id)
        .fetch_all(connection)
        .await
        .context(ACTION)?;
        let read = |row: &sqlx::mysql::MySqlRow| {
            Ok(NamedRun { run: row.try_get(0)?, report: row.try_get(1)?, checkpoint: row.try_get(2)? })
        };
        rows.iter().map(read).collect::<std::result::Result<_, sqlx::Error>>().context(ACTION)
    })
    .await
}

pub(crate) async fn rewrite_run(
    store: &Store,
    by: u64,
    NamedRun { run, report, checkpoint }: &NamedRun,
) -> Result<u64> {
    let sql = "UPDATE job_run SET report = IF(report IS NULL, NULL, ?), \
               checkpoint = IF(checkpoint IS NULL, NULL, ?) WHERE run = ?";
    super::erase(store, "rewrite the report of a run", by, sql, |query| {
        query.bind(report.clone()).bind(checkpoint.clone()).bind(run)
    })
    .await
}
