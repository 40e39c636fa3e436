//! The snapshots of boards that have not been archived: the rows and the state of each snapshot. A run writes only the
//! rows that have changed. Every write is fenced, as for the archive: its transaction checks that the run still holds
//! the job's lock.

use std::collections::HashSet;
use std::fmt::Write;

use chrono::NaiveDateTime;
use sqlx::mysql::MySqlRow;
use sqlx::{AssertSqlSafe, Row};
use tallyd_core::archive::Snapshot;
use tallyd_core::model::{BoardMember, BoardPeriod, Micros};

use super::archive_rows::hex;
use super::boards::begin;
use super::{Context, Result, Store, datetime, in_shapes, micros, placeholders};

const DELETE_ROWS_MAX: usize = 1_000;

#[derive(Clone, Debug, PartialEq)]
pub struct Saved {
    pub member: BoardMember,
    pub primary: f64,
    /// The number that orders members with equal primary numbers, or zero if the score contains no such number.
    pub second: u64,
}

impl Store {
    pub async fn snapshots(&self) -> Result<Vec<(BoardPeriod, Snapshot)>> {
        const ACTION: &str = "list snapshots of boards";
        let mut conn = self.acquire().await?;
        conn.limit(ACTION, |connection| async move {
            let rows = sqlx::query(
                "SELECT number, generation, members, began_at, taken_at, board, period FROM leaderboard_snapshot_period \
                 ORDER BY board, period DESC",
            )
            .fetch_all(connection)
            .await
            .context(ACTION)?;
            let read = |row: &MySqlRow| {
                let at = BoardPeriod { board: row.try_get(5)?, period: row.try_get(6)? };
                Ok((at, read_snapshot(row)?))
            };
            rows.iter().map(read).collect::<std::result::Result<_, sqlx::Error>>().context(ACTION)
        })
        .await
    }

    pub async fn snapshot(&self, at: &BoardPeriod) -> Result<Option<Snapshot>> {
        const ACTION: &str = "read a snapshot's state";
        let mut conn = self.acquire().await?;
        conn.limit(ACTION, |connection| async move {
            let row = sqlx::query(
                "SELECT number, generation, members, began_at, taken_at FROM leaderboard_snapshot_period \
                 WHERE board = ? AND period = ?",
            )
            .bind(&at.board)
            .bind(&at.period)
            .fetch_optional(connection)
            .await
            .context(ACTION)?;
            row.as_ref().map(read_snapshot).transpose().context(ACTION)
        })
        .await
    }

    /// Records that `run` begins a snapshot of a board. Redis must already contain the mark of `run` for this board.
    pub async fn begin_snapshot(&self, run: u64, at: &BoardPeriod, generation: u64, now: Micros) -> Result<()> {
        const SQL: &str = "INSERT INTO leaderboard_snapshot_period (number, generation, began_at, board, period) \
                           VALUES (?, ?, ?, ?, ?) ON DUPLICATE KEY UPDATE number = VALUES(number), \
                               generation = VALUES(generation), began_at = VALUES(began_at)";
        self.note("begin a snapshot", run, at, sqlx::query(SQL).bind(run).bind(generation).bind(datetime(now))).await
    }

    pub async fn save_members(&self, run: u64, at: &BoardPeriod, members: &[Saved]) -> Result<()> {
        const ACTION: &str = "save a page of a board";
        if members.is_empty() {
            return Ok(());
        }
        let mut conn = self.acquire().await?;
        conn.limit(ACTION, |connection| async move {
            let mut tx = begin(connection, run, ACTION).await?;
            sqlx::raw_sql(AssertSqlSafe(upsert(at, members))).execute(&mut *tx).await.context(ACTION)?;
            tx.commit().await.context(ACTION)
        })
        .await
    }

    pub async fn saved_page(&self, at: &BoardPeriod, after: Option<&[u8]>, limit: usize) -> Result<Vec<BoardMember>> {
        const ACTION: &str = "read a snapshot";
        let mut conn = self.acquire().await?;
        conn.limit(ACTION, |connection| async move {
            let sql = match after {
                None => {
                    "SELECT member, score FROM leaderboard_snapshot WHERE board = ? AND period = ? \
                         ORDER BY member LIMIT ?"
                }
                Some(_) => {
                    "SELECT member, score FROM leaderboard_snapshot WHERE board = ? AND period = ? \
                            AND member > ? ORDER BY member LIMIT ?"
                }
            };
            let query = sqlx::query(sql).bind(&at.board).bind(&at.period);
            let query = if let Some(after) = after { query.bind(after) } else { query };
            let rows = query.bind(limit as u64).fetch_all(connection).await.context(ACTION)?;
            rows.iter().map(read_member).collect::<std::result::Result<_, sqlx::Error>>().context(ACTION)
        })
        .await
    }

    pub async fn saved_among(&self, at: &BoardPeriod, members: &[Saved]) -> Result<HashSet<Vec<u8>>> {
        const ACTION: &str = "find members of a snapshot";
        let names: Vec<String> = members.iter().map(|saved| hex(&saved.member.member)).collect();
        let sql = format!(
            "SELECT member FROM leaderboard_snapshot WHERE board = _utf8mb4 {} AND period = _utf8mb4 {} \
             AND member IN ({})",
            hex(at.board.as_bytes()),
            hex(at.period.as_bytes()),
            names.join(",")
        );
        let mut conn = self.acquire().await?;
        conn.limit(ACTION, |connection| async move {
            let rows = sqlx::raw_sql(AssertSqlSafe(sql)).fetch_all(connection).await.context(ACTION)?;
            rows.iter()
                .map(|row| row.try_get_unchecked(0))
                .collect::<std::result::Result<_, sqlx::Error>>()
                .context(ACTION)
        })
        .await
    }

    pub async fn forget_members(&self, run: u64, at: &BoardPeriod, members: &[Vec<u8>]) -> Result<()> {
        const ACTION: &str = "delete members that left a board";
        let mut conn = self.acquire().await?;
        conn.limit(ACTION, |connection| async move {
            let mut tx = begin(connection, run, ACTION).await?;
            for piece in in_shapes(members) {
                let sql = format!(
                    "DELETE FROM leaderboard_snapshot WHERE board = ? AND period = ? AND member IN {}",
                    placeholders(1, piece.len())
                );
                let query = sqlx::query(AssertSqlSafe(sql)).bind(&at.board).bind(&at.period);
                let query = piece.iter().fold(query, |query, member| query.bind(member));
                query.execute(&mut *tx).await.context(ACTION)?;
            }
            tx.commit().await.context(ACTION)
        })
        .await
    }

    pub async fn note_tried(&self, run: u64, at: &BoardPeriod, now: Micros) -> Result<()> {
        const SQL: &str = "UPDATE leaderboard_snapshot_period SET began_at = ? WHERE board = ? AND period = ?";
        self.note("record that a snapshot was tried", run, at, sqlx::query(SQL).bind(datetime(now))).await
    }

    pub async fn note_generation(&self, run: u64, at: &BoardPeriod, generation: u64) -> Result<()> {
        const SQL: &str = "UPDATE leaderboard_snapshot_period SET generation = ? WHERE board = ? AND period = ?";
        self.note("record that a board is restored", run, at, sqlx::query(SQL).bind(generation)).await
    }

    pub async fn best_saved(&self, at: &BoardPeriod, limit: u64) -> Result<Vec<BoardMember>> {
        const ACTION: &str = "read the best members of a snapshot";
        let mut conn = self.acquire().await?;
        conn.limit(ACTION, |connection| async move {
            let rows = sqlx::query(
                "SELECT member, score FROM leaderboard_snapshot WHERE board = ? AND period = ? \
                 ORDER BY primary_value DESC, second_value DESC, member DESC LIMIT ?",
            )
            .bind(&at.board)
            .bind(&at.period)
            .bind(limit)
            .fetch_all(connection)
            .await
            .context(ACTION)?;
            rows.iter().map(read_member).collect::<std::result::Result<_, sqlx::Error>>().context(ACTION)
        })
        .await
    }

    pub async fn saved_sum(&self, at: &BoardPeriod) -> Result<f64> {
        const ACTION: &str = "add up a snapshot";
        const SQL: &str =
            "SELECT COALESCE(SUM(primary_value), 0E0) FROM leaderboard_snapshot WHERE board = ? AND period = ?";
        let mut conn = self.acquire().await?;
        conn.limit(ACTION, |connection| async move {
            let query = sqlx::query_scalar(SQL).bind(&at.board).bind(&at.period);
            query.fetch_one(connection).await.context(ACTION)
        })
        .await
    }

    pub async fn end_snapshot(&self, run: u64, at: &BoardPeriod, members: u64, now: Micros) -> Result<()> {
        const SQL: &str =
            "UPDATE leaderboard_snapshot_period SET members = ?, taken_at = ? WHERE board = ? AND period = ?";
        self.note("end a snapshot", run, at, sqlx::query(SQL).bind(members).bind(datetime(now))).await
    }

    pub async fn obsolete_snapshots(&self) -> Result<Vec<BoardPeriod>> {
        const ACTION: &str = "list snapshots of archived boards";
        let mut conn = self.acquire().await?;
        conn.limit(ACTION, |connection| async move {
            let rows = sqlx::query(
                "SELECT board, period FROM leaderboard_snapshot_period JOIN leaderboard_period USING (board, period) \
                 WHERE state <> 'frozen' ORDER BY board, period",
            )
            .fetch_all(connection)
            .await
            .context(ACTION)?;
            let read = |row: &MySqlRow| Ok(BoardPeriod { board: row.try_get(0)?, period: row.try_get(1)? });
            rows.iter().map(read).collect::<std::result::Result<_, sqlx::Error>>().context(ACTION)
        })
        .await
    }

    pub async fn void_snapshot(&self, run: u64, at: &BoardPeriod) -> Result<()> {
        const SQL: &str =
            "UPDATE leaderboard_snapshot_period SET taken_at = NULL, members = 0 WHERE board = ? AND period = ?";
        self.note("make a snapshot void", run, at, sqlx::query(SQL)).await
    }

    /// In the order of members, behind `after`. If no rows are left, deletes the snapshot's row in
    /// `leaderboard_snapshot_period` and returns `None`.
    pub async fn forget_snapshot(&self, run: u64, at: &BoardPeriod, after: Option<&[u8]>) -> Result<Option<Vec<u8>>> {
        const ACTION: &str = "delete a snapshot";
        let page = self.saved_page(at, after, DELETE_ROWS_MAX).await?;
        let mut conn = self.acquire().await?;
        conn.limit(ACTION, |connection| async move {
            let mut tx = begin(connection, run, ACTION).await?;
            let (Some(first), Some(last)) = (page.first(), page.last()) else {
                sqlx::query("DELETE FROM leaderboard_snapshot_period WHERE board = ? AND period = ?")
                    .bind(&at.board)
                    .bind(&at.period)
                    .execute(&mut *tx)
                    .await
                    .context(ACTION)?;
                tx.commit().await.context(ACTION)?;
                return Ok(None);
            };
            sqlx::query("DELETE FROM leaderboard_snapshot WHERE board = ? AND period = ? AND member BETWEEN ? AND ?")
                .bind(&at.board)
                .bind(&at.period)
                .bind(&first.member)
                .bind(&last.member)
                .execute(&mut *tx)
                .await
                .context(ACTION)?;
            tx.commit().await.context(ACTION)?;
            Ok(Some(last.member.clone()))
        })
        .await
    }
}

fn read_member(row: &MySqlRow) -> std::result::Result<BoardMember, sqlx::Error> {
    Ok(BoardMember { member: row.try_get_unchecked(0)?, score: row.try_get_unchecked(1)? })
}

fn read_snapshot(row: &MySqlRow) -> std::result::Result<Snapshot, sqlx::Error> {
    let (number, generation, members) = (row.try_get(0)?, row.try_get(1)?, row.try_get(2)?);
    let taken_at = row.try_get::<Option<NaiveDateTime>, _>(4)?.map(micros);
    Ok(Snapshot { number, generation, members, began_at: micros(row.try_get(3)?), taken_at })
}

fn upsert(at: &BoardPeriod, members: &[Saved]) -> String {
    let (board, period) = (hex(at.board.as_bytes()), hex(at.period.as_bytes()));
    let mut sql =
        "INSERT INTO leaderboard_snapshot (board, period, member, score, primary_value, second_value) VALUES "
            .to_owned();
    for Saved { member: BoardMember { member, score }, primary, second } in members {
        // Writing to a String cannot fail.
        let _ = write!(sql, "({board},{period},{},{score:e},{primary:e},{second}),", hex(member));
    }
    sql.pop();
    sql.push_str(
        " ON DUPLICATE KEY UPDATE score = VALUES(score), primary_value = VALUES(primary_value), \
         second_value = VALUES(second_value)",
    );
    sql
}
