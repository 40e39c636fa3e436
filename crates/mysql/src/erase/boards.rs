//! Members of boards in MySQL: archives, where another name takes the member's place, and snapshots, which lose the row.

use sqlx::{Connection, MySqlConnection, Row};
use tallyd_core::model::BoardPeriod;

use crate::boards::begin;
use crate::{Context, Result, Store, boards, jobs};

/// Where a member stands in a copy of an archive.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Place {
    pub copy: u8,
    /// From 1.
    pub place: u64,
    pub score: f64,
}

/// Another name for a member of a verified archive.
#[derive(Clone, Copy, Debug)]
pub struct Moved<'a> {
    /// Where the member stands.
    pub from: Place,
    /// Where the new name belongs: equal scores are ordered by the bytes of the members, as in Redis.
    pub to: u64,
    pub member: &'a [u8],
    /// Its new name.
    pub by: &'a [u8],
    /// The period's checksum, as it was verified with the member.
    pub former: u64,
    /// The checksum with the new name.
    pub new: u64,
}

impl Store {
    /// The board's periods that MySQL knows.
    pub async fn known_periods(&self, board: &str) -> Result<Vec<String>> {
        const ACTION: &str = "list a board's periods";
        let mut conn = self.acquire().await?;
        conn.limit(ACTION, |connection| async move {
            let sql = "SELECT period FROM leaderboard_period WHERE board = ? \
                       UNION SELECT period FROM leaderboard_snapshot_period WHERE board = ?";
            sqlx::query_scalar(sql).bind(board).bind(board).fetch_all(connection).await.context(ACTION)
        })
        .await
    }

    /// Where the period's archive has the member, in each copy. The whole archive is read, because there is no index by member.
    pub async fn places_of(&self, at: &BoardPeriod, member: &[u8]) -> Result<Vec<Place>> {
        const ACTION: &str = "search an archived board";
        let mut conn = self.acquire().await?;
        conn.unlimited(|connection| async move {
            let sql =
                "SELECT copy, place, score FROM leaderboard_archive WHERE board = ? AND period = ? AND member = ?";
            let query = sqlx::query(sql).bind(&at.board).bind(&at.period).bind(member);
            let rows = query.fetch_all(connection).await.context(ACTION)?;
            let read = |row: &sqlx::mysql::MySqlRow| {
                let place: u32 = row.try_get(1)?;
                Ok(Place { copy: row.try_get(0)?, place: place.into(), score: row.try_get(2)? })
            };
            rows.iter().map(read).collect::<std::result::Result<_, sqlx::Error>>().context(ACTION)
        })
        .await
    }

    /// The names that stand for erased members in any copy of the period's archive.
    pub async fn placeholders_of(&self, at: &BoardPeriod) -> Result<Vec<Vec<u8>>> {
        const ACTION: &str = "search an archived board";
        let mut conn = self.acquire().await?;
        conn.unlimited(|connection| async move {
            let sql = "SELECT member FROM leaderboard_archive WHERE board = ? AND period = ? \
                       AND (member = '0' OR member LIKE '0:%')";
            sqlx::query_scalar(sql).bind(&at.board).bind(&at.period).fetch_all(connection).await.context(ACTION)
        })
        .await
    }

    /// The place that `by` would have in a copy instead of the member at `from`.
    pub async fn place_for(&self, at: &BoardPeriod, from: Place, by: &[u8]) -> Result<u64> {
        const ACTION: &str = "look for a place among equals";
        const SQL: &str = "SELECT CAST(MIN(place) + COALESCE(SUM(member > ? AND place <> ?), 0) AS UNSIGNED) \
                           FROM leaderboard_archive WHERE board = ? AND period = ? AND copy = ? AND score = ?";
        let mut conn = self.acquire().await?;
        conn.unlimited(|connection| async move {
            let query = sqlx::query_scalar(SQL).bind(by).bind(from.place).bind(&at.board).bind(&at.period);
            query.bind(from.copy).bind(from.score).fetch_one(connection).await.context(ACTION)
        })
        .await
    }

    /// Puts another name in a member's place, with the new checksum: both or neither. Among equal scores the others move up or down by one.
    /// Returns `false` where the archive is not what was read.
    ///
    /// # Errors
    /// MySQL's; [`crate::StoreError::TakenOver`].
    pub async fn move_member(&self, run: u64, at: &BoardPeriod, moved: Moved<'_>) -> Result<bool> {
        const ACTION: &str = "take a member out of an archived board";
        let mut conn = self.acquire().await?;
        conn.unlimited(|connection| async move {
            let mut tx = connection.begin().await.context(ACTION)?;
            let found = move_in(&mut tx, at, moved).await?;
            if found {
                // Last, because many rows can move: who renews the lease waits for this row.
                jobs::hold(&mut tx, boards::JOB, run).await?;
                tx.commit().await.context(ACTION)?;
            }
            Ok(found)
        })
        .await
    }

    /// Puts another name in the member's place in copies that nobody has verified: the next archive writes over them.
    ///
    /// # Errors
    /// MySQL's; [`crate::StoreError::TakenOver`].
    pub async fn rename_unverified(&self, run: u64, at: &BoardPeriod, place: Place, by: &[u8]) -> Result<()> {
        const SQL: &str =
            "UPDATE leaderboard_archive SET member = ? WHERE copy = ? AND place = ? AND board = ? AND period = ?";
        let query = sqlx::query(SQL).bind(by).bind(place.copy).bind(place.place);
        self.note("take a member out of a copy", run, at, query).await
    }

    /// Whether the period's snapshot has the member.
    pub async fn is_saved(&self, at: &BoardPeriod, member: &[u8]) -> Result<bool> {
        const ACTION: &str = "look for a member of a snapshot";
        let mut conn = self.acquire().await?;
        conn.limit(ACTION, |connection| async move {
            let sql = "SELECT COUNT(*) FROM leaderboard_snapshot WHERE board = ? AND period = ? AND member = ?";
            let query = sqlx::query_scalar(sql).bind(&at.board).bind(&at.period).bind(member);
            let rows: i64 = query.fetch_one(connection).await.context(ACTION)?;
            Ok(rows > 0)
        })
        .await
    }

    /// Deletes a member from the period's snapshot, which then has one member less.
    ///
    /// # Errors
    /// MySQL's; [`crate::StoreError::TakenOver`].
    pub async fn erase_saved(&self, run: u64, at: &BoardPeriod, member: &[u8]) -> Result<()> {
        const ACTION: &str = "delete a member of a snapshot";
        let mut conn = self.acquire().await?;
        conn.limit(ACTION, |connection| async move {
            let mut tx = begin(connection, run, ACTION).await?;
            let sql = "DELETE FROM leaderboard_snapshot WHERE board = ? AND period = ? AND member = ?";
            let query = sqlx::query(sql).bind(&at.board).bind(&at.period).bind(member);
            if query.execute(&mut *tx).await.context(ACTION)?.rows_affected() > 0 {
                let sql = "UPDATE leaderboard_snapshot_period SET members = members - 1 \
                           WHERE board = ? AND period = ? AND members > 0";
                sqlx::query(sql).bind(&at.board).bind(&at.period).execute(&mut *tx).await.context(ACTION)?;
            }
            tx.commit().await.context(ACTION)
        })
        .await
    }
}

async fn move_in(connection: &mut MySqlConnection, at: &BoardPeriod, moved: Moved<'_>) -> Result<bool> {
    const ACTION: &str = "take a member out of an archived board";
    let Moved { from: Place { copy, place, score }, to, member, by, former, new } = moved;
    let sql = "UPDATE leaderboard_period SET checksum = ? WHERE board = ? AND period = ? AND copy = ? AND checksum = ?";
    let query = sqlx::query(sql).bind(new).bind(&at.board).bind(&at.period).bind(copy).bind(former);
    if query.execute(&mut *connection).await.context(ACTION)?.rows_affected() == 0 {
        return Ok(false);
    }
    let sql =
        "DELETE FROM leaderboard_archive WHERE board = ? AND period = ? AND copy = ? AND place = ? AND member = ?";
    let query = sqlx::query(sql).bind(&at.board).bind(&at.period).bind(copy).bind(place).bind(member);
    if query.execute(&mut *connection).await.context(ACTION)?.rows_affected() == 0 {
        return Ok(false);
    }
    // In the order in which no two rows are at one place.
    let (sql, first, last) = if to > place {
        (
            "UPDATE leaderboard_archive SET place = place - 1 WHERE board = ? AND period = ? AND copy = ? \
          AND place BETWEEN ? AND ? ORDER BY place",
            place + 1,
            to,
        )
    } else {
        (
            "UPDATE leaderboard_archive SET place = place + 1 WHERE board = ? AND period = ? AND copy = ? \
          AND place BETWEEN ? AND ? ORDER BY place DESC",
            to,
            place.saturating_sub(1),
        )
    };
    if to != place {
        let query = sqlx::query(sql).bind(&at.board).bind(&at.period).bind(copy).bind(first).bind(last);
        query.execute(&mut *connection).await.context(ACTION)?;
    }
    let sql = "INSERT INTO leaderboard_archive (board, period, copy, place, member, score) VALUES (?, ?, ?, ?, ?, ?)";
    let query = sqlx::query(sql).bind(&at.board).bind(&at.period).bind(copy).bind(to).bind(by).bind(score);
    query.execute(connection).await.context(ACTION)?;
    Ok(true)
}
