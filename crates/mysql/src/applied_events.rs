//! The ledger: the table of the `count` events that were applied, so that each is applied once even if the broker
//! delivers it several times (decision 0016).
//!
//! An entry begins with the event's `at` in seconds, so that entries of similar times are side by side, and has 16
//! bytes of its id's hash. The table has 32 partitions, one per day, which are reused. An expired one is emptied in one
//! step (TRUNCATE PARTITION).

use std::collections::HashSet;
use std::fmt::Write;
use std::time::Duration;

use sqlx::{AssertSqlSafe, MySqlConnection, Row};
use tallyd_core::coalesce::Entry;
use tallyd_core::event::EventId;
use tallyd_core::model::Micros;

use super::text::Text;
use super::{Context, Result, Store};

/// The maximum number of entries in one statement: about 200 KiB.
const STATEMENT_ENTRIES: usize = 5_000;

/// The maximum number of entries in one SELECT. If a SELECT has more entries, MariaDB turns the list of entries into a
/// join.
const ASKED_ENTRIES: usize = 256;

/// The number of partitions of `applied_event` and of `recent_delta`, as in their migrations.
pub(super) const DAYS: i64 = 32;

const DAY_S: i64 = 86_400;

/// Records that these events were applied. The events must be sorted by key.
///
/// # Errors
/// Fails with MySQL's error 1062 if one of the events was already applied. Then the caller must roll the transaction
/// back, and must read the ledger before its next attempt.
pub async fn note_applied(connection: &mut MySqlConnection, entries: &[Entry]) -> Result<()> {
    for piece in entries.chunks(STATEMENT_ENTRIES) {
        let sql = format!("INSERT INTO applied_event (at_s, id) VALUES {}", listed(piece));
        sqlx::raw_sql(AssertSqlSafe(sql))
            .execute(&mut *connection)
            .await
            .context("record which events were applied")?;
    }
    Ok(())
}

pub async fn applied(connection: &mut MySqlConnection, entries: &[Entry]) -> Result<HashSet<Entry>> {
    const ACTION: &str = "read which events were applied";
    let mut applied = HashSet::new();
    let mut text = Text::default();
    for piece in entries.chunks(ASKED_ENTRIES) {
        text.statement(&format!("SELECT at_s, id FROM applied_event WHERE (at_s, id) IN ({})", listed(piece)));
    }
    for row in text.run(connection, ACTION).await? {
        let (second, id): (u32, Vec<u8>) = (row.try_get(0).context(ACTION)?, row.try_get(1).context(ACTION)?);
        // The column always contains 16 bytes.
        if let Ok(id) = id.try_into() {
            applied.insert(Entry { second: second.into(), id: EventId(id) });
        }
    }
    Ok(applied)
}

fn listed(entries: &[Entry]) -> String {
    let mut list = String::with_capacity(entries.len() * 50);
    for Entry { second, id } in entries {
        let separator = if list.is_empty() { "" } else { "," };
        // Writing to a String cannot fail.
        let _ = write!(list, "{separator}({second},x'{:032x}')", u128::from_be_bytes(id.0));
    }
    list
}

impl Store {
    /// First raises the ledger's floor (the oldest event time that batches accept), so that every batch refuses events
    /// of the expired days, even with another configuration. A batch that read the former floor has locked its
    /// partition's row: this call waits a few seconds for it, and otherwise leaves the days to the next call.
    pub async fn forget_applied(&self, now: Micros, keep: Duration) -> Result<u64> {
        const ACTION: &str = "delete old entries of the ledger";
        let mut conn = self.acquire().await?;
        conn.limit(ACTION, |connection| async move {
            sqlx::query("UPDATE partition_owner SET ledger_floor = ? WHERE ledger_floor < ?")
                .bind(floor_s(now, keep))
                .bind(floor_s(now, keep))
                .execute(&mut *connection)
                .await
                .context(ACTION)?;
            let mut forgotten = 0;
            let of = |table: &'static str| over(now, keep).into_iter().map(move |partition| (table, partition));
            for (table, partition) in of("applied_event").chain(of("recent_delta")) {
                let sql = format!("SELECT 1 FROM {table} PARTITION (p{partition}) LIMIT 1");
                let row = sqlx::raw_sql(AssertSqlSafe(sql)).fetch_optional(&mut *connection).await.context(ACTION)?;
                if row.is_none() {
                    continue;
                }
                // This ALTER waits for transactions that use the table, and later statements wait for the ALTER. If the
                // ALTER fails, the connection is closed, so its `lock_wait_timeout` need not be reset.
                let sql = format!(
                    "SET SESSION lock_wait_timeout = 2; ALTER TABLE {table} TRUNCATE PARTITION p{partition}; \
                     SET SESSION lock_wait_timeout = DEFAULT"
                );
                sqlx::raw_sql(AssertSqlSafe(sql)).execute(&mut *connection).await.context(ACTION)?;
                forgotten += 1;
            }
            Ok(forgotten)
        })
        .await
    }
}

/// Because the clocks of machines differ, three more days stay: the day before the day of `now - keep`, and the two
/// days after today.
fn over(now: Micros, keep: Duration) -> Vec<i64> {
    let kept: HashSet<i64> = (day(now.before(keep)) - 1..=day(now) + 2).map(partition_of).collect();
    (0..DAYS).filter(|partition| !kept.contains(partition)).collect()
}

/// Returns the beginning of the day that precedes the day of `now - keep`. [`over`] does not return the partition of
/// this day.
fn floor_s(now: Micros, keep: Duration) -> i64 {
    ((day(now.before(keep)) - 1) * DAY_S).max(0)
}

pub(super) fn day(at: Micros) -> i64 {
    at.0.div_euclid(1_000_000 * DAY_S)
}

pub(super) fn partition_of(day: i64) -> i64 {
    day.rem_euclid(DAYS)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn what_is_over_is_every_day_but_those_that_are_kept() {
        let day = |day: i64| Micros(day * DAY_S * 1_000_000 + 5);
        // 32 * 600 + 10 is today.
        let kept: Vec<i64> =
            (0..DAYS).filter(|it| !over(day(19_210), Duration::from_secs(86_400)).contains(it)).collect();
        assert_eq!(kept, [8, 9, 10, 11, 12]);
        assert_eq!(over(day(19_210), Duration::from_secs(27 * 86_400)), [13], "one partition is still expired");
    }

    proptest! {
        #[test]
        fn no_event_that_would_be_taken_is_forgotten(
            now in 27 * 86_400..4_000_000_000_i64,
            keep_s in 3_600..=27 * 86_400_i64,
            age in 0.0..1.0_f64,
            ahead_s in 0..=86_400_i64,
        ) {
            let (now, keep) = (Micros(now * 1_000_000), Duration::from_secs(keep_s.unsigned_abs()));
            let now_s = now.0 / 1_000_000;
            for second in [now_s - (keep_s as f64 * age) as i64, now_s + ahead_s] {
                prop_assert!(second >= floor_s(now, keep));
                prop_assert!(!over(now, keep).contains(&second.div_euclid(DAY_S).rem_euclid(DAYS)));
            }
        }
    }
}
