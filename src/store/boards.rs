//! The archive of boards: the rows of closed periods, and how far each has come. Every write is fenced: it checks in
//! its own transaction that the job's lock still names its run.

use std::fmt::Write;

use chrono::NaiveDateTime;
use sqlx::mysql::MySqlRow;
use sqlx::{AssertSqlSafe, Connection, MySql, MySqlConnection, Row, Transaction};

use super::{Result, Store, Tried, datetime, jobs, micros};
use crate::model::{BoardMember, BoardPeriod, Micros};

/// The job whose lock fences the archive.
pub const JOB: &str = "archive";

/// Rows that one statement deletes at most: so that its transaction stays short.
const TRIM_ROWS_MAX: u64 = 1_000;

/// Rows that one statement writes.
const STATEMENT_ROWS: usize = 1_000;

/// How far a closed period has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PeriodState {
    /// Its zset is frozen; its rows may be missing, or of an earlier copy.
    Frozen,
    /// Its rows are the whole board: verified.
    Done,
    /// Done, and gone from Redis.
    Ended,
}

/// What the rows of a board come to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// How many there are.
    pub members: u64,
    /// Over members and scores, in any order.
    pub checksum: u64,
}

/// A row of `leaderboard_period`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeriodRow {
    /// How far it has come.
    pub state: PeriodState,
    /// As it was verified the last time; zeros before that.
    pub tally: Tally,
    /// When it was verified the last time.
    pub done_at: Option<Micros>,
}

impl PeriodState {
    /// Its name.
    pub fn text(self) -> &'static str {
        match self {
            Self::Frozen => "frozen",
            Self::Done => "done",
            Self::Ended => "ended",
        }
    }
}

impl Store {
    /// The closed periods that are begun and not ended: as many as fit into the boards' `expire_after`.
    ///
    /// # Errors
    /// MySQL's.
    pub async fn unfinished_periods(&self) -> Result<Vec<BoardPeriod>> {
        const ACTION: &str = "list boards that are not finished";
        let mut lent = self.lend().await?;
        lent.limit(ACTION, |connection| async move {
            let rows = sqlx::query(
                "SELECT board, period FROM leaderboard_period WHERE state <> 'ended' ORDER BY board, period DESC",
            )
            .fetch_all(connection)
            .await
            .tried(ACTION)?;
            let read = |row: &MySqlRow| Ok(BoardPeriod { board: row.try_get(0)?, period: row.try_get(1)? });
            rows.iter().map(read).collect::<std::result::Result<_, sqlx::Error>>().tried(ACTION)
        })
        .await
    }

    /// How far the period has come; none where it was never frozen.
    ///
    /// # Errors
    /// MySQL's.
    pub async fn board_period(&self, at: &BoardPeriod) -> Result<Option<PeriodRow>> {
        let mut lent = self.lend().await?;
        lent.limit("read how far a board is", |connection| read_period(connection, at)).await
    }

    /// The latest periods of the board that were frozen, at most `limit` of them, newest first.
    ///
    /// # Errors
    /// MySQL's.
    pub async fn board_periods(&self, board: &str, limit: usize) -> Result<Vec<(BoardPeriod, PeriodRow)>> {
        const ACTION: &str = "list a board's periods";
        let mut lent = self.lend().await?;
        lent.limit(ACTION, |connection| async move {
            let rows = sqlx::query(
                "SELECT state, members, checksum, done_at, period FROM leaderboard_period WHERE board = ? \
                 ORDER BY frozen_at DESC, period DESC LIMIT ?",
            )
            .bind(board)
            .bind(limit as u64)
            .fetch_all(connection)
            .await
            .tried(ACTION)?;
            let read = |row: &MySqlRow| {
                let at = BoardPeriod { board: board.to_owned(), period: row.try_get(4)? };
                Ok((at, read_row(row)?))
            };
            rows.iter().map(read).collect::<std::result::Result<_, sqlx::Error>>().tried(ACTION)
        })
        .await
    }

    /// The same, for a run that will change it.
    ///
    /// # Errors
    /// MySQL's; [`super::StoreError::TakenOver`].
    pub async fn held_board_period(&self, run: u64, at: &BoardPeriod) -> Result<Option<PeriodRow>> {
        const ACTION: &str = "read how far a board is";
        let mut lent = self.lend().await?;
        lent.limit(ACTION, |connection| async move {
            let mut tx = begin(connection, run, ACTION).await?;
            let row = read_period(&mut tx, at).await?;
            tx.commit().await.tried(ACTION)?;
            Ok(row)
        })
        .await
    }

    /// Checks that the run still holds the job.
    ///
    /// # Errors
    /// MySQL's; [`super::StoreError::TakenOver`].
    pub async fn check_archive_run(&self, run: u64) -> Result<()> {
        const ACTION: &str = "check the archiver's lock";
        let mut lent = self.lend().await?;
        lent.limit(
            ACTION,
            |connection| async move { begin(connection, run, ACTION).await?.commit().await.tried(ACTION) },
        )
        .await
    }

    /// Notes that the period is frozen: for the first time, or again because something came late.
    ///
    /// # Errors
    /// MySQL's; [`super::StoreError::TakenOver`].
    pub async fn note_frozen(&self, run: u64, at: &BoardPeriod, now: Micros) -> Result<()> {
        const ACTION: &str = "note that a board is frozen";
        let mut lent = self.lend().await?;
        lent.limit(ACTION, |connection| async move {
            let mut tx = begin(connection, run, ACTION).await?;
            sqlx::query(
                "INSERT INTO leaderboard_period (board, period, state, frozen_at) VALUES (?, ?, ?, ?) \
                 ON DUPLICATE KEY UPDATE state = VALUES(state)",
            )
            .bind(&at.board)
            .bind(&at.period)
            .bind(PeriodState::Frozen.text())
            .bind(datetime(now))
            .execute(&mut *tx)
            .await
            .tried(ACTION)?;
            tx.commit().await.tried(ACTION)
        })
        .await
    }

    /// Writes `members` to the places from `first_place` (1 is the best) on, over whatever stood there.
    ///
    /// # Errors
    /// MySQL's; [`super::StoreError::TakenOver`].
    pub async fn copy_places(
        &self,
        run: u64,
        at: &BoardPeriod,
        first_place: u64,
        members: &[BoardMember],
    ) -> Result<()> {
        const ACTION: &str = "copy a page of a board";
        let mut lent = self.lend().await?;
        lent.limit(ACTION, |connection| async move {
            let mut tx = begin(connection, run, ACTION).await?;
            for (first, piece) in (first_place..).step_by(STATEMENT_ROWS).zip(members.chunks(STATEMENT_ROWS)) {
                let sql = insert_places(at, first, piece);
                sqlx::raw_sql(AssertSqlSafe(sql)).execute(&mut *tx).await.tried(ACTION)?;
            }
            tx.commit().await.tried(ACTION)
        })
        .await
    }

    /// Deletes some of the places beyond `members`, which an earlier copy left; says how many. Zero means none is left.
    ///
    /// # Errors
    /// MySQL's; [`super::StoreError::TakenOver`].
    pub async fn trim_places(&self, run: u64, at: &BoardPeriod, members: u64) -> Result<u64> {
        const ACTION: &str = "delete places beyond a board's end";
        let mut lent = self.lend().await?;
        lent.limit(ACTION, |connection| async move {
            let mut tx = begin(connection, run, ACTION).await?;
            let deleted = sqlx::query(
                "DELETE FROM leaderboard_archive WHERE board = ? AND period = ? AND place > ? ORDER BY place LIMIT ?",
            )
            .bind(&at.board)
            .bind(&at.period)
            .bind(members)
            .bind(TRIM_ROWS_MAX)
            .execute(&mut *tx)
            .await
            .tried(ACTION)?;
            tx.commit().await.tried(ACTION)?;
            Ok(deleted.rows_affected())
        })
        .await
    }

    /// The archived places after `after` (0 for all), in order, with their members.
    ///
    /// # Errors
    /// MySQL's.
    pub async fn archived_page(&self, at: &BoardPeriod, after: u64, members: usize) -> Result<Vec<(u64, BoardMember)>> {
        const ACTION: &str = "read an archived board";
        let mut lent = self.lend().await?;
        lent.limit(ACTION, |connection| async move {
            let rows = sqlx::query(
                "SELECT place, member, score FROM leaderboard_archive \
                 WHERE board = ? AND period = ? AND place > ? ORDER BY place LIMIT ?",
            )
            .bind(&at.board)
            .bind(&at.period)
            .bind(after)
            .bind(members as u64)
            .fetch_all(connection)
            .await
            .tried(ACTION)?;
            let read = |row: &MySqlRow| {
                // Unchecked: a million rows are read like this.
                let member = BoardMember { member: row.try_get_unchecked(1)?, score: row.try_get_unchecked(2)? };
                Ok((u64::from(row.try_get_unchecked::<u32, _>(0)?), member))
            };
            rows.iter().map(read).collect::<std::result::Result<_, sqlx::Error>>().tried(ACTION)
        })
        .await
    }

    /// Notes that the rows were verified, and what they come to.
    ///
    /// # Errors
    /// MySQL's; [`super::StoreError::TakenOver`].
    pub async fn note_done(&self, run: u64, at: &BoardPeriod, tally: Tally, now: Micros) -> Result<()> {
        const ACTION: &str = "note that a board is archived";
        let mut lent = self.lend().await?;
        lent.limit(ACTION, |connection| async move {
            let mut tx = begin(connection, run, ACTION).await?;
            sqlx::query(
                "UPDATE leaderboard_period SET state = ?, members = ?, checksum = ?, done_at = ? \
                 WHERE board = ? AND period = ?",
            )
            .bind(PeriodState::Done.text())
            .bind(tally.members)
            .bind(tally.checksum)
            .bind(datetime(now))
            .bind(&at.board)
            .bind(&at.period)
            .execute(&mut *tx)
            .await
            .tried(ACTION)?;
            tx.commit().await.tried(ACTION)
        })
        .await
    }

    /// Notes that the board is gone from Redis.
    ///
    /// # Errors
    /// MySQL's; [`super::StoreError::TakenOver`].
    pub async fn note_ended(&self, run: u64, at: &BoardPeriod, now: Micros) -> Result<()> {
        const ACTION: &str = "note that a board has ended";
        let mut lent = self.lend().await?;
        lent.limit(ACTION, |connection| async move {
            let mut tx = begin(connection, run, ACTION).await?;
            sqlx::query("UPDATE leaderboard_period SET state = ?, ended_at = ? WHERE board = ? AND period = ?")
                .bind(PeriodState::Ended.text())
                .bind(datetime(now))
                .bind(&at.board)
                .bind(&at.period)
                .execute(&mut *tx)
                .await
                .tried(ACTION)?;
            tx.commit().await.tried(ACTION)
        })
        .await
    }
}

/// One statement as text, for which the server prepares nothing. Texts are hexadecimal, so that nothing needs quoting; of a
/// score the shortest digits that give back the very same number.
fn insert_places(at: &BoardPeriod, first_place: u64, members: &[BoardMember]) -> String {
    let (board, period) = (hex(at.board.as_bytes()), hex(at.period.as_bytes()));
    let mut sql = "INSERT INTO leaderboard_archive (board, period, place, member, score) VALUES ".to_owned();
    for (place, BoardMember { member, score }) in (first_place..).zip(members) {
        // A String can't fail.
        let _ = write!(sql, "({board},{period},{place},{},{score:e}),", hex(member));
    }
    sql.pop();
    sql.push_str(" ON DUPLICATE KEY UPDATE member = VALUES(member), score = VALUES(score)");
    sql
}

/// `x'6d31'`.
fn hex(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(bytes.len() * 2 + 3);
    text.push_str("x'");
    for byte in bytes {
        let _ = write!(text, "{byte:02x}");
    }
    text.push('\'');
    text
}

/// A transaction that holds the job's row to its end: nobody can take the job over before the commit.
async fn begin<'c>(
    connection: &'c mut MySqlConnection,
    run: u64,
    action: &'static str,
) -> Result<Transaction<'c, MySql>> {
    let mut tx = connection.begin().await.tried(action)?;
    jobs::hold(&mut tx, JOB, run).await?;
    Ok(tx)
}

async fn read_period(connection: &mut MySqlConnection, at: &BoardPeriod) -> Result<Option<PeriodRow>> {
    const ACTION: &str = "read how far a board is";
    let row =
        sqlx::query("SELECT state, members, checksum, done_at FROM leaderboard_period WHERE board = ? AND period = ?")
            .bind(&at.board)
            .bind(&at.period)
            .fetch_optional(connection)
            .await
            .tried(ACTION)?;
    row.as_ref().map(read_row).transpose().tried(ACTION)
}

/// Reads `state, members, checksum, done_at`.
fn read_row(row: &MySqlRow) -> std::result::Result<PeriodRow, sqlx::Error> {
    let state = match row.try_get::<String, _>(0)?.as_str() {
        "frozen" => PeriodState::Frozen,
        "done" => PeriodState::Done,
        "ended" => PeriodState::Ended,
        other => return Err(sqlx::Error::Decode(format!("leaderboard_period.state is \"{other}\"").into())),
    };
    let tally = Tally { members: row.try_get(1)?, checksum: row.try_get(2)? };
    Ok(PeriodRow { state, tally, done_at: row.try_get::<Option<NaiveDateTime>, _>(3)?.map(micros) })
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
            insert_places(&at, 7, &members),
            "INSERT INTO leaderboard_archive (board, period, place, member, score) VALUES \
             (x'6c696b6573',x'323032362d573437',7,x'61275c00ff',1e-1),\
             (x'6c696b6573',x'323032362d573437',8,x'',9.007199254740991e15),\
             (x'6c696b6573',x'323032362d573437',9,x'6d',-1e300) \
             ON DUPLICATE KEY UPDATE member = VALUES(member), score = VALUES(score)"
        );
    }
}
