//! The outbox: the table of changes that the daemon must add to Redis. The transaction that changes `counter` also
//! writes the outbox.
//!
//! A batch assigns the number of an outbox row while it holds the lock on the partition's row in `partition_owner`. So
//! if a reader finds an outbox row, it can also read all earlier rows of this partition. A new number is one more than
//! the last number or MySQL's clock in microseconds, whichever is higher. So no number is assigned twice, even if MySQL
//! loses commits (after a restore or a failover; decision 0022).
//!
//! A row's body has up to a thousand items: additions as `kind:target:metric:delta`, then new likes as
//! `kind:target:user`, for Bloom filters.

use std::fmt::Write;
use std::time::{Duration, Instant};

use sqlx::{AssertSqlSafe, Connection, MySqlConnection, Row};
use tallyd_core::coalesce::Pair;
use tallyd_core::model::{Addition, CounterKey, Kind, Metric, Target, TargetId, UserId};
use tallyd_core::outbox::{KeptAmounts, OutboxLag, OutboxOffsets, OutboxRow};

use super::partitions::{self, LAST};
use super::text::Text;
use super::{Context, Result, Store, micros};

/// The maximum number of items in one row. Such a row has about 30 KiB.
const ROW_ITEMS: usize = 1_000;

/// The maximum number of rows in one read. One read can return a few megabytes.
const READ_ROWS: u64 = 100;

const PRUNED_ROWS: u64 = 1_000;

#[derive(Clone, Copy)]
pub struct Asked<'a> {
    pub applied: &'a OutboxOffsets,
    pub sampled: &'a (dyn Fn(CounterKey) -> Option<&'a OutboxOffsets> + Sync),
}

const PRUNE_MAX: Duration = Duration::from_secs(1);

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OutboxEnd {
    pub partition: u16,
    pub last: u64,
    pub owner: Option<String>,
}

pub async fn append(connection: &mut MySqlConnection, partition: u16, additions: &[Addition]) -> Result<()> {
    const ACTION: &str = "append to the outbox";
    let bodies = encode(additions, &[]);
    let rows = bodies.len() as u64;
    if rows == 0 {
        return Ok(());
    }
    partitions::make_owner(connection, partition).await?;
    let sql = format!("UPDATE partition_owner SET outbox = {LAST} + ? WHERE `partition` = ?");
    sqlx::query(AssertSqlSafe(sql)).bind(rows).bind(partition).execute(&mut *connection).await.context(ACTION)?;
    let last: u64 = sqlx::query_scalar("SELECT outbox FROM partition_owner WHERE `partition` = ? FOR UPDATE")
        .bind(partition)
        .fetch_one(&mut *connection)
        .await
        .context(ACTION)?;
    let mut text = Text::default();
    push_rows(&mut text, partition, last - rows, &bodies);
    text.run(connection, ACTION).await.map(drop)
}

/// `after` is the number of the last existing row. The transaction must have locked the partition's row.
pub fn append_after(text: &mut Text, partition: u16, after: u64, additions: &[Addition], likers: &[Pair]) {
    let last = push_rows(text, partition, after, &encode(additions, likers));
    if last > after {
        text.statement(&format!("UPDATE partition_owner SET outbox = {last} WHERE `partition` = {partition}"));
    }
}

fn push_rows(text: &mut Text, partition: u16, after: u64, bodies: &[String]) -> u64 {
    let mut number = after;
    for body in bodies {
        number += 1;
        // The body contains only digits, colons and spaces, so the body needs no quoting.
        let row = format!("({partition},{number},NOW(6),'{body}')");
        text.statement(&format!("INSERT INTO outbox (`partition`, number, written_at, body) VALUES {row}"));
    }
    number
}

fn encode(additions: &[Addition], likers: &[Pair]) -> Vec<String> {
    let mut bodies: Vec<String> = Vec::new();
    let mut items = 0;
    let mut push = |item: std::fmt::Arguments<'_>| {
        match bodies.last_mut().filter(|_| items % ROW_ITEMS > 0) {
            // Writing to a String cannot fail.
            Some(body) => drop(write!(body, " {item}")),
            None => bodies.push(item.to_string()),
        }
        items += 1;
    };
    for Addition { target, metric, delta } in additions {
        push(format_args!("{}:{}:{}:{delta}", target.kind, target.id, metric.0));
    }
    for (target, user) in likers {
        push(format_args!("{}:{}:{user}", target.kind, target.id));
    }
    bodies
}

fn decode(body: &[u8]) -> Option<(Vec<Addition>, Vec<Pair>)> {
    let (mut additions, mut likers) = (Vec::new(), Vec::new());
    for item in std::str::from_utf8(body).ok()?.split(' ') {
        let mut parts = item.split(':');
        let kind = Kind(parts.next()?.parse().ok()?);
        let target = Target { kind, id: TargetId(parts.next()?.parse().ok()?) };
        match (parts.next()?, parts.next(), parts.next()) {
            (metric, Some(delta), None) => {
                let (metric, delta) = (Metric(metric.parse().ok()?), delta.parse().ok()?);
                additions.push(Addition { target, metric, delta });
            }
            (user, None, None) => likers.push((target, UserId(user.parse().ok()?))),
            _ => return None,
        }
    }
    Some((additions, likers))
}

/// Reads the outbox rows that a sample can lack. Keeps only the sums of the counters in `asked`, because there can be
/// millions of rows. The caller's transaction must be a consistent snapshot.
pub(super) async fn read_lag(connection: &mut MySqlConnection, asked: &Asked<'_>) -> Result<OutboxLag> {
    let mut lag = OutboxLag::after(asked.applied.clone());
    for (partition, last) in read_marks(connection, ENDS).await?.iter() {
        let mut after = asked.applied.of(partition);
        while after < last {
            let some = read_rows(connection, (partition, after), READ_ROWS).await?;
            let Some(next) = some.last().map(|row| row.number) else { break };
            after = next;
            some.iter().for_each(|row| lag.note(row, asked.sampled));
        }
    }
    lag.note_pruned(read_marks(connection, PRUNED).await?);
    Ok(lag)
}

const ENDS: &str = "SELECT `partition`, outbox FROM partition_owner";
const APPLIED: &str = "SELECT `partition`, applied FROM outbox_state";
const PRUNED: &str = "SELECT `partition`, pruned FROM outbox_state";

async fn read_marks(connection: &mut MySqlConnection, sql: &'static str) -> Result<OutboxOffsets> {
    const ACTION: &str = "read the outbox's progress";
    let rows = sqlx::query(sql).fetch_all(connection).await.context(ACTION)?;
    let read = |row: &sqlx::mysql::MySqlRow| Ok((row.try_get(0)?, row.try_get(1)?));
    rows.iter().map(read).collect::<std::result::Result<OutboxOffsets, sqlx::Error>>().context(ACTION)
}

async fn read_rows(
    connection: &mut MySqlConnection,
    (partition, after): (u16, u64),
    limit: u64,
) -> Result<Vec<OutboxRow>> {
    const ACTION: &str = "read the outbox";
    let sql =
        "SELECT number, body, written_at FROM outbox WHERE `partition` = ? AND number > ? ORDER BY number LIMIT ?";
    let rows = sqlx::query(sql).bind(partition).bind(after).bind(limit).fetch_all(connection).await.context(ACTION)?;
    let read = |row: &sqlx::mysql::MySqlRow| {
        let number = row.try_get(0)?;
        let (additions, likers) = decode(row.try_get(1)?)
            .ok_or_else(|| sqlx::Error::Decode(format!("outbox {partition} {number} has an invalid body").into()))?;
        Ok(OutboxRow { partition, number, written_at: micros(row.try_get(2)?), additions, likers })
    };
    rows.iter().map(read).collect::<std::result::Result<_, sqlx::Error>>().context(ACTION)
}

impl Store {
    /// Returns the end of each outbox that has ever contained a row, even if its partition is no longer configured.
    pub async fn outbox_ends(&self) -> Result<Vec<OutboxEnd>> {
        const ACTION: &str = "read the outbox's progress";
        let mut conn = self.acquire().await?;
        let rows = conn
            .limit(ACTION, |connection| async move {
                let sql = "SELECT `partition`, outbox, owner FROM partition_owner WHERE outbox > 0";
                sqlx::query(sql).fetch_all(connection).await.context(ACTION)
            })
            .await?;
        let read = |row: &sqlx::mysql::MySqlRow| {
            Ok(OutboxEnd { partition: row.try_get(0)?, last: row.try_get(1)?, owner: row.try_get(2)? })
        };
        rows.iter().map(read).collect::<std::result::Result<_, sqlx::Error>>().context(ACTION)
    }

    pub async fn outbox_numbers(&self) -> Result<OutboxOffsets> {
        self.acquire().await?.limit("read the outbox's progress", |connection| read_marks(connection, ENDS)).await
    }

    /// Redis contains all rows up to these numbers, and possibly later rows (decision 0023).
    pub async fn outbox_applied(&self) -> Result<OutboxOffsets> {
        self.acquire().await?.limit("read the outbox's progress", |connection| read_marks(connection, APPLIED)).await
    }

    pub async fn outbox_rows(&self) -> Result<u64> {
        const ACTION: &str = "count the rows of the outbox";
        // The daemon first reads the applied offsets, and then the number of each outbox's last row. In the other
        // order, an offset could be larger than the number of the outbox's last row.
        let applied = self.outbox_applied().await?;
        let behind = self.outbox_numbers().await?;
        let behind = behind.iter().filter(|(partition, last)| *last > applied.of(*partition));
        let of = |(partition, _)| {
            let after = applied.of(partition);
            format!("(SELECT COUNT(*) FROM outbox WHERE `partition` = {partition} AND number > {after})")
        };
        let counts: Vec<String> = behind.map(of).collect();
        if counts.is_empty() {
            return Ok(0);
        }
        let sql = format!("SELECT {}", counts.join(" + "));
        let mut conn = self.acquire().await?;
        let rows: i64 = conn
            .limit(ACTION, |connection| async move {
                sqlx::query_scalar(AssertSqlSafe(sql)).fetch_one(connection).await.context(ACTION)
            })
            .await?;
        Ok(rows.unsigned_abs())
    }

    /// Returns whether Redis lacks a row of the outbox that is older than `old`. Daemons record their progress once a
    /// second, so `old` must be longer than a second.
    pub async fn outbox_is_behind(&self, old: Duration) -> Result<bool> {
        const ACTION: &str = "read the age of the outbox";
        let (applied, old) = (self.outbox_applied().await?, old.as_micros());
        let ends = self.outbox_numbers().await?;
        let behind = ends.iter().filter(|(partition, last)| *last > applied.of(*partition));
        let is_old = |(partition, _)| {
            let after = applied.of(partition);
            format!(
                "(SELECT written_at <= NOW(6) - INTERVAL {old} MICROSECOND FROM outbox \
                 WHERE `partition` = {partition} AND number > {after} ORDER BY number LIMIT 1)"
            )
        };
        let sql = behind.map(is_old).collect::<Vec<_>>().join(" UNION ALL ");
        if sql.is_empty() {
            return Ok(false);
        }
        let mut conn = self.acquire().await?;
        conn.limit(ACTION, |connection| async move {
            let rows = sqlx::query(AssertSqlSafe(sql)).fetch_all(connection).await.context(ACTION)?;
            let is_old = |row: &sqlx::mysql::MySqlRow| row.try_get_unchecked::<i64, _>(0).map(|is_old| is_old != 0);
            let are_old = rows.iter().map(is_old).collect::<std::result::Result<Vec<_>, _>>().context(ACTION)?;
            Ok(are_old.contains(&true))
        })
        .await
    }

    /// Returns at most `limit` of a partition's outbox rows after the number `after`, in order.
    ///
    /// # Errors
    /// Fails if MySQL returns an error, or if a row is invalid because a person changed it.
    pub async fn outbox_after(&self, partition: u16, after: u64, limit: u64) -> Result<Vec<OutboxRow>> {
        let mut conn = self.acquire().await?;
        conn.limit("read the outbox", |connection| read_rows(connection, (partition, after), limit)).await
    }

    pub async fn outbox_kept(&self, kept: &mut KeptAmounts) -> Result<()> {
        const ROWS_MAX: u64 = 100;
        for OutboxEnd { partition, .. } in self.outbox_ends().await? {
            let mut after = Some(0);
            while let Some(from) = after {
                let rows = self.outbox_after(partition, from, ROWS_MAX).await?;
                rows.iter().for_each(|row| kept.note(row));
                after = rows.last().map(|row| row.number);
            }
        }
        Ok(())
    }

    pub async fn note_outbox_applied(&self, applied: &OutboxOffsets) -> Result<()> {
        const ACTION: &str = "record the outbox's progress";
        if applied.is_empty() {
            return Ok(());
        }
        let rows: Vec<String> = applied.iter().map(|(partition, number)| format!("({partition},{number})")).collect();
        let sql = format!(
            "INSERT INTO outbox_state (`partition`, applied) VALUES {} \
             ON DUPLICATE KEY UPDATE applied = GREATEST(applied, VALUES(applied))",
            rows.join(",")
        );
        let mut conn = self.acquire().await?;
        conn.limit(ACTION, |connection| async move {
            sqlx::raw_sql(AssertSqlSafe(sql)).execute(connection).await.context(ACTION)?;
            Ok(())
        })
        .await
    }

    pub async fn prune_outbox(&self, partition: u16, until: u64) -> Result<bool> {
        let began = Instant::now();
        while self.prune_some(partition, until).await? {
            if began.elapsed() > PRUNE_MAX {
                return Ok(true);
            }
        }
        Ok(false)
    }

    async fn prune_some(&self, partition: u16, until: u64) -> Result<bool> {
        const ACTION: &str = "delete old rows of the outbox";
        let mut conn = self.acquire().await?;
        conn.limit(ACTION, |connection| async move {
            let mut tx = connection.begin().await.context(ACTION)?;
            let state = "SELECT applied, pruned FROM outbox_state WHERE `partition` = ? FOR UPDATE";
            let state = sqlx::query(state).bind(partition).fetch_optional(&mut *tx).await.context(ACTION)?;
            let Some(state) = state else { return Ok(false) };
            let (applied, pruned): (u64, u64) = (state.try_get(0).context(ACTION)?, state.try_get(1).context(ACTION)?);
            let until = until.min(applied);
            if until <= pruned {
                return Ok(false);
            }
            let last =
                "SELECT number FROM outbox WHERE `partition` = ? AND number <= ? ORDER BY number LIMIT 1 OFFSET ?";
            let last = sqlx::query_scalar(last).bind(partition).bind(until).bind(PRUNED_ROWS - 1);
            let last: u64 = last.fetch_optional(&mut *tx).await.context(ACTION)?.unwrap_or(until);
            for sql in [
                "UPDATE outbox_state SET pruned = ? WHERE `partition` = ?",
                "DELETE FROM outbox WHERE number <= ? AND `partition` = ?",
            ] {
                sqlx::query(sql).bind(last).bind(partition).execute(&mut *tx).await.context(ACTION)?;
            }
            tx.commit().await.context(ACTION)?;
            Ok(last < until)
        })
        .await
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn what_is_no_body_is_refused() {
        for body in ["", "1:2", "1:2:3:4:5", "1:2:3:4 ", "256:2:3:4", "256:2:3", "x", "1:-2:3:4", "1:2:-3"] {
            assert_eq!(decode(body.as_bytes()), None, "{body}");
        }
    }

    proptest! {
        #[test]
        fn bodies_are_read_back(
            rows in prop::collection::vec((any::<u8>(), any::<u64>(), any::<u8>(), any::<i64>()), 0..9),
            likes in prop::collection::vec((any::<u8>(), any::<u64>(), any::<u64>()), 0..9),
            repeated in prop_oneof![Just(1), Just(300)],
        ) {
            let target = |kind, id| Target { kind: Kind(kind), id: TargetId(id) };
            let addition = |(kind, id, metric, delta)| Addition { target: target(kind, id), metric: Metric(metric), delta };
            let additions: Vec<Addition> = rows.into_iter().map(addition).collect::<Vec<_>>().repeat(repeated);
            let likers: Vec<Pair> = likes.into_iter().map(|(kind, id, user)| (target(kind, id), UserId(user))).collect();
            let mut read = (Vec::new(), Vec::new());
            for body in encode(&additions, &likers) {
                prop_assert!(body.split(' ').count() <= ROW_ITEMS);
                let (some, of_them) = decode(body.as_bytes()).unwrap();
                read.0.extend(some);
                read.1.extend(of_them);
            }
            prop_assert_eq!(read, (additions, likers));
        }
    }
}
