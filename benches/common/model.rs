//! Computes the expected final contents of the tables, without tallyd's code, and compares every row.

use std::collections::{BTreeMap, HashMap};

use anyhow::{Result, ensure};
use futures_util::TryStreamExt;
use sqlx::{MySqlPool, Row};
use tallyd_core::event::LikeEvent;

/// The key is (target, user), the value is (at, is_del). The newest event wins. If both events have the same `at`, the
/// unlike wins.
#[derive(Default)]
struct Newest(HashMap<(u64, u64), (i64, bool)>);

/// The expected rows in the order of their keys. Also contains the expected like count of each target.
pub struct Model {
    rows: Vec<((u64, u64), (i64, bool))>,
    likes: BTreeMap<u64, i64>,
}

impl Model {
    pub fn of(events: impl IntoIterator<Item = LikeEvent>) -> Self {
        let mut newest = Newest::default();
        for event in events {
            let new = (event.at.0, !event.liked);
            let row = newest.0.entry((event.target.id.0, event.user.0)).or_insert(new);
            *row = (*row).max(new);
        }
        let mut rows: Vec<_> = newest.0.into_iter().collect();
        rows.sort_unstable();
        let mut likes = BTreeMap::new();
        for ((target, _), (_, is_del)) in &rows {
            *likes.entry(*target).or_default() += i64::from(!is_del);
        }
        likes.retain(|_, likes| *likes != 0);
        Self { rows, likes }
    }

    /// Returns whether these are the expected like counts of all targets.
    pub fn has(&self, likes: &BTreeMap<u64, i64>) -> bool {
        self.likes == *likes
    }

    /// Compares `like_record` with the expected rows. Fails at the first difference. Ignores rows of users whose id is
    /// above `user_max`.
    pub async fn assert_rows(&self, pool: &MySqlPool, user_max: u64) -> Result<()> {
        let mut stored = sqlx::query(
            "SELECT target_id, user_id, CAST(TIMESTAMPDIFF(MICROSECOND, '1970-01-01', update_at) AS SIGNED), is_del \
             FROM like_record WHERE kind = 1 AND user_id <= ? ORDER BY kind, target_id, user_id",
        )
        .bind(user_max)
        .fetch(pool);
        let mut expected = self.rows.iter();
        while let Some(row) = stored.try_next().await? {
            let row = ((row.try_get(0)?, row.try_get(1)?), (row.try_get(2)?, row.try_get(3)?));
            let wanted = expected.next();
            ensure!(wanted == Some(&row), "like_record has {row:?}, but the expected row is {wanted:?}");
        }
        ensure!(expected.next().is_none(), "{} rows are missing in like_record", expected.len() + 1);
        Ok(())
    }

    /// Fails unless every counter is right. A counter's value is the sum of its slots (its rows in the table).
    pub async fn assert_counters(&self, pool: &MySqlPool) -> Result<()> {
        let stored = sqlx::query(
            "SELECT target_id, CAST(SUM(value) AS SIGNED) FROM counter WHERE kind = 1 AND metric = 1 \
             GROUP BY target_id HAVING SUM(value) <> 0",
        );
        let stored = stored.fetch_all(pool).await?;
        let stored = stored.iter().map(|row| Ok((row.try_get(0)?, row.try_get(1)?)));
        let stored: BTreeMap<u64, i64> = stored.collect::<Result<_, sqlx::Error>>()?;
        for (target, likes) in &self.likes {
            let counter = stored.get(target);
            ensure!(
                counter == Some(likes),
                "the counter of target {target} is {counter:?}, but the expected count is {likes}"
            );
        }
        ensure!(stored.len() == self.likes.len(), "there are counters of targets without likes");
        Ok(())
    }
}
