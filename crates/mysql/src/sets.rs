//! The state of settable counters: each counter's newest set event, and the recent additions.
//!
//! A transaction first locks the counters' rows in `number_set`, in the order of the keys (decision 0015). Its reads of
//! other data of these counters take no locks, because every writer must first lock the same rows.

use std::collections::HashMap;
use std::fmt::Write;
use std::hash::BuildHasher;

use chrono::NaiveDateTime;
use sqlx::mysql::MySqlRow;
use sqlx::{AssertSqlSafe, MySqlConnection, Row};
use tallyd_core::event::CountEvent;
use tallyd_core::model::{CounterKey, Metric, Micros};
use tallyd_core::resolve_sets::{LastSet, Standing};

use super::applied_events::{DAYS, day, partition_of};
use super::text::Text;
use super::{Context, Result, micros, target};

const STATEMENT_ROWS: usize = 1_000;

/// The maximum number of counters in one SELECT. MariaDB turns longer lists into a join.
const ASKED_NUMBERS: usize = 256;

/// Locks counters until the transaction ends. For each counter, returns the newest set event that MySQL has stored. The
/// counters must be sorted by key.
pub async fn lock(connection: &mut MySqlConnection, numbers: &[CounterKey]) -> Result<HashMap<CounterKey, LastSet>> {
    const ACTION: &str = "lock counters with set events";
    let mut known = HashMap::with_capacity(numbers.len());
    for piece in numbers.chunks(STATEMENT_ROWS) {
        let rows = list(piece.iter(), |sql, (target, metric)| {
            let _ = write!(sql, "({},{},{},0,0)", target.kind, target.id, metric.0);
        });
        // To lock an existing row, the statement writes to the row. The header of `partitions` explains the reason.
        // INSERT IGNORE would take only a read lock. Two writers could hold the read lock at the same time, and would
        // then deadlock.
        let mut text = Text::default();
        text.statement(&format!(
            "INSERT INTO number_set (kind, target_id, metric, at_us, value) VALUES {rows} \
             ON DUPLICATE KEY UPDATE writes = writes + 1"
        ));
        for asked in piece.chunks(ASKED_NUMBERS) {
            text.statement(&format!(
                "SELECT kind, target_id, metric, at_us, value FROM number_set WHERE (kind, target_id, metric) IN ({})",
                keys(asked.iter())
            ));
        }
        for row in text.run(connection, ACTION).await? {
            let read = || Ok((number(&row)?, LastSet { at: Micros(row.try_get(3)?), value: row.try_get(4)? }));
            let (number, last) = read().context(ACTION)?;
            known.insert(number, last);
        }
    }
    Ok(known)
}

/// [`lock`] must have locked these counters.
pub async fn standing(
    connection: &mut MySqlConnection,
    sets: &[(CounterKey, LastSet)],
) -> Result<HashMap<CounterKey, Standing>> {
    const ACTION: &str = "read counters with set events";
    let mut standing: HashMap<CounterKey, Standing> =
        sets.iter().map(|(number, _)| (*number, Standing::default())).collect();
    for piece in sets.chunks(ASKED_NUMBERS) {
        // The sum is read as text, because the sum of a counter's rows can be larger than 64 bits.
        let sql = format!(
            "SELECT kind, target_id, metric, CAST(SUM(value) AS CHAR), MAX(update_at) FROM counter \
             WHERE (kind, target_id, metric) IN ({}) GROUP BY kind, target_id, metric",
            keys(piece.iter().map(|(number, _)| number))
        );
        for row in sqlx::raw_sql(AssertSqlSafe(sql)).fetch_all(&mut *connection).await.context(ACTION)? {
            let read = || Ok((number(&row)?, sum(&row)?, micros(row.try_get::<NaiveDateTime, _>(4)?)));
            let (number, counted, update_at) = read().context(ACTION)?;
            standing.insert(number, Standing { counted, since: 0, update_at: Some(update_at) });
        }
    }
    // Normally a set event is newer than all applied events of its counter. If a newer event was applied already, the
    // function also reads the recent additions. This is rare, because most events arrive in time.
    let is_late = |(number, set): &&(CounterKey, LastSet)| {
        standing.get(number).is_some_and(|it| it.update_at.is_some_and(|update_at| update_at > set.at))
    };
    let late: Vec<(CounterKey, LastSet)> = sets.iter().filter(is_late).copied().collect();
    for piece in late.chunks(ASKED_NUMBERS) {
        let sql = select_since(piece, &standing);
        for row in sqlx::raw_sql(AssertSqlSafe(sql)).fetch_all(&mut *connection).await.context(ACTION)? {
            let read = || Ok((number(&row)?, sum(&row)?));
            let (number, since) = read().context(ACTION)?;
            standing.entry(number).or_default().since = since;
        }
    }
    Ok(standing)
}

/// Each day has a partition: reads only the days between the earliest set event and the newest applied event.
fn select_since<S: BuildHasher>(late: &[(CounterKey, LastSet)], standing: &HashMap<CounterKey, Standing, S>) -> String {
    let newest = |(number, _): &(CounterKey, LastSet)| standing.get(number).and_then(|it| it.update_at);
    let first = late.iter().map(|(_, set)| day(set.at)).min().unwrap_or_default();
    let last = late.iter().filter_map(newest).map(day).max().unwrap_or(first);
    let partitions: Vec<String> =
        (first..=last.min(first + DAYS - 1)).map(|day| format!("p{}", partition_of(day))).collect();
    let mut conditions = String::new();
    for ((target, metric), set) in late {
        let or = if conditions.is_empty() { "" } else { " OR " };
        let _ = write!(
            conditions,
            "{or}(kind = {} AND target_id = {} AND metric = {} AND at_us > {})",
            target.kind, target.id, metric.0, set.at
        );
    }
    format!(
        "SELECT kind, target_id, metric, CAST(SUM(delta) AS CHAR) FROM recent_delta PARTITION ({}) \
         WHERE {conditions} GROUP BY kind, target_id, metric",
        partitions.join(", ")
    )
}

/// Both lists must be sorted by key.
pub async fn note(
    connection: &mut MySqlConnection,
    sets: &[(CounterKey, LastSet)],
    counts: &[CountEvent],
) -> Result<()> {
    const ACTION: &str = "record sets and additions";
    for piece in sets.chunks(STATEMENT_ROWS) {
        let rows = list(piece.iter(), |sql, ((target, metric), set)| {
            let _ = write!(sql, "({},{},{},{},{})", target.kind, target.id, metric.0, set.at, set.value);
        });
        let sql = format!(
            "INSERT INTO number_set (kind, target_id, metric, at_us, value) VALUES {rows} \
             ON DUPLICATE KEY UPDATE at_us = VALUES(at_us), value = VALUES(value)"
        );
        sqlx::raw_sql(AssertSqlSafe(sql)).execute(&mut *connection).await.context(ACTION)?;
    }
    for piece in counts.chunks(STATEMENT_ROWS) {
        let rows = list(piece.iter(), |sql, count| {
            let CountEvent { target, metric, delta, at, id } = count;
            let id = u128::from_be_bytes(id.0);
            let _ = write!(sql, "({},{},{},{at},x'{id:032x}',{delta})", target.kind, target.id, metric.0);
        });
        // If a person has emptied the ledger, an event can be added to `counter` twice. If this happens, this statement
        // also adds the event's amount to `recent_delta` twice. So the two tables contain the same sum.
        let sql = format!(
            "INSERT INTO recent_delta (kind, target_id, metric, at_us, id, delta) VALUES {rows} \
             ON DUPLICATE KEY UPDATE delta = delta + VALUES(delta)"
        );
        sqlx::raw_sql(AssertSqlSafe(sql)).execute(&mut *connection).await.context(ACTION)?;
    }
    Ok(())
}

fn keys<'a>(numbers: impl Iterator<Item = &'a CounterKey>) -> String {
    list(numbers, |sql, (target, metric)| {
        let _ = write!(sql, "({},{},{})", target.kind, target.id, metric.0);
    })
}

fn list<T>(rows: impl Iterator<Item = T>, write: impl Fn(&mut String, T)) -> String {
    let mut sql = String::new();
    for row in rows {
        if !sql.is_empty() {
            sql.push(',');
        }
        write(&mut sql, row);
    }
    sql
}

fn number(row: &MySqlRow) -> std::result::Result<CounterKey, sqlx::Error> {
    Ok((target(row, 0)?, Metric(row.try_get(2)?)))
}

fn sum(row: &MySqlRow) -> std::result::Result<i128, sqlx::Error> {
    let text: String = row.try_get(3)?;
    text.parse().map_err(|error: std::num::ParseIntError| sqlx::Error::Decode(error.into()))
}
