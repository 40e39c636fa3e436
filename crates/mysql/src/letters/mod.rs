//! Stores dead letters in MySQL. A dead letter is a message that can never be applied (decision 0013).

mod select;

use std::sync::Arc;

use sqlx::{AssertSqlSafe, Connection, MySqlConnection};
use tallyd_connect::fault;
use tallyd_core::model::Micros;

pub use select::{HEAD_BYTES, Letter, Selection, Total};

use super::{Context, Result, Store, datetime, in_shapes, placeholders};

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeadLetter {
    pub body: Vec<u8>,
    pub headers: Arc<str>,
    /// A hash that tells letters with equal bodies apart, or empty.
    pub apart: String,
    pub reason: &'static str,
    pub error: String,
    pub queue: String,
    pub first_seen: Micros,
}

/// If the dead letters in an INSERT statement have this number of bytes, the daemon adds no further dead letter. The
/// last dead letter can have any size. The limit is far below the usual values of `max_allowed_packet`.
const LETTERS_BYTES_MAX: usize = 1 << 20;

/// Stores dead letters. If the broker delivers a letter again, the letter is still stored once. If a letter was
/// replayed and refused again, the letter becomes open again.
pub async fn keep_dead_letters(connection: &mut MySqlConnection, letters: &[DeadLetter]) -> Result<()> {
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
                "INSERT INTO dead_letter (body, headers, apart, reason, error, queue, first_seen) VALUES {} \
                 ON DUPLICATE KEY UPDATE replayed_at = NULL, reason = VALUES(reason), error = VALUES(error), \
                 refusals = dead_letter.refusals + 1",
                placeholders(part.len(), 7)
            );
            // If a piece is split because of large letters, the parts have many different lengths. So it is not worth
            // caching their statements.
            let mut query = sqlx::query(AssertSqlSafe(sql)).persistent(part.len() == piece.len());
            for letter in part {
                query = query.bind(&letter.body).bind(&*letter.headers).bind(&letter.apart).bind(letter.reason);
                query = query.bind(&letter.error).bind(&letter.queue).bind(datetime(letter.first_seen));
            }
            query.execute(&mut *connection).await.context("store dead letters")?;
        }
    }
    Ok(())
}

/// Counts the open dead letters from this queue. The count ends at `most`. This query reads only an index.
pub async fn open_of(connection: &mut MySqlConnection, queue: &str, most: u64) -> Result<u64> {
    let sql = "SELECT CAST(COUNT(*) AS UNSIGNED) FROM \
               (SELECT 1 FROM dead_letter WHERE replayed_at IS NULL AND queue = ? LIMIT ?) AS those";
    sqlx::query_scalar(sql).bind(queue).bind(most).fetch_one(connection).await.context("count open dead letters")
}

impl Store {
    /// Counts the open dead letters for each queue and reason. This query reads only an index.
    pub async fn open_dead_letters(&self) -> Result<Vec<(String, String, u64)>> {
        const ACTION: &str = "count open dead letters";
        let mut conn = self.acquire().await?;
        conn.limit(ACTION, |connection| async move {
            let sql = "SELECT queue, reason, CAST(COUNT(*) AS UNSIGNED) FROM dead_letter WHERE replayed_at IS NULL \
                       GROUP BY queue, reason";
            sqlx::query_as(sql).fetch_all(connection).await.context(ACTION)
        })
        .await
    }

    /// Fails if this account cannot store dead letters, or if the server is read-only. Changes nothing.
    pub async fn may_keep_dead_letters(&self) -> Result<()> {
        const ACTION: &str = "check that dead letters can be stored";
        let mut conn = self.acquire().await?;
        conn.limit(ACTION, |connection| async move {
            let sql = "INSERT INTO dead_letter (body, headers, reason, error, queue, first_seen) \
                       SELECT body, headers, reason, error, queue, first_seen FROM dead_letter AS of_none WHERE id = 0 \
                       ON DUPLICATE KEY UPDATE refusals = dead_letter.refusals + 1";
            sqlx::query(sql).execute(connection).await.context(ACTION).map(drop)
        })
        .await
    }

    pub async fn keep_dead_letters(&self, letters: &[DeadLetter]) -> Result<()> {
        const ACTION: &str = "store dead letters";
        let mut conn = self.acquire().await?;
        conn.limit(ACTION, |connection| async move {
            let mut tx = connection.begin().await.context(ACTION)?;
            keep_dead_letters(&mut tx, letters).await?;
            fault::point("dead:returned-before-commit");
            tx.commit().await.context(ACTION)?;
            fault::point("dead:returned-after-commit");
            Ok(())
        })
        .await
    }
}
