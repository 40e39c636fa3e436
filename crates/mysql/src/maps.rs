//! The maps in use, and the queue of each map.

use std::collections::BTreeSet;

use sqlx::{Connection, MySqlConnection, Row};
use tallyd_core::mapping::Trial;
use tallyd_core::partition::MAPS_FROM;

use super::{Context, Result, Store};

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NotedMap {
    pub number: u8,
    pub name: String,
    pub queue: String,
    pub bindings: BTreeSet<(String, String)>,
    pub noted_by: String,
}

impl NotedMap {
    pub fn partition(&self) -> u16 {
        MAPS_FROM + u16::from(self.number)
    }

    pub fn conflict(&self, in_use: &[Self]) -> Option<String> {
        let Self { number, name, queue, .. } = self;
        let other = in_use.iter().find(|it| {
            (it.number == *number || it.name == *name) && (it.number, &it.name, &it.queue) != (*number, name, queue)
        })?;
        let in_use = format!(
            "{} uses the map {} with the number {} and the queue {}",
            other.noted_by, other.name, other.number, other.queue
        );
        Some(format!(
            "[[map]] {name} has the number {number} and the queue {queue}, but {in_use}: to change a map's name, number or queue, first run `tallyd admin map remove {}`",
            other.name
        ))
    }
}

impl Store {
    pub async fn noted_maps(&self) -> Result<Vec<NotedMap>> {
        self.acquire().await?.limit("read which maps are in use", read_maps).await
    }

    /// Records that a map is in use, unless its number or name is already in use. Then returns all maps in use. The
    /// caller must record a map before it binds the map's queue.
    pub async fn note_map(&self, map: &NotedMap) -> Result<Vec<NotedMap>> {
        const ACTION: &str = "record that a map is in use";
        let mut conn = self.acquire().await?;
        conn.limit(ACTION, |connection| async move {
            let mut tx = connection.begin().await.context(ACTION)?;
            // The statement uses IGNORE because another daemon has perhaps recorded the map already.
            let insert = "INSERT IGNORE INTO map_in_use (number, name, queue, bindings, noted_at, noted_by) \
                          VALUES (?, ?, ?, '[]', NOW(6), ?)";
            let insert = sqlx::query(insert).bind(map.number).bind(&map.name).bind(&map.queue).bind(&map.noted_by);
            insert.execute(&mut *tx).await.context(ACTION)?;
            let known = "SELECT bindings FROM map_in_use WHERE number = ? AND name = ? AND queue = ? FOR UPDATE";
            let known = sqlx::query_scalar::<_, String>(known).bind(map.number).bind(&map.name).bind(&map.queue);
            if let Some(known) = known.fetch_optional(&mut *tx).await.context(ACTION)? {
                let known: BTreeSet<(String, String)> = serde_json::from_str(&known).unwrap_or_default();
                let all: BTreeSet<&(String, String)> = known.union(&map.bindings).collect();
                let update = sqlx::query("UPDATE map_in_use SET bindings = ? WHERE number = ?");
                // Texts can always be written as JSON.
                let update = update.bind(serde_json::to_string(&all).unwrap_or_default()).bind(map.number);
                update.execute(&mut *tx).await.context(ACTION)?;
            }
            let maps = read_maps(&mut tx).await?;
            tx.commit().await.context(ACTION)?;
            Ok(maps)
        })
        .await
    }

    /// Returns the trial of a map in use, or `None` if the map's last trial was of another definition (its SHA-256). If
    /// `begins`, another definition begins a new trial.
    pub async fn map_trial(&self, number: u8, definition: [u8; 32], begins: bool) -> Result<Option<Trial>> {
        const ACTION: &str = "read the trial of a map";
        let mut conn = self.acquire().await?;
        conn.limit(ACTION, |connection| async move {
            if begins {
                let begin = "UPDATE map_in_use SET taken = 0, refused = 0, stopped = 0, definition = ? \
                             WHERE number = ? AND definition <> ?";
                let begin = sqlx::query(begin).bind(definition.as_slice()).bind(number).bind(definition.as_slice());
                begin.execute(&mut *connection).await.context(ACTION)?;
            }
            let read =
                "SELECT taken, refused, stopped FROM map_in_use WHERE number = ? AND (definition = ? OR stopped = 1)";
            let read = sqlx::query_as(read).bind(number).bind(definition.as_slice());
            Ok(read.fetch_optional(connection).await.context(ACTION)?.map(trial))
        })
        .await
    }

    /// Resumes a stopped map. Returns `None` if no map has this name, and else whether the map was stopped.
    pub async fn resume_map(&self, name: &str) -> Result<Option<bool>> {
        const ACTION: &str = "resume a map";
        let mut conn = self.acquire().await?;
        conn.limit(ACTION, |connection| async move {
            let known = sqlx::query_scalar("SELECT stopped FROM map_in_use WHERE name = ?").bind(name);
            let was_stopped: Option<bool> = known.fetch_optional(&mut *connection).await.context(ACTION)?;
            let resume = "UPDATE map_in_use SET taken = ?, refused = 0, stopped = 0 WHERE name = ? AND stopped = 1";
            sqlx::query(resume).bind(Trial::PASSED.taken).bind(name).execute(connection).await.context(ACTION)?;
            Ok(was_stopped)
        })
        .await
    }

    pub async fn forget_map(&self, name: &str) -> Result<bool> {
        const ACTION: &str = "record that a map is no longer in use";
        let mut conn = self.acquire().await?;
        conn.limit(ACTION, |connection| async move {
            let delete = sqlx::query("DELETE FROM map_in_use WHERE name = ?").bind(name);
            Ok(delete.execute(connection).await.context(ACTION)?.rows_affected() > 0)
        })
        .await
    }
}

/// Reads a map's trial in the transaction of a batch, and locks it. Returns `None` if the trial is of another definition.
pub async fn lock_trial(tx: &mut MySqlConnection, partition: u16, definition: [u8; 32]) -> Result<Option<Trial>> {
    let read = "SELECT taken, refused, stopped FROM map_in_use WHERE number = ? AND definition = ? FOR UPDATE";
    let read = sqlx::query_as(read).bind(partition - MAPS_FROM).bind(definition.as_slice());
    Ok(read.fetch_optional(tx).await.context("read the trial of a map")?.map(trial))
}

fn trial((taken, refused, is_stopped): (u32, u32, bool)) -> Trial {
    Trial { taken, refused, is_stopped }
}

pub async fn note_trial(tx: &mut MySqlConnection, partition: u16, trial: Trial) -> Result<()> {
    let note = sqlx::query("UPDATE map_in_use SET taken = ?, refused = ?, stopped = ? WHERE number = ?");
    let note = note.bind(trial.taken).bind(trial.refused).bind(trial.is_stopped).bind(partition - MAPS_FROM);
    note.execute(tx).await.context("record the trial of a map")?;
    Ok(())
}

pub(super) async fn read_maps(connection: &mut MySqlConnection) -> Result<Vec<NotedMap>> {
    const ACTION: &str = "read which maps are in use";
    let rows = sqlx::query("SELECT number, name, queue, noted_by, bindings FROM map_in_use ORDER BY number");
    let rows = rows.fetch_all(connection).await.context(ACTION)?;
    let read = |row: &sqlx::mysql::MySqlRow| {
        Ok(NotedMap {
            number: row.try_get(0)?,
            name: row.try_get(1)?,
            queue: row.try_get(2)?,
            noted_by: row.try_get(3)?,
            bindings: serde_json::from_str(row.try_get(4)?).unwrap_or_default(),
        })
    };
    rows.iter().map(read).collect::<std::result::Result<_, sqlx::Error>>().context(ACTION)
}
