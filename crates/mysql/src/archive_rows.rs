//! Writes, reads and deletes the rows of archived boards.

use std::fmt::Write;

use sqlx::mysql::MySqlRow;
use sqlx::{AssertSqlSafe, Connection, Row};
use tallyd_core::archive::{PeriodRow, PeriodState};
use tallyd_core::model::{BoardMember, BoardPeriod};
use tallyd_core::ranks::{Before, Placed, Ranking, place};

use super::boards::{JOB, begin};
use super::conn::TRIES;
use super::{Context, Result, Store, jobs};

/// The maximum number of rows that one statement deletes. This limit keeps the transaction short.
const TRIM_ROWS_MAX: u64 = 1_000;

const STATEMENT_ROWS: usize = 1_000;

pub struct Places(Vec<String>);

impl Places {
    pub fn new(at: &BoardPeriod, copy: u8, first_place: u64, members: &[BoardMember]) -> Self {
        let pieces = (first_place..).step_by(STATEMENT_ROWS).zip(members.chunks(STATEMENT_ROWS));
        Self(pieces.map(|(first, piece)| insert_places(at, copy, first, piece)).collect())
    }
}

#[derive(Clone, Debug, PartialEq)]
pub enum Archived {
    Page { members: u64, placed: Vec<Placed> },
    Pruned,
    Frozen,
    Absent,
}

impl Store {
    pub async fn read_archived(&self, at: &BoardPeriod, after: u64, count: u64, ranking: Ranking) -> Result<Archived> {
        let most = usize::try_from(count).unwrap_or(usize::MAX);
        let mut known = self.board_period(at).await?;
        loop {
            let (copy, members) = match known {
                None => return Ok(Archived::Absent),
                Some(row) if row.state == PeriodState::Pruned => return Ok(Archived::Pruned),
                Some(PeriodRow { copy: None, .. }) => return Ok(Archived::Frozen),
                Some(PeriodRow { copy: Some(copy), tally, .. }) => (copy, tally.members),
            };
            let rows = self.archived_page(at, copy, after, most).await?;
            if rows.is_empty() && after < members && most > 0 {
                // A run can have verified another copy meanwhile, and deleted the rows of this one.
                let now = self.board_period(at).await?;
                if now != known {
                    known = now;
                    continue;
                }
            }
            let page: Vec<BoardMember> = rows.into_iter().map(|(_, member)| member).collect();
            let mut before = Before { members: after, ..Before::default() };
            if let (Some(first), 1.., Ranking::Competition | Ranking::Dense) = (page.first(), after, ranking) {
                (before.higher, before.distinct) = self.archived_before(at, copy, after, first.score).await?;
            }
            return Ok(Archived::Page { members, placed: place(ranking, before, page) });
        }
    }

    pub async fn copy_places(&self, run: u64, places: Places) -> Result<()> {
        // The compiler rejects `Store::tried` in a spawned task, because it cannot prove that its closure is `Send`.
        for _ in 1..TRIES {
            match self.try_copy(run, &places).await {
                Err(error) if error.is_contention() || error.is_lock_timeout() => {}
                ended => return ended,
            }
        }
        self.try_copy(run, &places).await
    }

    async fn try_copy(&self, run: u64, places: &Places) -> Result<()> {
        const ACTION: &str = "copy a page of a board";
        let mut conn = self.acquire().await?;
        conn.limit(ACTION, |connection| async move {
            let mut tx = connection.begin().await.context(ACTION)?;
            for sql in &places.0 {
                sqlx::raw_sql(AssertSqlSafe(sql.clone())).execute(&mut *tx).await.context(ACTION)?;
            }
            // If the job's row were locked first, the parallel transactions of a run would wait for each other. Nothing
            // is committed without this lock, and the lock ends with the commit.
            jobs::require_lock(&mut tx, JOB, run).await?;
            tx.commit().await.context(ACTION)
        })
        .await
    }

    pub async fn last_place(&self, at: &BoardPeriod, copy: u8) -> Result<u64> {
        const ACTION: &str = "read a board's last place";
        let mut conn = self.acquire().await?;
        conn.limit(ACTION, |connection| async move {
            let sql = "SELECT MAX(place) FROM leaderboard_archive WHERE board = ? AND period = ? AND copy = ?";
            let last: Option<u32> = sqlx::query_scalar(sql)
                .bind(&at.board)
                .bind(&at.period)
                .bind(copy)
                .fetch_one(connection)
                .await
                .context(ACTION)?;
            Ok(last.map_or(0, u64::from))
        })
        .await
    }

    pub async fn trim_places(&self, run: u64, at: &BoardPeriod, copy: u8, after: u64, last: u64) -> Result<u64> {
        const ACTION: &str = "delete places beyond a board's end";
        let until = last.min(after + TRIM_ROWS_MAX);
        let mut conn = self.acquire().await?;
        conn.limit(ACTION, |connection| async move {
            let mut tx = begin(connection, run, ACTION).await?;
            let sql =
                "DELETE FROM leaderboard_archive WHERE board = ? AND period = ? AND copy = ? AND place BETWEEN ? AND ?";
            sqlx::query(sql)
                .bind(&at.board)
                .bind(&at.period)
                .bind(copy)
                .bind(after + 1)
                .bind(until)
                .execute(&mut *tx)
                .await
                .context(ACTION)?;
            tx.commit().await.context(ACTION)?;
            Ok(until)
        })
        .await
    }

    async fn archived_before(&self, at: &BoardPeriod, copy: u8, after: u64, score: f64) -> Result<(u64, u64)> {
        const ACTION: &str = "count the places before a page";
        let mut conn = self.acquire().await?;
        conn.limit(ACTION, |connection| async move {
            let (higher, distinct): (i64, i64) = sqlx::query_as(
                "SELECT COUNT(*), COUNT(DISTINCT score) FROM leaderboard_archive \
                 WHERE board = ? AND period = ? AND copy = ? AND place <= ? AND score > ?",
            )
            .bind(&at.board)
            .bind(&at.period)
            .bind(copy)
            .bind(after)
            .bind(score)
            .fetch_one(connection)
            .await
            .context(ACTION)?;
            Ok((higher.unsigned_abs(), distinct.unsigned_abs()))
        })
        .await
    }

    /// Returns the members of one copy with their places, in order. Skips the places up to `after` (0 skips no place).
    pub async fn archived_page(
        &self,
        at: &BoardPeriod,
        copy: u8,
        after: u64,
        members: usize,
    ) -> Result<Vec<(u64, BoardMember)>> {
        const ACTION: &str = "read an archived board";
        let mut conn = self.acquire().await?;
        conn.limit(ACTION, |connection| async move {
            let rows = sqlx::query(
                "SELECT place, member, score FROM leaderboard_archive \
                 WHERE board = ? AND period = ? AND copy = ? AND place > ? ORDER BY place LIMIT ?",
            )
            .bind(&at.board)
            .bind(&at.period)
            .bind(copy)
            .bind(after)
            .bind(members as u64)
            .fetch_all(connection)
            .await
            .context(ACTION)?;
            let read = |row: &MySqlRow| {
                // Reads without type checks, because such reads are faster and there can be a million rows.
                let member = BoardMember { member: row.try_get_unchecked(1)?, score: row.try_get_unchecked(2)? };
                Ok((u64::from(row.try_get_unchecked::<u32, _>(0)?), member))
            };
            rows.iter().map(read).collect::<std::result::Result<_, sqlx::Error>>().context(ACTION)
        })
        .await
    }
}

/// As text, without preparing it: members are in hexadecimal, so nothing needs quoting. Scores have the fewest digits
/// that represent them exactly.
fn insert_places(at: &BoardPeriod, copy: u8, first_place: u64, members: &[BoardMember]) -> String {
    let (board, period) = (hex(at.board.as_bytes()), hex(at.period.as_bytes()));
    let mut sql = "INSERT INTO leaderboard_archive (board, period, copy, place, member, score) VALUES ".to_owned();
    for (place, BoardMember { member, score }) in (first_place..).zip(members) {
        // Writing to a String cannot fail.
        let _ = write!(sql, "({board},{period},{copy},{place},");
        push_hex(&mut sql, member);
        let _ = write!(sql, ",{score:e}),");
    }
    sql.pop();
    sql.push_str(" ON DUPLICATE KEY UPDATE member = VALUES(member), score = VALUES(score)");
    sql
}

pub(super) fn hex(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(bytes.len() * 2 + 3);
    push_hex(&mut text, bytes);
    text
}

/// Rust's formatter would take three times as long, and this function writes millions of members.
fn push_hex(text: &mut String, bytes: &[u8]) {
    const DIGITS: [char; 16] = ['0', '1', '2', '3', '4', '5', '6', '7', '8', '9', 'a', 'b', 'c', 'd', 'e', 'f'];
    text.push_str("x'");
    for byte in bytes {
        for digit in [byte >> 4, byte & 15] {
            text.push(DIGITS.get(usize::from(digit)).copied().unwrap_or_default());
        }
    }
    text.push('\'');
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn members_of_any_bytes_and_scores_of_any_size_are_written_as_they_are() {
        let at = BoardPeriod { board: "likes".to_owned(), period: "2026-W47".to_owned() };
        let member = |member: &[u8], score| BoardMember { member: member.to_vec(), score };
        let members = [member(b"a'\\\0\xff", 0.1), member(b"", 9_007_199_254_740_991.0), member(b"m", -1e300)];
        assert_eq!(
            insert_places(&at, 1, 7, &members),
            "INSERT INTO leaderboard_archive (board, period, copy, place, member, score) VALUES \
             (x'6c696b6573',x'323032362d573437',1,7,x'61275c00ff',1e-1),\
             (x'6c696b6573',x'323032362d573437',1,8,x'',9.007199254740991e15),\
             (x'6c696b6573',x'323032362d573437',1,9,x'6d',-1e300) \
             ON DUPLICATE KEY UPDATE member = VALUES(member), score = VALUES(score)"
        );
    }
}
