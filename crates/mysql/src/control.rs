//! Operators' orders to all daemons. Each order lasts for a limited time.

use std::time::Duration;

use chrono::NaiveDateTime;
use sqlx::Row;
use sqlx::mysql::MySqlRow;
use tallyd_connect::fate::Fate;
use tallyd_core::control::{Command, Order, Task};

use super::{CLOSE_MAX, Context, Result, Store, micros};

/// A connection counts as used if it ran a statement within this number of seconds. A running daemon reads its orders
/// once a second.
const USED_WITHIN_S: u32 = 3;

/// The checks take five seconds in total, longer than `USED_WITHIN_S`: MySQL can still list the connection of a daemon
/// that has just ended in the first checks, but not in the last.
const LOOKS: u32 = 25;
const LOOK_AGAIN: Duration = Duration::from_millis(200);

/// An order and its remaining time. The time is computed with MySQL's clock.
pub type InForce = (Order, Duration);

impl Store {
    /// Returns the current orders. Skips orders that only a newer version supports.
    pub async fn orders(&self) -> Result<Vec<InForce>> {
        const ACTION: &str = "read the orders";
        let mut conn = self.acquire().await?;
        conn.limit(ACTION, |connection| async move {
            let rows = sqlx::query(
                "SELECT task, command, targets_per_second, ordered_at, until_at, ordered_by, reason, \
                 CAST(TIMESTAMPDIFF(MICROSECOND, NOW(6), until_at) AS SIGNED) \
                 FROM control WHERE until_at > NOW(6) ORDER BY task, command",
            )
            .fetch_all(connection)
            .await
            .context(ACTION)?;
            let orders = rows.iter().map(order).collect::<std::result::Result<Vec<_>, sqlx::Error>>();
            Ok(orders.context(ACTION)?.into_iter().flatten().collect())
        })
        .await
    }

    pub async fn give_order(
        &self,
        task: Task,
        command: Command,
        lasts: Duration,
        by: &str,
        reason: &str,
    ) -> Result<()> {
        const ACTION: &str = "record an order";
        let targets_per_second = match command {
            Command::Pause => None,
            Command::Throttle { targets_per_second } => Some(targets_per_second),
        };
        let mut conn = self.acquire().await?;
        conn.limit(ACTION, |connection| async move {
            sqlx::query(
                "INSERT INTO control (task, command, targets_per_second, ordered_at, until_at, ordered_by, reason) \
                 VALUES (?, ?, ?, NOW(6), NOW(6) + INTERVAL ? SECOND, ?, ?) \
                 ON DUPLICATE KEY UPDATE targets_per_second = VALUES(targets_per_second), \
                 ordered_at = VALUES(ordered_at), until_at = VALUES(until_at), \
                 ordered_by = VALUES(ordered_by), reason = VALUES(reason)",
            )
            .bind(task.name())
            .bind(command.name())
            .bind(targets_per_second)
            .bind(lasts.as_secs())
            .bind(by)
            .bind(reason)
            .execute(connection)
            .await
            .context(ACTION)?;
            Ok(())
        })
        .await
    }

    pub async fn end_order(&self, task: Task, command: Command) -> Result<()> {
        const ACTION: &str = "end an order";
        let mut conn = self.acquire().await?;
        conn.limit(ACTION, |connection| async move {
            sqlx::query("DELETE FROM control WHERE task = ? AND command = ?")
                .bind(task.name())
                .bind(command.name())
                .execute(connection)
                .await
                .context(ACTION)?;
            Ok(())
        })
        .await
    }
}

impl Store {
    /// Returns true if no other process uses this database with this account. The check does not always find a daemon
    /// that is connected through a proxy or to another node of a cluster.
    pub async fn is_used_alone(&self) -> Result<bool> {
        const ACTION: &str = "check for connections of daemons";
        // This statement recognizes and excludes itself by its text, because a proxy changes connection ids.
        const SQL: &str = "SELECT COUNT(*) FROM information_schema.processlist WHERE db = DATABASE() \
                           AND user = SUBSTRING_INDEX(USER(), '@', 1) AND time < ? \
                           AND COALESCE(info, '') NOT LIKE '%information_schema.processlist%'";
        let mut conn = self.acquire().await?;
        let mut last = Ok(false);
        for _ in 0..LOOKS {
            // Closes this process' idle connections, because otherwise the query would count them. If closing fails,
            // the connection is already closed.
            while let Some(idle) = self.pool.try_acquire() {
                let _ = tokio::time::timeout(CLOSE_MAX, idle.close()).await;
            }
            let look = |connection| async move {
                let others = sqlx::query_scalar::<_, i64>(SQL).bind(USED_WITHIN_S).fetch_one(connection);
                others.await.context(ACTION)
            };
            match conn.limit(ACTION, look).await {
                Ok(0) => return Ok(true),
                Ok(_) => last = Ok(false),
                // MySQL refuses the list while any session's statement has bytes that are no text (error 3854).
                Err(error) if error.fate() == Fate::Item => last = Err(error),
                Err(error) => return Err(error),
            }
            tokio::time::sleep(LOOK_AGAIN).await;
        }
        last
    }
}

fn order(row: &MySqlRow) -> std::result::Result<Option<InForce>, sqlx::Error> {
    let (task, command): (String, String) = (row.try_get(0)?, row.try_get(1)?);
    let command = match (command.as_str(), row.try_get::<Option<u32>, _>(2)?) {
        ("pause", _) => Command::Pause,
        ("throttle", Some(targets_per_second)) => Command::Throttle { targets_per_second },
        _ => return Ok(None),
    };
    let Some(task) = Task::named(&task) else { return Ok(None) };
    let order = Order {
        task,
        command,
        since: micros(row.try_get::<NaiveDateTime, _>(3)?),
        until: micros(row.try_get::<NaiveDateTime, _>(4)?),
        by: row.try_get(5)?,
        reason: row.try_get(6)?,
    };
    Ok(Some((order, Duration::from_micros(row.try_get::<i64, _>(7)?.max(0).unsigned_abs()))))
}
