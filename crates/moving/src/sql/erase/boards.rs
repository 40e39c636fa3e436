//! Erases members of boards in MySQL. In an archive, the member gets another name. In a snapshot, the member's row is
//! deleted.

use sqlx::{Connection, MySqlConnection, Row};
use tallyd_core::model::BoardPeriod;

use tallyd_mysql::boards::{self, begin};
use tallyd_mysql::{Context, Result, Store, jobs};

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Place {
    pub copy: u8,
    pub place: u64,
    pub score: f64,
}

#[derive(Clone, Copy, Debug)]
pub struct Moved<'a> {
    pub from: Place,
    /// The place of the new name. As in Redis, members with equal scores are ordered by their bytes.
    pub to: u64,
    pub member: &'a [u8],
    pub by: &'a [u8],
    pub former: u64,
    pub new: u64,
}

pub(crate) async fn known_periods(store: &Store, board: &str) -> Result<Vec<String>> {
    const ACTION: &str = "list a board's periods";
    let mut conn = store.acquire().await?;
    conn.limit(ACTION, |connection| async move {
        let sql = "SELECT period FROM leaderboard_period WHERE board = ? \
                   UNION SELECT period FROM leaderboard_snapshot_period WHERE board = ?";
        sqlx::query_scalar(sql).bind(board).bind(board).fetch_all(connection).await.context(ACTION)
    })
    .await
}

/// Finds the member's place in each copy of the period's archive. The query reads the whole archive, because there
/// is no index by member.
pub(crate) async fn places_of(store: &Store, at: &BoardPeriod, member: &[u8]) -> Result<Vec<Place>> {
    const ACTION: &str = "search an archived board";
    let mut conn = store.acquire().await?;
    conn.unlimited(|connection| async move {
        let sql = "SELECT copy, place, score FROM leaderboard_archive WHERE board = ? AND period = ? AND member = ?";
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

pub(crate) async fn placeholders_of(store: &Store, at: &BoardPeriod) -> Result<Vec<Vec<u8>>> {
    const ACTION: &str = "search an archived board";
    let mut conn = store.acquire().await?;
    conn.unlimited(|connection| async move {
        let sql = "SELECT member FROM leaderboard_archive WHERE board = ? AND period = ? \
                   AND (member = '0' OR member LIKE '0:%')";
        sqlx::query_scalar(sql).bind(&at.board).bind(&at.period).fetch_all(connection).await.context(ACTION)
    })
    .await
}

pub(crate) async fn place_for(store: &Store, at: &BoardPeriod, from: Place, by: &[u8]) -> Result<u64> {
    const ACTION: &str = "find a place among equal scores";
    const SQL: &str = "SELECT CAST(MIN(place) + COALESCE(SUM(member > ? AND place <> ?), 0) AS UNSIGNED) \
                       FROM leaderboard_archive WHERE board = ? AND period = ? AND copy = ? AND score = ?";
    let mut conn = store.acquire().await?;
    conn.unlimited(|connection| async move {
        let query = sqlx::query_scalar(SQL).bind(by).bind(from.place).bind(&at.board).bind(&at.period);
        query.bind(from.copy).bind(from.score).fetch_one(connection).await.context(ACTION)
    })
    .await
}

/// In one transaction. The members between the old and the new place, which have the same score, move by one place.
/// `false` if the archive has changed since it was read.
pub(crate) async fn move_member(store: &Store, run: u64, at: &BoardPeriod, moved: Moved<'_>) -> Result<bool> {
    const ACTION: &str = "replace a member of an archived board";
    let mut conn = store.acquire().await?;
    conn.unlimited(|connection| async move {
        let mut tx = connection.begin().await.context(ACTION)?;
        let found = move_in(&mut tx, at, moved).await?;
        if found {
            // The job's lock is checked last, because the check locks the job's row. Moving many rows takes long,
            // and during this time a lock on the job's row would block the renewal of the lease.
            jobs::require_lock(&mut tx, boards::JOB, run).await?;
            tx.commit().await.context(ACTION)?;
        }
        Ok(found)
    })
    .await
}

pub(crate) async fn rename_unverified(
    store: &Store,
    run: u64,
    at: &BoardPeriod,
    place: Place,
    by: &[u8],
) -> Result<()> {
    const SQL: &str =
        "UPDATE leaderboard_archive SET member = ? WHERE copy = ? AND place = ? AND board = ? AND period = ?";
    let query = sqlx::query(SQL).bind(by).bind(place.copy).bind(place.place);
    store.note("replace a member of a copy", run, at, query).await
}

pub async fn is_saved(store: &Store, at: &BoardPeriod, member: &[u8]) -> Result<bool> {
    const ACTION: &str = "find a member of a snapshot";
    let mut conn = store.acquire().await?;
    conn.limit(ACTION, |connection| async move {
        let sql = "SELECT COUNT(*) FROM leaderboard_snapshot WHERE board = ? AND period = ? AND member = ?";
        let query = sqlx::query_scalar(sql).bind(&at.board).bind(&at.period).bind(member);
        let rows: i64 = query.fetch_one(connection).await.context(ACTION)?;
        Ok(rows > 0)
    })
    .await
}

pub(crate) async fn erase_saved(store: &Store, run: u64, at: &BoardPeriod, member: &[u8]) -> Result<()> {
    const ACTION: &str = "delete a member of a snapshot";
    let mut conn = store.acquire().await?;
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

async fn move_in(connection: &mut MySqlConnection, at: &BoardPeriod, moved: Moved<'_>) -> Result<bool> {
    const ACTION: &str = "replace a member of an archived board";
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
    // The rows move one after another. Their order is chosen so that two rows never have the same place.
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
