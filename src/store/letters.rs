//! What can never be applied, as it is kept until somebody looks at it.

use sqlx::{AssertSqlSafe, MySqlConnection};

use super::{Result, Tried, datetime, in_shapes, placeholders};
use crate::model::Micros;

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

/// Bytes of dead letters that one statement holds at most, beside its last one: far below any `max_allowed_packet`.
const LETTERS_BYTES_MAX: usize = 1 << 20;

/// Keeps dead letters. A redelivered one is kept once; one that was replayed and refused again is open again.
///
/// # Errors
/// MySQL's.
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
                "INSERT INTO dead_letter (body, headers, reason, error, queue, first_seen) VALUES {} \
                 ON DUPLICATE KEY UPDATE replayed_at = NULL, reason = VALUES(reason), error = VALUES(error)",
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
