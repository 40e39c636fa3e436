//! The methods to write a batch. In one transaction, each method first writes the rows, and then adds the differences
//! to the counters.
//!
//! With one writer per (target, user), all methods are exact. With two writers, only methods that lock the row before
//! they read its old state are exact: `noted`, `column`, and `read`, whose plain INSERT fails if another writer was
//! first.

use anyhow::{Context, Result};
use clap::ValueEnum;
use serde::Serialize;
use sqlx::{AssertSqlSafe, Connection, MySqlConnection, Row};
use tallyd_core::coalesce::{Before, LikeState, Pair, before, coalesce, differences};
use tallyd_core::event::LikeEvent;
use tallyd_core::model::{Kind, Metric, Target, TargetId, UserId};
use tallyd_mysql::{Text, likes};

/// The method to find the old states of the rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, ValueEnum)]
pub enum Way {
    /// The method does not read old states: it is an upsert without counters, as in the other consumers.
    Plain,
    /// The upsert stores the old states in a user variable. tallyd uses this method if the server allows it.
    Noted,
    /// The method reads the rows with a lock, then inserts or updates them. If the server does not allow `Noted`,
    /// tallyd uses this method.
    Read,
    /// The upsert stores the old state in a column of the row. A second statement reads this column.
    Column,
    /// The method writes the batch to a temporary table, and joins this table with the rows. After that, the upsert
    /// reads its rows from the temporary table.
    Staged,
}

/// The newest wins. If both events have the same `at`, the unlike wins.
const NEWER: &str = "(VALUES(update_at) > like_record.update_at OR \
                      (VALUES(update_at) = like_record.update_at AND VALUES(is_del) > like_record.is_del))";

/// Returns assignments with the condition [`NEWER`]. The version is assigned last.
fn newest() -> String {
    format!(
        "is_del = IF({NEWER}, VALUES(is_del), like_record.is_del), \
         update_at = GREATEST(like_record.update_at, VALUES(update_at))"
    )
}

impl Way {
    pub fn keeps_counters(self) -> bool {
        self != Self::Plain
    }

    /// Creates the additional tables and columns that a method needs.
    pub async fn prepare(self, connection: &mut MySqlConnection) -> Result<()> {
        let sql = match self {
            Self::Column => "ALTER TABLE like_record ADD COLUMN was TINYINT NULL",
            Self::Staged => {
                "CREATE TEMPORARY TABLE staged (kind TINYINT UNSIGNED, target_id BIGINT UNSIGNED, user_id BIGINT UNSIGNED, \
                 is_del BOOLEAN, update_at DATETIME(6), PRIMARY KEY (kind, target_id, user_id)) ENGINE = InnoDB"
            }
            _ => return Ok(()),
        };
        run(connection, "SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED".to_owned()).await?;
        run(connection, sql.to_owned()).await
    }

    pub async fn write(self, connection: &mut MySqlConnection, events: &[LikeEvent]) -> Result<()> {
        let mut tx = connection.begin().await?;
        let winners = coalesce(events);
        let before = match self {
            Self::Plain => {
                upsert(&mut tx, &winners, "").await?;
                tx.commit().await?;
                return Ok(());
            }
            Self::Noted => likes::upsert(&mut tx, &winners).await?.context("no user variables")?,
            Self::Read => read(&mut tx, &winners).await?,
            Self::Column => column(&mut tx, &winners).await?,
            Self::Staged => staged(&mut tx, &winners).await?,
        };
        let mut text = Text::default();
        likes::add_differences(&mut text, 0, &differences(Metric(1), &winners, &before));
        text.run(&mut tx, "add to counters").await?;
        tx.commit().await?;
        Ok(())
    }
}

async fn run(connection: &mut MySqlConnection, sql: String) -> Result<()> {
    sqlx::raw_sql(AssertSqlSafe(sql)).execute(connection).await?;
    Ok(())
}

/// Upserts the batch. `first` contains assignments that the statement makes before it changes the row's columns.
async fn upsert(connection: &mut MySqlConnection, winners: &[(Pair, LikeState)], first: &str) -> Result<()> {
    let sql = format!(
        "INSERT INTO like_record (kind, target_id, user_id, is_del, update_at) VALUES {} ON DUPLICATE KEY UPDATE {first} {}",
        values(winners),
        newest()
    );
    run(connection, sql).await
}

fn values(winners: &[(Pair, LikeState)]) -> String {
    let row = |((target, user), state): &(Pair, LikeState)| {
        let (second, micros) = (state.at.0.div_euclid(1_000_000), state.at.0.rem_euclid(1_000_000));
        let second = chrono::DateTime::from_timestamp(second, 0).unwrap_or_default().format("%Y-%m-%d %H:%M:%S");
        format!("({},{},{},{},'{second}.{micros:06}')", target.kind.0, target.id, user.0, u8::from(!state.liked))
    };
    winners.iter().map(row).collect::<Vec<_>>().join(",")
}

async fn read(connection: &mut MySqlConnection, winners: &[(Pair, LikeState)]) -> Result<Vec<Before>> {
    let pairs: Vec<Pair> = winners.iter().map(|(pair, _)| *pair).collect();
    let before = before(winners, &likes::old_states(connection, &pairs).await?);
    likes::write_winners(connection, winners, &before).await?;
    Ok(before)
}

async fn column(connection: &mut MySqlConnection, winners: &[(Pair, LikeState)]) -> Result<Vec<Before>> {
    upsert(connection, winners, &format!("was = IF({NEWER}, is_del, 2),")).await?;
    let mut found = Vec::with_capacity(winners.len());
    for piece in winners.chunks(1_000) {
        let keys: Vec<String> =
            piece.iter().map(|((target, user), _)| format!("({},{},{})", target.kind.0, target.id, user.0)).collect();
        let sql = format!(
            "SELECT was FROM like_record WHERE (kind, target_id, user_id) IN ({}) ORDER BY kind, target_id, user_id",
            keys.join(",")
        );
        for row in sqlx::raw_sql(AssertSqlSafe(sql)).fetch_all(&mut *connection).await? {
            found.push(met(row.try_get::<Option<i8>, _>(0)?));
        }
    }
    Ok(found)
}

async fn staged(connection: &mut MySqlConnection, winners: &[(Pair, LikeState)]) -> Result<Vec<Before>> {
    run(connection, format!("DELETE FROM staged; INSERT INTO staged VALUES {}", values(winners))).await?;
    let rows = sqlx::raw_sql(
        "SELECT kind, target_id, user_id, IF(s.update_at > r.update_at OR (s.update_at = r.update_at AND s.is_del > \
         r.is_del), r.is_del, 2) FROM staged s JOIN like_record r USING (kind, target_id, user_id) FOR UPDATE",
    )
    .fetch_all(&mut *connection)
    .await?;
    let mut known = std::collections::HashMap::new();
    for row in &rows {
        let target = Target { kind: Kind(row.try_get(0)?), id: TargetId(row.try_get(1)?) };
        known.insert((target, UserId(row.try_get(2)?)), met(row.try_get::<Option<i8>, _>(3)?));
    }
    let sql = format!(
        "INSERT INTO like_record (kind, target_id, user_id, is_del, update_at) SELECT * FROM staged \
         ON DUPLICATE KEY UPDATE {}",
        newest()
    );
    run(connection, sql).await?;
    Ok(winners.iter().map(|(pair, _)| known.get(pair).copied().unwrap_or(Before::Absent)).collect())
}

/// Decodes the old state. 0 and 1: the row's old `is_del`. 2: the row is not older than the event. NULL: the row is
/// new.
fn met(was: Option<i8>) -> Before {
    match was {
        None => Before::Absent,
        Some(2) => Before::NotOlder,
        Some(was_del) => Before::Older(was_del == 0),
    }
}
