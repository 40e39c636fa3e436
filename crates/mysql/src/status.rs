//! Reads likes and counters for clients.

use std::collections::{BTreeMap, HashMap};
use std::fmt::Write;

use sqlx::{AssertSqlSafe, Row};
use tallyd_core::model::{Kind, Metric, Micros, Target, TargetId, UserId};

use super::{Context, Result, Store};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LastClick {
    pub at: Micros,
    pub liked: bool,
}

impl Store {
    pub async fn last_clicks(&self, user: UserId, targets: &[Target]) -> Result<HashMap<Target, LastClick>> {
        const ACTION: &str = "read a user's likes";
        let kinds = by_kind(targets);
        let mut conn = self.acquire().await?;
        conn.limit(ACTION, |connection| async move {
            let mut clicks = HashMap::new();
            for (kind, ids) in kinds {
                // The statement contains only integers, so they are written into its text. One statement can contain
                // any number of ids, and the server need not prepare the statement.
                let sql = format!(
                    "SELECT target_id, is_del = 0, TIMESTAMPDIFF(MICROSECOND, '1970-01-01', update_at) FROM like_record \
                     WHERE kind = {} AND target_id IN ({ids}) AND user_id = {}",
                    kind.0, user.0
                );
                for row in sqlx::raw_sql(AssertSqlSafe(sql)).fetch_all(&mut *connection).await.context(ACTION)? {
                    let target = Target { kind, id: TargetId(row.try_get(0).context(ACTION)?) };
                    let (liked, at) = (row.try_get(1).context(ACTION)?, Micros(row.try_get(2).context(ACTION)?));
                    clicks.insert(target, LastClick { at, liked });
                }
            }
            Ok(clicks)
        })
        .await
    }

    pub async fn numbers(&self, targets: &[Target]) -> Result<HashMap<(Target, Metric), i64>> {
        const ACTION: &str = "read counters";
        let kinds = by_kind(targets);
        let mut conn = self.acquire().await?;
        conn.limit(ACTION, |connection| async move {
            let mut numbers = HashMap::new();
            for (kind, ids) in kinds {
                let sql = format!(
                    "SELECT target_id, metric, CAST(SUM(value) AS SIGNED) FROM counter \
                     WHERE kind = {} AND target_id IN ({ids}) GROUP BY target_id, metric",
                    kind.0
                );
                for row in sqlx::raw_sql(AssertSqlSafe(sql)).fetch_all(&mut *connection).await.context(ACTION)? {
                    let target = Target { kind, id: TargetId(row.try_get(0).context(ACTION)?) };
                    numbers.insert((target, Metric(row.try_get(1).context(ACTION)?)), row.try_get(2).context(ACTION)?);
                }
            }
            Ok(numbers)
        })
        .await
    }

    pub async fn likers(&self, target: Target, after: u64, limit: u64) -> Result<Vec<UserId>> {
        const ACTION: &str = "read the users who like a target";
        let mut conn = self.acquire().await?;
        conn.limit(ACTION, |connection| async move {
            let users: Vec<u64> = sqlx::query_scalar(
                "SELECT user_id FROM like_record WHERE kind = ? AND target_id = ? AND user_id > ? AND is_del = 0 \
                 ORDER BY user_id LIMIT ?",
            )
            .bind(target.kind.0)
            .bind(target.id.0)
            .bind(after)
            .bind(limit)
            .fetch_all(connection)
            .await
            .context(ACTION)?;
            Ok(users.into_iter().map(UserId).collect())
        })
        .await
    }
}

fn by_kind(targets: &[Target]) -> BTreeMap<Kind, String> {
    let mut kinds: BTreeMap<Kind, String> = BTreeMap::new();
    for target in targets {
        let ids = kinds.entry(target.kind).or_default();
        let separator = if ids.is_empty() { "" } else { "," };
        // Writing to a String cannot fail.
        let _ = write!(ids, "{separator}{}", target.id.0);
    }
    kinds
}
