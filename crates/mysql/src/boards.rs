//! The archive of boards: the rows of closed periods, and each period's state (decision 0050). Every write is fenced:
//! its transaction checks that the run still holds the job's lock.

use chrono::NaiveDateTime;
use sqlx::mysql::{MySqlArguments, MySqlRow};
use sqlx::query::Query;
use sqlx::{Connection, MySql, MySqlConnection, Row, Transaction};
use tallyd_core::archive::{Done, LATE_MEMBERS_MISSING, PeriodRow, PeriodState};
use tallyd_core::model::{BoardPeriod, Freeze, Micros};
use tallyd_core::tally::Tally;

use super::{Context, Result, Store, datetime, jobs, micros};

/// The archive job. A run must hold this job's lock before the run can write the archive.
pub const JOB: &str = "archive";

impl Store {
    /// Lists the closed periods whose archiving has begun and has not ended. The list stays short, because boards are
    /// deleted from Redis after `expire_after`.
    pub async fn unfinished_periods(&self) -> Result<Vec<BoardPeriod>> {
        const ACTION: &str = "list boards that are not finished";
        let mut conn = self.acquire().await?;
        conn.limit(ACTION, |connection| async move {
            let rows = sqlx::query(
                "SELECT board, period FROM leaderboard_period WHERE state IN ('frozen', 'done') \
                 ORDER BY board, period DESC",
            )
            .fetch_all(connection)
            .await
            .context(ACTION)?;
            let read = |row: &MySqlRow| Ok(BoardPeriod { board: row.try_get(0)?, period: row.try_get(1)? });
            rows.iter().map(read).collect::<std::result::Result<_, sqlx::Error>>().context(ACTION)
        })
        .await
    }

    pub async fn frozen_periods(&self, board: &str) -> Result<Vec<(String, u64, u64)>> {
        const ACTION: &str = "list a board's frozen periods";
        const SQL: &str =
            "SELECT period, generation, note FROM leaderboard_period WHERE board = ? AND state <> 'pruned'";
        let mut conn = self.acquire().await?;
        conn.limit(ACTION, |connection| async move {
            sqlx::query_as(SQL).bind(board).fetch_all(connection).await.context(ACTION)
        })
        .await
    }

    pub async fn board_period(&self, at: &BoardPeriod) -> Result<Option<PeriodRow>> {
        let mut conn = self.acquire().await?;
        conn.limit("read a board's state", |connection| read_period(connection, at)).await
    }

    pub async fn board_periods(&self, board: &str, like: &str, limit: usize) -> Result<Vec<(BoardPeriod, PeriodRow)>> {
        const ACTION: &str = "list a board's periods";
        let mut conn = self.acquire().await?;
        conn.limit(ACTION, |connection| async move {
            let rows = sqlx::query(
                "SELECT state, members, checksum, left_out, done_at, restored_at, copy, generation, note, late_members, period FROM leaderboard_period \
                 WHERE board = ? AND period LIKE ? ORDER BY frozen_at DESC, period DESC LIMIT ?",
            )
            .bind(board)
            .bind(like)
            .bind(limit as u64)
            .fetch_all(connection)
            .await
            .context(ACTION)?;
            let read = |row: &MySqlRow| {
                let at = BoardPeriod { board: board.to_owned(), period: row.try_get(10)? };
                Ok((at, read_row(row)?))
            };
            rows.iter().map(read).collect::<std::result::Result<_, sqlx::Error>>().context(ACTION)
        })
        .await
    }

    pub async fn fenced_board_period(&self, run: u64, at: &BoardPeriod) -> Result<Option<PeriodRow>> {
        const ACTION: &str = "read a board's state";
        let mut conn = self.acquire().await?;
        conn.limit(ACTION, |connection| async move {
            let mut tx = begin(connection, run, ACTION).await?;
            let row = read_period(&mut tx, at).await?;
            tx.commit().await.context(ACTION)?;
            Ok(row)
        })
        .await
    }

    pub async fn check_archive_run(&self, run: u64) -> Result<()> {
        const ACTION: &str = "check the archiver's lock";
        let mut conn = self.acquire().await?;
        conn.limit(
            ACTION,
            |connection| async move { begin(connection, run, ACTION).await?.commit().await.context(ACTION) },
        )
        .await
    }

    pub async fn note_frozen(&self, run: u64, at: &BoardPeriod, generation: u64, now: Micros) -> Result<()> {
        const ACTION: &str = "record that a board is frozen";
        let mut conn = self.acquire().await?;
        conn.limit(ACTION, |connection| async move {
            let mut tx = begin(connection, run, ACTION).await?;
            sqlx::query(
                "INSERT INTO leaderboard_period (board, period, state, generation, frozen_at) VALUES (?, ?, ?, ?, ?) \
                 ON DUPLICATE KEY UPDATE state = VALUES(state)",
            )
            .bind(&at.board)
            .bind(&at.period)
            .bind(PeriodState::Frozen.text())
            .bind(generation)
            .bind(datetime(now))
            .execute(&mut *tx)
            .await
            .context(ACTION)?;
            tx.commit().await.context(ACTION)
        })
        .await
    }

    pub async fn note_late_members_missing(&self, run: u64, at: &BoardPeriod) -> Result<()> {
        const SQL: &str =
            "UPDATE leaderboard_period SET state = 'frozen', late_members = ? WHERE board = ? AND period = ?";
        self.note("record that late members are missing", run, at, sqlx::query(SQL).bind(LATE_MEMBERS_MISSING)).await
    }

    pub async fn note_done(&self, run: u64, at: &BoardPeriod, done: Done, now: Micros) -> Result<()> {
        const SQL: &str = "UPDATE leaderboard_period SET state = 'done', members = ?, checksum = ?, left_out = ?, \
                           copy = ?, generation = ?, note = ?, late_members = ?, done_at = ? WHERE board = ? AND period = ?";
        let Done { tally, left_out, copy, frozen, late_members } = done;
        let query = sqlx::query(SQL).bind(tally.members).bind(tally.checksum).bind(left_out);
        let query = query.bind(copy).bind(frozen.generation).bind(frozen.note.unwrap_or(0));
        let query = query.bind(late_members).bind(datetime(now));
        self.note("record that a board is archived", run, at, query).await
    }

    pub async fn note_ended(&self, run: u64, at: &BoardPeriod, now: Micros) -> Result<()> {
        const SQL: &str = "UPDATE leaderboard_period SET state = 'ended', ended_at = ? WHERE board = ? AND period = ?";
        self.note("record that a board has ended", run, at, sqlx::query(SQL).bind(datetime(now))).await
    }

    pub async fn note_restored(&self, run: u64, at: &BoardPeriod, now: Micros) -> Result<()> {
        const SQL: &str = "UPDATE leaderboard_period SET state = 'done', restored_at = ?, ended_at = NULL, late_members = 0 \
                           WHERE board = ? AND period = ?";
        self.note("record that a board is restored", run, at, sqlx::query(SQL).bind(datetime(now))).await
    }

    pub async fn note_pruned(&self, run: u64, at: &BoardPeriod, now: Micros) -> Result<()> {
        const SQL: &str = "UPDATE leaderboard_period SET state = 'pruned', pruned_at = COALESCE(pruned_at, ?) \
                           WHERE board = ? AND period = ?";
        self.note("record that an archive is pruned", run, at, sqlx::query(SQL).bind(datetime(now))).await
    }

    /// Periods that were deleted from Redis and archived before `until`, or whose pruning has begun. Oldest first.
    pub async fn prunable_periods(
        &self,
        board: &str,
        like: &str,
        until: Micros,
        limit: usize,
    ) -> Result<Vec<BoardPeriod>> {
        const ACTION: &str = "list archives to prune";
        let mut conn = self.acquire().await?;
        conn.limit(ACTION, |connection| async move {
            let periods: Vec<String> = sqlx::query_scalar(
                "SELECT period FROM leaderboard_period AS p WHERE board = ? AND period LIKE ? \
                 AND ((state = 'ended' AND done_at < ?) \
                     OR (state = 'pruned' AND EXISTS (SELECT 1 FROM leaderboard_archive AS a \
                         WHERE a.board = p.board AND a.period = p.period))) \
                 ORDER BY done_at LIMIT ?",
            )
            .bind(board)
            .bind(like)
            .bind(datetime(until))
            .bind(limit as u64)
            .fetch_all(connection)
            .await
            .context(ACTION)?;
            Ok(periods.into_iter().map(|period| BoardPeriod { board: board.to_owned(), period }).collect())
        })
        .await
    }

    pub async fn note(
        &self,
        action: &'static str,
        run: u64,
        at: &BoardPeriod,
        query: Query<'_, MySql, MySqlArguments>,
    ) -> Result<()> {
        let mut conn = self.acquire().await?;
        conn.limit(action, |connection| async move {
            let mut tx = begin(connection, run, action).await?;
            query.bind(&at.board).bind(&at.period).execute(&mut *tx).await.context(action)?;
            tx.commit().await.context(action)
        })
        .await
    }
}

/// Begins a transaction, and locks the job's row until the transaction ends. So no other run can take the job over
/// before the commit.
pub async fn begin<'c>(
    connection: &'c mut MySqlConnection,
    run: u64,
    action: &'static str,
) -> Result<Transaction<'c, MySql>> {
    let mut tx = connection.begin().await.context(action)?;
    jobs::require_lock(&mut tx, JOB, run).await?;
    Ok(tx)
}

async fn read_period(connection: &mut MySqlConnection, at: &BoardPeriod) -> Result<Option<PeriodRow>> {
    const ACTION: &str = "read a board's state";
    let row = sqlx::query(
        "SELECT state, members, checksum, left_out, done_at, restored_at, copy, generation, note, late_members FROM leaderboard_period \
         WHERE board = ? AND period = ?",
    )
    .bind(&at.board)
    .bind(&at.period)
    .fetch_optional(connection)
    .await
    .context(ACTION)?;
    row.as_ref().map(read_row).transpose().context(ACTION)
}

fn read_row(row: &MySqlRow) -> std::result::Result<PeriodRow, sqlx::Error> {
    let state = match row.try_get::<String, _>(0)?.as_str() {
        "frozen" => PeriodState::Frozen,
        "done" => PeriodState::Done,
        "ended" => PeriodState::Ended,
        "pruned" => PeriodState::Pruned,
        other => return Err(sqlx::Error::Decode(format!("leaderboard_period.state is \"{other}\"").into())),
    };
    let tally = Tally { members: row.try_get(1)?, checksum: row.try_get(2)? };
    let time = |column: usize| Ok::<_, sqlx::Error>(row.try_get::<Option<NaiveDateTime>, _>(column)?.map(micros));
    let (left_out, done_at, restored_at, copy) = (row.try_get(3)?, time(4)?, time(5)?, row.try_get(6)?);
    let frozen = Freeze { generation: row.try_get(7)?, note: Some(row.try_get(8)?) };
    let late_members = row.try_get(9)?;
    Ok(PeriodRow { state, tally, left_out, done_at, restored_at, copy, frozen, late_members })
}
