//! What can never be applied, as it is kept until somebody looks at it, sends it again or deletes it.

use std::collections::HashSet;

use chrono::NaiveDateTime;
use sha2::{Digest, Sha256};
use sqlx::mysql::{MySqlArguments, MySqlRow};
use sqlx::query::Query;
use sqlx::{AssertSqlSafe, Connection, MySql, MySqlConnection, Row};

use super::{Result, Store, Tried, datetime, in_shapes, micros, placeholders};
use crate::model::Micros;
use crate::runtime::fault;

/// What can never be applied, as it comes.
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

impl DeadLetter {
    /// What the table tells bodies apart by.
    pub fn digest(&self) -> [u8; 32] {
        Sha256::digest(&self.body).into()
    }
}

/// A dead letter as it is kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Letter {
    /// Its number.
    pub id: u64,
    /// The message's body; in a list the first [`HEAD_BYTES`] of it.
    pub body: Vec<u8>,
    /// How long the body is.
    pub bytes: u64,
    /// Its headers as JSON; empty in a list.
    pub headers: String,
    /// The reason's code.
    pub reason: String,
    /// The reason as a sentence.
    pub error: String,
    /// Where it came from.
    pub queue: String,
    /// When it was first refused.
    pub first_seen: Micros,
    /// When it was sent again; none while it is open.
    pub replayed_at: Option<Micros>,
    /// How often it was refused.
    pub refusals: u32,
}

/// Which dead letters are meant: those that are all of this.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Selection {
    /// The reason's code.
    pub reason: Option<String>,
    /// First seen then or later.
    pub since: Option<Micros>,
    /// First seen before.
    pub before: Option<Micros>,
    /// Sent again, or open.
    pub replayed: Option<bool>,
}

/// How many dead letters have a reason.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Total {
    /// The reason's code.
    pub reason: String,
    /// Those that are open.
    pub open: u64,
    /// Those that were sent again.
    pub replayed: u64,
    /// When the first of them was first seen.
    pub oldest: Micros,
    /// When the last one was.
    pub newest: Micros,
}

/// So much of a body is in a list.
pub const HEAD_BYTES: u32 = 200;

/// [`Selection`] as SQL, with the parameters of `selected`. Few dead letters are the rule: they are looked at in the order of their
/// ids, and no index is kept for this.
const SELECTED: &str = "(? IS NULL OR reason = ?) AND (? IS NULL OR first_seen >= ?) AND (? IS NULL OR first_seen < ?) \
                        AND (? IS NULL OR (replayed_at IS NOT NULL) = ?)";

const COLUMNS: &str = "id, LENGTH(body), reason, error, queue, first_seen, replayed_at, refusals";

/// Bytes of dead letters that one statement holds at most, beside its last one: far below any `max_allowed_packet`.
const LETTERS_BYTES_MAX: usize = 1 << 20;

/// Keeps dead letters. A redelivered one is kept once; one that was replayed and refused again is open again.
///
/// # Errors
/// MySQL's.
pub async fn keep_dead_letters(connection: &mut MySqlConnection, letters: &[&DeadLetter]) -> Result<()> {
    for piece in in_shapes(letters) {
        let mut bytes = 0;
        let parts = piece.chunk_by(|letter, _| {
            bytes += letter.body.len() + letter.headers.len();
            let fits = bytes < LETTERS_BYTES_MAX;
            bytes = if fits { bytes } else { 0 };
            fits
        });
        for part in parts {
            let sql = format!(
                "INSERT INTO dead_letter (body, headers, reason, error, queue, first_seen) VALUES {} \
                 ON DUPLICATE KEY UPDATE replayed_at = NULL, reason = VALUES(reason), error = VALUES(error), \
                 refusals = dead_letter.refusals + 1",
                placeholders(part.len(), 6)
            );
            // Parts of large letters have any length: their statements are not worth remembering.
            let mut query = sqlx::query(AssertSqlSafe(sql)).persistent(part.len() == piece.len());
            for letter in part {
                query = query.bind(&letter.body).bind(&letter.headers).bind(letter.reason).bind(&letter.error);
                query = query.bind(&letter.queue).bind(datetime(letter.first_seen));
            }
            query.execute(&mut *connection).await.tried("keep dead letters")?;
        }
    }
    Ok(())
}

/// How many open dead letters came from that queue, but no more than `most`; read from an index.
///
/// # Errors
/// MySQL's.
pub async fn open_of(connection: &mut MySqlConnection, queue: &str, most: u64) -> Result<u64> {
    let sql = "SELECT CAST(COUNT(*) AS UNSIGNED) FROM \
               (SELECT 1 FROM dead_letter WHERE replayed_at IS NULL AND queue = ? LIMIT ?) AS those";
    sqlx::query_scalar(sql).bind(queue).bind(most).fetch_one(connection).await.tried("count open dead letters")
}

/// The digests of those of these letters that are open, by which a body is told from others.
///
/// # Errors
/// MySQL's.
pub async fn open_digests(connection: &mut MySqlConnection, letters: &[&DeadLetter]) -> Result<HashSet<[u8; 32]>> {
    let mut open = HashSet::new();
    for piece in in_shapes(letters) {
        let sql = format!(
            "SELECT digest FROM dead_letter WHERE replayed_at IS NULL AND digest IN {}",
            placeholders(1, piece.len())
        );
        let query = piece
            .iter()
            .fold(sqlx::query_scalar(AssertSqlSafe(sql)), |query, letter| query.bind(letter.digest().to_vec()));
        let found: Vec<Vec<u8>> =
            query.fetch_all(&mut *connection).await.tried("look for dead letters that are there")?;
        open.extend(found.into_iter().filter_map(|digest| <[u8; 32]>::try_from(digest).ok()));
    }
    Ok(open)
}

impl Store {
    /// How many open dead letters came from that queue, but no more than `most`.
    ///
    /// # Errors
    /// MySQL's.
    pub async fn open_dead_letters_of(&self, queue: &str, most: u64) -> Result<u64> {
        let mut lent = self.lend().await?;
        lent.limit("count open dead letters", |connection| open_of(connection, queue, most)).await
    }

    /// How many open dead letters have each queue and reason, read from an index.
    ///
    /// # Errors
    /// MySQL's.
    pub async fn open_dead_letters(&self) -> Result<Vec<(String, String, u64)>> {
        const ACTION: &str = "count open dead letters";
        let mut lent = self.lend().await?;
        lent.limit(ACTION, |connection| async move {
            let sql = "SELECT queue, reason, CAST(COUNT(*) AS UNSIGNED) FROM dead_letter WHERE replayed_at IS NULL \
                       GROUP BY queue, reason";
            sqlx::query_as(sql).fetch_all(connection).await.tried(ACTION)
        })
        .await
    }

    /// Whether this account may keep dead letters, and the server is one to write to: fails where not, and changes nothing.
    ///
    /// # Errors
    /// MySQL's.
    pub async fn may_keep_dead_letters(&self) -> Result<()> {
        const ACTION: &str = "look if dead letters can be kept";
        let mut lent = self.lend().await?;
        lent.limit(ACTION, |connection| async move {
            let sql = "INSERT INTO dead_letter (body, headers, reason, error, queue, first_seen) \
                       SELECT body, headers, reason, error, queue, first_seen FROM dead_letter AS of_none WHERE id = 0 \
                       ON DUPLICATE KEY UPDATE refusals = dead_letter.refusals + 1";
            sqlx::query(sql).execute(connection).await.tried(ACTION).map(drop)
        })
        .await
    }

    /// Keeps dead letters in a transaction of their own.
    ///
    /// # Errors
    /// MySQL's.
    pub async fn keep_dead_letters(&self, letters: &[DeadLetter]) -> Result<()> {
        const ACTION: &str = "keep dead letters";
        let mut lent = self.lend().await?;
        lent.limit(ACTION, |connection| async move {
            let mut tx = connection.begin().await.tried(ACTION)?;
            keep_dead_letters(&mut tx, &letters.iter().collect::<Vec<_>>()).await?;
            fault::point("dead:returned-before-commit");
            tx.commit().await.tried(ACTION)?;
            fault::point("dead:returned-after-commit");
            Ok(())
        })
        .await
    }

    /// The newest dead letters, the newest first, with the beginnings of their bodies.
    ///
    /// # Errors
    /// MySQL's.
    pub async fn dead_letters(&self, selection: &Selection, limit: u64) -> Result<Vec<Letter>> {
        const ACTION: &str = "list dead letters";
        let sql = format!(
            "SELECT {COLUMNS}, LEFT(body, {HEAD_BYTES}), '' FROM dead_letter WHERE {SELECTED} ORDER BY id DESC LIMIT ?"
        );
        let mut lent = self.lend().await?;
        lent.unlimited(|connection| async move {
            let query = selected(sqlx::query(AssertSqlSafe(sql)), selection).bind(limit);
            letters_of(&query.fetch_all(connection).await.tried(ACTION)?).tried(ACTION)
        })
        .await
    }

    /// These dead letters, whole, in the order of their ids; those that are not there are left out.
    ///
    /// # Errors
    /// MySQL's.
    pub async fn whole_dead_letters(&self, ids: &[u64]) -> Result<Vec<Letter>> {
        const ACTION: &str = "read dead letters";
        if ids.is_empty() {
            return Ok(Vec::new());
        }
        let sql = format!(
            "SELECT {COLUMNS}, body, headers FROM dead_letter WHERE id IN ({}) ORDER BY id",
            comma_separated(ids)
        );
        let mut lent = self.lend().await?;
        lent.limit(ACTION, |connection| async move {
            let rows = sqlx::raw_sql(AssertSqlSafe(sql)).fetch_all(connection).await.tried(ACTION)?;
            letters_of(&rows).tried(ACTION)
        })
        .await
    }

    /// How many dead letters there are, by reason.
    ///
    /// # Errors
    /// MySQL's.
    pub async fn dead_letter_totals(&self, selection: &Selection) -> Result<Vec<Total>> {
        const ACTION: &str = "count dead letters";
        let sql = format!(
            "SELECT reason, CAST(SUM(replayed_at IS NULL) AS UNSIGNED), CAST(SUM(replayed_at IS NOT NULL) AS UNSIGNED), \
             MIN(first_seen), MAX(first_seen) FROM dead_letter WHERE {SELECTED} GROUP BY reason ORDER BY reason"
        );
        let mut lent = self.lend().await?;
        lent.unlimited(|connection| async move {
            let rows =
                selected(sqlx::query(AssertSqlSafe(sql)), selection).fetch_all(connection).await.tried(ACTION)?;
            let total = |row: &MySqlRow| {
                Ok(Total {
                    reason: row.try_get(0)?,
                    open: row.try_get(1)?,
                    replayed: row.try_get(2)?,
                    oldest: micros(row.try_get(3)?),
                    newest: micros(row.try_get(4)?),
                })
            };
            rows.iter().map(total).collect::<std::result::Result<_, _>>().tried(ACTION)
        })
        .await
    }

    /// The id of the newest dead letter; 0 where there is none.
    ///
    /// # Errors
    /// MySQL's.
    pub async fn newest_dead_letter(&self) -> Result<u64> {
        const ACTION: &str = "look for the newest dead letter";
        let mut lent = self.lend().await?;
        lent.limit(ACTION, |connection| async move {
            let newest: Option<u64> =
                sqlx::query_scalar("SELECT MAX(id) FROM dead_letter").fetch_one(connection).await.tried(ACTION)?;
            Ok(newest.unwrap_or(0))
        })
        .await
    }

    /// Ids of a selection, after one and up to another one, in their order, each with the length of its body.
    ///
    /// # Errors
    /// MySQL's.
    pub async fn dead_letters_after(
        &self,
        selection: &Selection,
        (after, until): (u64, u64),
        limit: u64,
    ) -> Result<Vec<(u64, u64)>> {
        const ACTION: &str = "look for dead letters";
        let sql = format!(
            "SELECT id, LENGTH(body) FROM dead_letter WHERE {SELECTED} AND id > ? AND id <= ? ORDER BY id LIMIT ?"
        );
        let mut lent = self.lend().await?;
        lent.unlimited(|connection| async move {
            let query = selected(sqlx::query(AssertSqlSafe(sql)), selection).bind(after).bind(until).bind(limit);
            sizes_of(&query.fetch_all(connection).await.tried(ACTION)?).tried(ACTION)
        })
        .await
    }

    /// Those of these ids that are there, in their order, each with the length of its body.
    ///
    /// # Errors
    /// MySQL's.
    pub async fn dead_letters_of(&self, ids: &[u64]) -> Result<Vec<(u64, u64)>> {
        const ACTION: &str = "look for dead letters";
        if ids.is_empty() {
            return Ok(Vec::new());
        }
        let sql =
            format!("SELECT id, LENGTH(body) FROM dead_letter WHERE id IN ({}) ORDER BY id", comma_separated(ids));
        let mut lent = self.lend().await?;
        lent.limit(ACTION, |connection| async move {
            let rows = sqlx::raw_sql(AssertSqlSafe(sql)).fetch_all(connection).await.tried(ACTION)?;
            sizes_of(&rows).tried(ACTION)
        })
        .await
    }

    /// Notes that dead letters, each given with how often it had been refused when it was read, were sent again. Returns of how
    /// many that could be noted: one that has been refused since stays open.
    ///
    /// # Errors
    /// MySQL's.
    pub async fn note_replayed(&self, letters: &[(u64, u32)], at: Micros) -> Result<u64> {
        const ACTION: &str = "note what was sent again";
        if letters.is_empty() {
            return Ok(0);
        }
        let ids: Vec<u64> = letters.iter().map(|(id, _)| *id).collect();
        let pairs: Vec<String> = letters.iter().map(|(id, refusals)| format!("({id}, {refusals})")).collect();
        // The first condition is the one that finds them.
        let sql = format!(
            "UPDATE dead_letter SET replayed_at = ? WHERE id IN ({}) AND (id, refusals) IN ({})",
            comma_separated(&ids),
            pairs.join(", ")
        );
        let mut lent = self.lend().await?;
        lent.limit(ACTION, |connection| async move {
            let query = sqlx::query(AssertSqlSafe(sql)).persistent(false).bind(datetime(at));
            // Rows that were found, whether they changed or not.
            Ok(query.execute(connection).await.tried(ACTION)?.rows_affected())
        })
        .await
    }

    /// Deletes those of these dead letters that are in the selection still. Returns how many.
    ///
    /// # Errors
    /// MySQL's.
    pub async fn delete_dead_letters(&self, ids: &[u64], selection: &Selection) -> Result<u64> {
        const ACTION: &str = "delete dead letters";
        if ids.is_empty() {
            return Ok(0);
        }
        let sql = format!("DELETE FROM dead_letter WHERE {SELECTED} AND id IN ({})", comma_separated(ids));
        let mut lent = self.lend().await?;
        lent.limit(ACTION, |connection| async move {
            let query = selected(sqlx::query(AssertSqlSafe(sql)).persistent(false), selection);
            Ok(query.execute(connection).await.tried(ACTION)?.rows_affected())
        })
        .await
    }
}

/// Binds the parameters of [`SELECTED`].
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
            body: row.try_get_unchecked(8)?,
            headers: row.try_get_unchecked(9)?,
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
