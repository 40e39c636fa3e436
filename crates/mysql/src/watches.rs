//! The watch on targets that change too often for a normal comparison. A reconcile starts the watch. Consumers then log
//! the events of these targets, and the reconcile reads the logged events (decision 0032).

use std::collections::HashMap;

use sqlx::mysql::MySqlRow;
use sqlx::{AssertSqlSafe, Connection, MySqlConnection, Row};
use tallyd_core::drift::{Truth, Watched, WatchedCount, WatchedEvent};
use tallyd_core::event::{EventId, LikeEvent};
use tallyd_core::model::{CounterKey, Metric, Micros, UserId};
use tallyd_core::partition::Partitions;

use super::counters::{begin_snapshot, read_counted};
use super::maps::{NotedMap, read_maps};
use super::partitions::read_noted;
use super::{Context, Result, Store, datetime, in_shapes, jobs, micros, placeholders, target};

#[derive(Clone, Copy, Debug)]
pub struct Logged {
    pub number: CounterKey,
    pub at: Micros,
    /// The event's id and the added amount, or `None` if the event set the counter.
    pub delta: Option<(EventId, i64)>,
}

const UNWATCHED_ROWS: u64 = 10_000;

impl Store {
    /// As of one instant. `None` if the watch of a partition had a gap, or if a partition was added meanwhile.
    pub async fn watched(
        &self,
        numbers: &[CounterKey],
        watch: u64,
        partitions: &Partitions,
    ) -> Result<Option<(HashMap<CounterKey, Truth>, Watched)>> {
        let mut conn = self.acquire().await?;
        conn.limit("read watched events", |connection| async move {
            let mut tx = begin_snapshot(connection).await?;
            if !is_watched(&mut tx, watch, partitions).await? {
                return Ok(None);
            }
            let truths = read_counted(&mut tx, numbers).await?;
            let likes = read_watched(&mut tx, watch).await?;
            let counts = read_watched_counts(&mut tx, watch).await?;
            tx.commit().await.context("read watched events")?;
            Ok(Some((truths, Watched { likes, counts })))
        })
        .await
    }

    /// `watch` must be a new number. Every batch that begins after this call logs its events for `numbers`. Lasts
    /// `seconds`, or until [`Store::unwatch`]. The watch of a later run stays.
    pub async fn watch(&self, watch: u64, numbers: &[CounterKey], partitions: &Partitions, seconds: u64) -> Result<()> {
        const ACTION: &str = "watch targets";
        let mut conn = self.acquire().await?;
        conn.limit(ACTION, |connection| async move {
            let mut tx = connection.begin().await.context(ACTION)?;
            for piece in in_shapes(numbers) {
                let sql = format!(
                    "INSERT INTO watched_target (watch, kind, target_id, metric) VALUES {}",
                    placeholders(piece.len(), 4)
                );
                let mut query = sqlx::query(AssertSqlSafe(sql));
                for (target, metric) in piece {
                    query = query.bind(watch).bind(target.kind.0).bind(target.id.0).bind(metric.0);
                }
                query.execute(&mut *tx).await.context(ACTION)?;
            }
            tx.commit().await.context(ACTION)?;
            // Each partition has a separate statement, which waits for the batch that has locked the partition's row.
            // With a single statement for all rows, a batch of one partition would also wait for the batches of other
            // partitions. If no daemon ever held a partition, the statement creates the partition's row.
            for partition in partitions.numbers() {
                sqlx::query(
                    "INSERT INTO partition_owner (`partition`, epoch, taken_at, watch, watch_until) \
                     VALUES (?, 0, NOW(6), ?, NOW(6) + INTERVAL ? SECOND) \
                     ON DUPLICATE KEY UPDATE \
                         watch_until = IF(COALESCE(watch, 0) < VALUES(watch), VALUES(watch_until), watch_until), \
                         watch = GREATEST(COALESCE(watch, 0), VALUES(watch))",
                )
                .bind(partition)
                .bind(watch)
                .bind(seconds)
                .execute(&mut *connection)
                .await
                .context(ACTION)?;
            }
            Ok(())
        })
        .await
    }

    /// Ends the watches of `run` and of earlier runs, and deletes their logs in pieces.
    pub async fn unwatch(&self, run: u64) -> Result<()> {
        const ACTION: &str = "end the watch";
        // Each watch has a number, and a later run gives higher numbers. So if another run has taken over, the former
        // run cannot end the new run's watch.
        let next = jobs::number_of(run + 1, 0);
        for sql in [
            "UPDATE partition_owner SET watch = NULL, watch_until = NULL WHERE watch < ? LIMIT ?",
            "DELETE FROM watched_target WHERE watch < ? LIMIT ?",
            "DELETE FROM watched_event WHERE watch < ? LIMIT ?",
            "DELETE FROM watched_count WHERE watch < ? LIMIT ?",
        ] {
            let mut rows = UNWATCHED_ROWS;
            while rows == UNWATCHED_ROWS {
                let query = sqlx::query(sql).bind(next).bind(UNWATCHED_ROWS);
                let mut conn = self.acquire().await?;
                rows = conn
                    .limit(ACTION, |connection| async move { query.execute(connection).await.context(ACTION) })
                    .await?
                    .rows_affected();
            }
        }
        Ok(())
    }
}

pub async fn log_counts(connection: &mut MySqlConnection, watch: u64, logged: &[Logged]) -> Result<()> {
    for piece in in_shapes(logged) {
        let sql = format!(
            "INSERT INTO watched_count (watch, kind, target_id, metric, update_at, id, delta) VALUES {} \
             ON DUPLICATE KEY UPDATE watch = VALUES(watch)",
            placeholders(piece.len(), 7)
        );
        let mut query = sqlx::query(AssertSqlSafe(sql));
        for Logged { number: (target, metric), at, delta } in piece {
            let id = delta.map_or([0; 16], |(id, _)| id.0);
            query = query.bind(watch).bind(target.kind.0).bind(target.id.0).bind(metric.0);
            query = query.bind(datetime(*at)).bind(id.to_vec()).bind(delta.map(|(_, delta)| delta));
        }
        query.execute(&mut *connection).await.context("log watched counts")?;
    }
    Ok(())
}

async fn is_watched(connection: &mut MySqlConnection, watch: u64, partitions: &Partitions) -> Result<bool> {
    let watching: Vec<u16> =
        sqlx::query_scalar("SELECT `partition` FROM partition_owner WHERE watch = ? AND watch_until > NOW(6)")
            .bind(watch)
            .fetch_all(&mut *connection)
            .await
            .context("check the watch")?;
    // A partition that was added after the start of the watch has logged no events.
    let numbered = 0..read_noted(connection).await?.map_or(0, |noted| noted.partitions);
    let maps = read_maps(connection).await?;
    let added = numbered.chain(maps.iter().map(NotedMap::partition)).any(|number| !partitions.has(number));
    Ok(!added && partitions.numbers().all(|partition| watching.contains(&partition)))
}

async fn read_watched_counts(connection: &mut MySqlConnection, watch: u64) -> Result<Vec<WatchedCount>> {
    const ACTION: &str = "read watched counts";
    let rows = sqlx::query("SELECT kind, target_id, metric, update_at, delta FROM watched_count WHERE watch = ?")
        .bind(watch)
        .fetch_all(connection)
        .await
        .context(ACTION)?;
    let read = |row: &MySqlRow| {
        let number = (target(row, 0)?, Metric(row.try_get(2)?));
        Ok(WatchedCount { number, at: micros(row.try_get(3)?), delta: row.try_get(4)? })
    };
    rows.iter().map(read).collect::<std::result::Result<_, sqlx::Error>>().context(ACTION)
}

async fn read_watched(connection: &mut MySqlConnection, watch: u64) -> Result<Vec<WatchedEvent>> {
    const ACTION: &str = "read watched events";
    let rows =
        sqlx::query("SELECT kind, target_id, user_id, update_at, is_del, is_former FROM watched_event WHERE watch = ?")
            .bind(watch)
            .fetch_all(connection)
            .await
            .context(ACTION)?;
    let read = |row: &MySqlRow| {
        let event = LikeEvent {
            target: target(row, 0)?,
            user: UserId(row.try_get(2)?),
            at: micros(row.try_get(3)?),
            liked: !row.try_get::<bool, _>(4)?,
        };
        Ok(WatchedEvent { event, is_former: row.try_get(5)? })
    };
    rows.iter().map(read).collect::<std::result::Result<_, sqlx::Error>>().context(ACTION)
}
