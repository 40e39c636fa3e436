//! Reads counters in the order of their keys, page by page. Also recounts the targets of a page as of one instant.
//!
//! A page ends after a number of rows that the server reads, and not after a number of rows that match. So a page of a
//! rare metric costs no more than a page of other metrics.

use chrono::NaiveDateTime;
use futures_util::TryStreamExt;
use sqlx::{MySqlConnection, Row};
use tallyd_core::model::{CounterKey, Kind, Metric, Micros, Target, TargetId};
use tallyd_core::outbox::OutboxLag;

use super::counters::begin_snapshot;
use super::outbox::{self, Asked};
use super::{Context, Result, Store, micros};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Counted {
    pub number: CounterKey,
    pub value: i64,
    pub update_at: Micros,
    pub rows: u32,
}

/// The counters of a range of targets. All these targets have the same kind, and their ids are in the range. The range
/// can also contain like records of targets without a counter.
#[derive(Clone, Debug)]
pub struct Range {
    pub kind: Kind,
    /// The range begins above this id.
    pub after: TargetId,
    /// The range ends with this id.
    pub until: TargetId,
    pub counters: Vec<Counted>,
}

#[derive(Clone, Debug, Default)]
pub struct Recount {
    pub counters: Vec<Counted>,
    /// The targets that have like records, each with the number of users who like the target. Sorted by id.
    pub likes: Vec<(TargetId, i64)>,
    /// The amounts that Redis lacked when the caller read it. Empty unless the caller asked for them.
    pub lag: OutboxLag,
}

/// A range contains at most this number of targets without a counter. These targets have only like records.
const UNCOUNTED_MAX: usize = 10_000;

pub const LAST: TargetId = TargetId(i64::MAX as u64);

impl Range {
    pub fn rows(&self) -> u64 {
        self.counters.iter().map(|counted| u64::from(counted.rows)).sum()
    }

    /// Limits the number of likes, because each like is a row to recount. The range ends before the target that raises
    /// the number of likes above `max`, but always keeps its first target.
    pub fn limit_likes(&mut self, like: Metric, max: i64) {
        let mut likes = 0_i64;
        let beyond = self.counters.iter().position(|counted| {
            likes = likes.saturating_add(if counted.number.1 == like { counted.value.max(0) } else { 0 });
            likes > max
        });
        let beyond = beyond.and_then(|place| self.counters.get(place)).map(|counted| counted.number.0);
        let Some(beyond) = beyond else { return };
        let first = self.counters.first().map(|counted| counted.number.0);
        // If the first target has more likes than `max`, it becomes the range's only target.
        let keep = self.counters.partition_point(|counted| {
            if first == Some(beyond) { counted.number.0 <= beyond } else { counted.number.0 < beyond }
        });
        if keep < self.counters.len() {
            self.counters.truncate(keep);
            self.until = self.counters.last().map_or(self.until, |counted| counted.number.0.id);
        }
    }
}

impl Store {
    /// Reads about `limit` rows. A range that ends with [`LAST`] is the kind's last, and can contain like records of
    /// targets without a counter.
    pub async fn list_range(&self, kind: Kind, after: TargetId, limit: usize) -> Result<Range> {
        let mut conn = self.acquire().await?;
        conn.limit("list counters", |connection| list_range(connection, kind, (after, LAST), limit)).await
    }

    pub async fn list_range_with_lag(
        &self,
        kind: Kind,
        after: TargetId,
        limit: usize,
        asked: Asked<'_>,
    ) -> Result<(Range, OutboxLag)> {
        let mut conn = self.acquire().await?;
        conn.unlimited(|connection| async move {
            let mut tx = begin_snapshot(connection).await?;
            let range = list_range(&mut tx, kind, (after, LAST), limit).await?;
            let lag = outbox::read_lag(&mut tx, &asked).await?;
            tx.commit().await.context("list counters")?;
            Ok((range, lag))
        })
        .await
    }

    pub async fn recount_range(&self, range: &Range, asked: Option<Asked<'_>>) -> Result<Option<Recount>> {
        const ACTION: &str = "recount a range";
        let mut conn = self.acquire().await?;
        conn.unlimited(|connection| async move {
            let mut tx = begin_snapshot(connection).await?;
            let counters = read_counters(&mut tx, range.kind, (range.after, range.until), usize::MAX >> 1).await?;
            let targets = range.counters.chunk_by(|a, b| a.number.0 == b.number.0).count();
            let Some(likes) = read_likes(&mut tx, range, targets + UNCOUNTED_MAX).await? else { return Ok(None) };
            let lag = match asked {
                Some(asked) => outbox::read_lag(&mut tx, &asked).await?,
                None => OutboxLag::default(),
            };
            tx.commit().await.context(ACTION)?;
            Ok(Some(Recount { counters, likes, lag }))
        })
        .await
    }

    pub async fn liked_targets(
        &self,
        kind: Kind,
        after: TargetId,
        until: TargetId,
        limit: usize,
    ) -> Result<Vec<TargetId>> {
        const ACTION: &str = "list targets with like records";
        let mut conn = self.acquire().await?;
        conn.limit(ACTION, |connection| async move {
            // The server groups by the key's first columns and jumps from target to target ("Using index for
            // group-by"). So the cost depends on the number of targets, and not on the number of rows.
            let ids: Vec<u64> = sqlx::query_scalar(
                "SELECT target_id FROM like_record WHERE kind = ? AND target_id > ? AND target_id <= ? \
                 GROUP BY kind, target_id ORDER BY kind, target_id LIMIT ?",
            )
            .bind(kind.0)
            .bind(after.0)
            .bind(until.0)
            .bind(limit as u64)
            .fetch_all(connection)
            .await
            .context(ACTION)?;
            Ok(ids.into_iter().map(TargetId).collect())
        })
        .await
    }
}

pub async fn list_range(
    connection: &mut MySqlConnection,
    kind: Kind,
    (after, end): (TargetId, TargetId),
    limit: usize,
) -> Result<Range> {
    let mut counters = read_counters(connection, kind, (after, end), limit + 1).await?;
    let ids = counters.first().zip(counters.last()).map(|(first, last)| (first.number.0.id, last.number.0.id));
    let mut range = Range { kind, after, until: end, counters: Vec::new() };
    if let Some((first, last)) = ids
        && counters.iter().map(|counted| counted.rows as usize).sum::<usize>() > limit
    {
        // The last target's rows can be incomplete, so the next page reads this target again as a whole. If one target
        // has more rows than a page, all its rows are read now.
        if first == last {
            counters = read_counters(connection, kind, (TargetId(last.0 - 1), last), usize::MAX >> 1).await?;
        } else {
            counters.truncate(counters.partition_point(|counted| counted.number.0.id < last));
        }
        range.until = counters.last().map_or(last, |counted| counted.number.0.id);
    }
    range.counters = counters;
    Ok(range)
}

async fn read_counters(
    connection: &mut MySqlConnection,
    kind: Kind,
    (after, until): (TargetId, TargetId),
    limit: usize,
) -> Result<Vec<Counted>> {
    const ACTION: &str = "read counters";
    let mut rows = sqlx::query(
        "SELECT target_id, metric, value, update_at FROM counter WHERE kind = ? AND target_id > ? AND target_id <= ? \
         ORDER BY kind, target_id, metric, slot LIMIT ?",
    )
    .bind(kind.0)
    .bind(after.0)
    .bind(until.0)
    .bind(limit as u64)
    .fetch(connection);
    let mut counters: Vec<Counted> = Vec::new();
    while let Some(row) = rows.try_next().await.context(ACTION)? {
        let target = Target { kind, id: TargetId(row.try_get_unchecked(0).context(ACTION)?) };
        let number = (target, Metric(row.try_get_unchecked(1).context(ACTION)?));
        let value: i64 = row.try_get_unchecked(2).context(ACTION)?;
        let update_at = micros(row.try_get::<NaiveDateTime, _>(3).context(ACTION)?);
        match counters.last_mut().filter(|last| last.number == number) {
            Some(last) => {
                last.value = last.value.saturating_add(value);
                last.update_at = last.update_at.max(update_at);
                last.rows += 1;
            }
            None => counters.push(Counted { number, value, update_at, rows: 1 }),
        }
    }
    Ok(counters)
}

async fn read_likes(
    connection: &mut MySqlConnection,
    range: &Range,
    limit: usize,
) -> Result<Option<Vec<(TargetId, i64)>>> {
    const ACTION: &str = "recount like records";
    // COUNT is the fastest way. A sum of decimals or a comparison would take a tenth of the whole scan's time.
    let mut rows = sqlx::query(
        "SELECT target_id, COUNT(IF(is_del, NULL, 1)) FROM like_record \
         WHERE kind = ? AND target_id > ? AND target_id <= ? GROUP BY target_id ORDER BY target_id LIMIT ?",
    )
    .bind(range.kind.0)
    .bind(range.after.0)
    .bind(range.until.0)
    .bind(limit as u64)
    .fetch(connection);
    let mut likes = Vec::new();
    while let Some(row) = rows.try_next().await.context(ACTION)? {
        likes.push((TargetId(row.try_get_unchecked(0).context(ACTION)?), row.try_get_unchecked(1).context(ACTION)?));
    }
    Ok(if likes.len() < limit { Some(likes) } else { None })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_ends_before_the_target_with_too_many_likes() {
        let counted = |(id, metric, value)| Counted {
            number: (Target { kind: Kind(1), id: TargetId(id) }, Metric(metric)),
            value,
            update_at: Micros(0),
            rows: 1,
        };
        for (numbers, kept, until) in [
            (vec![(1, 1, 60), (1, 2, 900), (2, 1, 40), (3, 2, 500)], 4, 9),
            (vec![(1, 1, 60), (1, 2, 900), (2, 1, 41), (2, 2, 1), (3, 1, 1)], 2, 1),
            (vec![(1, 1, 101), (1, 2, 1), (2, 1, 1)], 2, 1),
        ] {
            let counters = numbers.into_iter().map(counted).collect();
            let mut range = Range { kind: Kind(1), after: TargetId(0), until: TargetId(9), counters };
            range.limit_likes(Metric(1), 100);
            assert_eq!((range.counters.len(), range.until), (kept, TargetId(until)));
        }
    }
}
