//! Finds the dead letters that an operator wants to list, replay or delete.

use chrono::NaiveDateTime;
use sqlx::mysql::{MySqlArguments, MySqlRow};
use sqlx::query::Query;
use sqlx::{AssertSqlSafe, MySql, Row};
use tallyd_core::model::Micros;

use crate::{Context, Result, Store, datetime, micros};

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Letter {
    pub id: u64,
    /// The message's body, or only its first [`HEAD_BYTES`] bytes if the letter is part of a list.
    pub body: Vec<u8>,
    pub bytes: u64,
    pub headers: String,
    pub traceparent: Option<String>,
    pub reason: String,
    pub error: String,
    pub queue: String,
    pub first_seen: Micros,
    pub replayed_at: Option<Micros>,
    pub refusals: u32,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Selection {
    pub reason: Option<String>,
    pub since: Option<Micros>,
    pub before: Option<Micros>,
    pub replayed: Option<bool>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Total {
    pub reason: String,
    pub open: u64,
    pub replayed: u64,
    pub oldest: Micros,
    pub newest: Micros,
}

pub const HEAD_BYTES: u32 = 200;

/// The condition of a [`Selection`] in SQL. The function `selected` binds its parameters. There is no index for this
/// condition, because there are usually few dead letters. MySQL reads the letters in the order of their ids.
const SELECTED: &str = "(? IS NULL OR reason = ?) AND (? IS NULL OR first_seen >= ?) AND (? IS NULL OR first_seen < ?) \
                        AND (? IS NULL OR (replayed_at IS NOT NULL) = ?)";

const COLUMNS: &str = "id, LENGTH(body), reason, error, queue, first_seen, replayed_at, refusals, \
                       IF(JSON_VALID(headers), JSON_UNQUOTE(JSON_EXTRACT(headers, '$.traceparent')), NULL)";

impl Store {
    pub async fn dead_letters(&self, selection: &Selection, limit: u64) -> Result<Vec<Letter>> {
        const ACTION: &str = "list dead letters";
        let sql = format!(
            "SELECT {COLUMNS}, LEFT(body, {HEAD_BYTES}), '' FROM dead_letter WHERE {SELECTED} ORDER BY id DESC LIMIT ?"
        );
        let mut conn = self.acquire().await?;
        conn.unlimited(|connection| async move {
            let query = selected(sqlx::query(AssertSqlSafe(sql)), selection).bind(limit);
            letters_of(&query.fetch_all(connection).await.context(ACTION)?).context(ACTION)
        })
        .await
    }

    pub async fn whole_dead_letters(&self, ids: &[u64]) -> Result<Vec<Letter>> {
        const ACTION: &str = "read dead letters";
        if ids.is_empty() {
            return Ok(Vec::new());
        }
        let sql = format!(
            "SELECT {COLUMNS}, body, headers FROM dead_letter WHERE id IN ({}) ORDER BY id",
            comma_separated(ids)
        );
        let mut conn = self.acquire().await?;
        conn.limit(ACTION, |connection| async move {
            let rows = sqlx::raw_sql(AssertSqlSafe(sql)).fetch_all(connection).await.context(ACTION)?;
            letters_of(&rows).context(ACTION)
        })
        .await
    }

    pub async fn dead_letter_totals(&self, selection: &Selection) -> Result<Vec<Total>> {
        const ACTION: &str = "count dead letters";
        let sql = format!(
            "SELECT reason, CAST(SUM(replayed_at IS NULL) AS UNSIGNED), CAST(SUM(replayed_at IS NOT NULL) AS UNSIGNED), \
             MIN(first_seen), MAX(first_seen) FROM dead_letter WHERE {SELECTED} GROUP BY reason ORDER BY reason"
        );
        let mut conn = self.acquire().await?;
        conn.unlimited(|connection| async move {
            let rows =
                selected(sqlx::query(AssertSqlSafe(sql)), selection).fetch_all(connection).await.context(ACTION)?;
            let total = |row: &MySqlRow| {
                Ok(Total {
                    reason: row.try_get(0)?,
                    open: row.try_get(1)?,
                    replayed: row.try_get(2)?,
                    oldest: micros(row.try_get(3)?),
                    newest: micros(row.try_get(4)?),
                })
            };
            rows.iter().map(total).collect::<std::result::Result<_, _>>().context(ACTION)
        })
        .await
    }

    pub async fn newest_dead_letter(&self) -> Result<u64> {
        const ACTION: &str = "find the newest dead letter";
        let mut conn = self.acquire().await?;
        conn.limit(ACTION, |connection| async move {
            let newest: Option<u64> =
                sqlx::query_scalar("SELECT MAX(id) FROM dead_letter").fetch_one(connection).await.context(ACTION)?;
            Ok(newest.unwrap_or(0))
        })
        .await
    }

    pub async fn dead_letters_after(
        &self,
        selection: &Selection,
        (after, until): (u64, u64),
        limit: u64,
    ) -> Result<Vec<(u64, u64)>> {
        const ACTION: &str = "find dead letters";
        let sql = format!(
            "SELECT id, LENGTH(body) FROM dead_letter WHERE {SELECTED} AND id > ? AND id <= ? ORDER BY id LIMIT ?"
        );
        let mut conn = self.acquire().await?;
        conn.unlimited(|connection| async move {
            let query = selected(sqlx::query(AssertSqlSafe(sql)), selection).bind(after).bind(until).bind(limit);
            sizes_of(&query.fetch_all(connection).await.context(ACTION)?).context(ACTION)
        })
        .await
    }

    pub async fn dead_letters_of(&self, ids: &[u64]) -> Result<Vec<(u64, u64)>> {
        const ACTION: &str = "find dead letters";
        if ids.is_empty() {
            return Ok(Vec::new());
        }
        let sql =
            format!("SELECT id, LENGTH(body) FROM dead_letter WHERE id IN ({}) ORDER BY id", comma_separated(ids));
        let mut conn = self.acquire().await?;
        conn.limit(ACTION, |connection| async move {
            let rows = sqlx::raw_sql(AssertSqlSafe(sql)).fetch_all(connection).await.context(ACTION)?;
            sizes_of(&rows).context(ACTION)
        })
        .await
    }

    /// Each id comes with the refusals that the caller has read. A letter that was refused again since then stays open.
    pub async fn note_replayed(&self, letters: &[(u64, u32)], at: Micros) -> Result<u64> {
        const ACTION: &str = "record replayed dead letters";
        if letters.is_empty() {
            return Ok(0);
        }
        let ids: Vec<u64> = letters.iter().map(|(id, _)| *id).collect();
        let pairs: Vec<String> = letters.iter().map(|(id, refusals)| format!("({id}, {refusals})")).collect();
        // MySQL needs the first condition to find the rows by their key.
        let sql = format!(
            "UPDATE dead_letter SET replayed_at = ? WHERE id IN ({}) AND (id, refusals) IN ({})",
            comma_separated(&ids),
            pairs.join(", ")
        );
        let mut conn = self.acquire().await?;
        conn.limit(ACTION, |connection| async move {
            let query = sqlx::query(AssertSqlSafe(sql)).persistent(false).bind(datetime(at));
            // This number includes matching rows that the statement did not change.
            Ok(query.execute(connection).await.context(ACTION)?.rows_affected())
        })
        .await
    }

    pub async fn delete_dead_letters(&self, ids: &[u64], selection: &Selection) -> Result<u64> {
        const ACTION: &str = "delete dead letters";
        if ids.is_empty() {
            return Ok(0);
        }
        let sql = format!("DELETE FROM dead_letter WHERE {SELECTED} AND id IN ({})", comma_separated(ids));
        let mut conn = self.acquire().await?;
        conn.limit(ACTION, |connection| async move {
            let query = selected(sqlx::query(AssertSqlSafe(sql)).persistent(false), selection);
            Ok(query.execute(connection).await.context(ACTION)?.rows_affected())
        })
        .await
    }
}

fn selected<'q>(query: Query<'q, MySql, MySqlArguments>, of: &Selection) -> Query<'q, MySql, MySqlArguments> {
    let (since, before) = (of.since.map(datetime), of.before.map(datetime));
    let query = query.bind(of.reason.clone()).bind(of.reason.clone()).bind(since).bind(since).bind(before).bind(before);
    query.bind(of.replayed).bind(of.replayed)
}

fn letters_of(rows: &[MySqlRow]) -> std::result::Result<Vec<Letter>, sqlx::Error> {
    let letter = |row: &MySqlRow| {
        Ok(Letter {
            id: row.try_get(0)?,
            bytes: row.try_get_unchecked(1)?,
            reason: row.try_get_unchecked(2)?,
            error: row.try_get_unchecked(3)?,
            queue: row.try_get_unchecked(4)?,
            first_seen: micros(row.try_get(5)?),
            replayed_at: row.try_get::<Option<NaiveDateTime>, _>(6)?.map(micros),
            refusals: row.try_get(7)?,
            traceparent: row.try_get_unchecked(8)?,
            body: row.try_get_unchecked(9)?,
            headers: row.try_get_unchecked(10)?,
        })
    };
    rows.iter().map(letter).collect()
}

fn sizes_of(rows: &[MySqlRow]) -> std::result::Result<Vec<(u64, u64)>, sqlx::Error> {
    rows.iter().map(|row| Ok((row.try_get(0)?, row.try_get_unchecked(1)?))).collect()
}

fn comma_separated(ids: &[u64]) -> String {
    ids.iter().map(u64::to_string).collect::<Vec<_>>().join(", ")
}
