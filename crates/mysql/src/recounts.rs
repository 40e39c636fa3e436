//! Numbers whose truth is another table: the operator's query beside `counter`, in one snapshot.
//!
//! The query is the operator's own text, so what is wrong with it is told in words ([`RecountError::Query`]), apart from a server that is
//! away. It runs in a READ ONLY transaction, for so long at most, and its answer is not read further than was asked for.

use std::fmt::Display;
use std::time::Duration;

use futures_util::TryStreamExt;
use sqlx::mysql::{MySqlDatabaseError, MySqlRow};
use sqlx::{AssertSqlSafe, Column, Executor, MySqlConnection, Row, TypeInfo};
use tallyd_core::model::{Kind, Metric, Micros, TargetId};

use super::counters::begin_snapshot;
use super::ranges::{Counted, LAST, list_range};
use super::{Context, Result, Store, StoreError};

/// How much longer than the server an answer is waited for, until the connection is dropped.
const ANSWER_GRACE: Duration = Duration::from_secs(5);

/// Rows of `counter` that one statement reads.
const STATEMENT_ROWS: usize = 20_000;

/// Rows of `counter` that are read for one page: seconds.
const ROWS_MAX: u64 = 1_000_000;

/// Why a query's answer can't be had.
#[derive(Debug, thiserror::Error)]
pub enum RecountError {
    /// The query is wrong, or may not run: a sentence for whoever wrote it.
    #[error("{0}")]
    Query(String),
    /// MySQL is away.
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// What came of asking.
pub type Told<T> = std::result::Result<T, RecountError>;

/// A query, made for one page.
#[derive(Clone, Debug)]
pub struct Question {
    /// The statement.
    pub sql: String,
    /// Ids are above this one.
    pub after: TargetId,
    /// No more than so many are wanted.
    pub limit: usize,
    /// How long it may take.
    pub query_max: Duration,
}

/// What the query and `counter` say of a range of ids, as of one instant.
#[derive(Clone, Debug, Default)]
pub struct Answer {
    /// What the query says, in order of id.
    pub truths: Vec<(TargetId, i64)>,
    /// The counters there, in order of id: each one's number, and the newest `at` that was applied to it.
    pub counters: Vec<(TargetId, i64, Micros)>,
    /// The range's last id.
    pub until: TargetId,
}

impl Store {
    /// Asks MySQL what the query returns, without running it; and how it would be run, a line for each table.
    pub async fn explain_recount(&self, question: &Question) -> Told<Vec<String>> {
        let mut conn = self.acquire().await?;
        let told = conn.unlimited(|connection| async move {
            let plan = match describe(connection, question).await {
                Ok(()) => explain(connection, question).await,
                Err(error) => Err(error),
            };
            part(plan)
        });
        told.await?.map_err(RecountError::Query)
    }

    /// Runs the query, and reads the counters of its page beside it: up to the last id of a full answer, else up to `until`; of too many
    /// counters as many as targets are wanted, and then the page ends with the last of these.
    pub async fn ask_recount(
        &self,
        (kind, metric): (Kind, Metric),
        question: &Question,
        until: TargetId,
    ) -> Told<Answer> {
        let mut conn = self.acquire().await?;
        let read = conn.unlimited(|connection| async move {
            let longest = question.query_max + ANSWER_GRACE;
            match tokio::time::timeout(longest, ask(connection, (kind, metric), question, until)).await {
                Ok(answer) => part(answer),
                // The connection is dropped, and the query with it.
                Err(_) => Err(StoreError::Timeout { action: "run the query", limit: longest }),
            }
        });
        let read = match read.await {
            Err(StoreError::Timeout { .. }) => Err(too_long(question.query_max)),
            read => read?.map_err(RecountError::Query),
        };
        // Perhaps the answer goes on, without an end.
        conn.broken |= read.is_err();
        read
    }
}

/// Parts what is wrong with the query from what is wrong with the server.
fn part<T>(told: Told<T>) -> Result<std::result::Result<T, String>> {
    match told {
        Ok(answer) => Ok(Ok(answer)),
        Err(RecountError::Query(sentence)) => Ok(Err(sentence)),
        Err(RecountError::Store(error)) => Err(error),
    }
}

fn wrong(sentence: impl Display) -> RecountError {
    RecountError::Query(sentence.to_string())
}

fn too_long(query_max: Duration) -> RecountError {
    wrong(format!(
        "the query took longer than query_max = {} s: give its table an index on the target's id, make page_targets smaller or query_max \
         longer",
        query_max.as_secs()
    ))
}

/// Whose fault an error of the query's own statement is.
fn of_query(error: sqlx::Error, query_max: Duration) -> RecountError {
    let sqlx::Error::Database(database) = &error else {
        return StoreError::sql("run the query")(error).into();
    };
    let number = database.try_downcast_ref::<MySqlDatabaseError>().map_or(0, MySqlDatabaseError::number);
    let said = database.message();
    match number {
        // MySQL, MariaDB.
        3024 | 1969 => too_long(query_max),
        1044 | 1142 | 1143 | 1227 | 1370 => wrong(format!(
            "the account of [mysql] url may not run the query ({said}): give it the right to SELECT from that table"
        )),
        // A server that stops, is full of connections or read over a broken one; rivals; a connection that somebody ended.
        1040 | 1053 | 1077 | 1078 | 1079 | 1152..=1161 | 1205 | 1213 | 1317 | 1927 | 2006 | 2013 | 3169 => {
            StoreError::sql("run the query")(error).into()
        }
        _ => wrong(format!("MySQL does not run the query ({said})")),
    }
}

/// What the query returns must be two columns of integers.
async fn describe(connection: &mut MySqlConnection, question: &Question) -> Told<()> {
    let told = connection.describe(sqlx::SqlSafeStr::into_sql_str(AssertSqlSafe(question.sql.clone()))).await;
    let told = told.map_err(|error| of_query(error, question.query_max))?;
    let columns = told.columns();
    let [id, value] = columns else {
        return Err(wrong(format!(
            "the query returns {} columns: it must be two, target id and number",
            columns.len()
        )));
    };
    let is_integer = |name: &str| {
        let name = name.trim_end_matches(" UNSIGNED");
        matches!(name, "TINYINT" | "SMALLINT" | "MEDIUMINT" | "INT" | "BIGINT" | "BOOLEAN")
    };
    let (id_type, value_type) = (id.type_info().name(), value.type_info().name());
    if !is_integer(id_type) {
        return Err(wrong(format!(
            "the query's first column, {}, is {id_type}: it must be the target's id, an integer",
            id.name()
        )));
    }
    // SUM makes a DECIMAL of integers.
    if !is_integer(value_type) && value_type != "DECIMAL" {
        return Err(wrong(format!(
            "the query's second column, {}, is {value_type}: it must be the number, an integer; CAST(... AS SIGNED) makes it one",
            value.name()
        )));
    }
    Ok(())
}

async fn explain(connection: &mut MySqlConnection, question: &Question) -> Told<Vec<String>> {
    // MySQL 9 would draw a tree.
    let sql = format!("EXPLAIN FORMAT=TRADITIONAL {}", question.sql);
    let rows = connection.fetch_all(sqlx::raw_sql(AssertSqlSafe(sql))).await;
    let rows = rows.map_err(|error| of_query(error, question.query_max))?;
    let line = |row: &MySqlRow| {
        let of = |name: &str| row.try_get_unchecked::<Option<&str>, _>(name).ok().flatten().unwrap_or("-");
        let (table, way, key, rows) = (of("table"), of("type"), of("key"), of("rows"));
        format!("table {table}, access {way}, key {key}, about {rows} rows")
    };
    Ok(rows.iter().map(line).collect())
}

async fn ask(
    connection: &mut MySqlConnection,
    (kind, metric): (Kind, Metric),
    question: &Question,
    until: TargetId,
) -> Told<Answer> {
    let mut tx = begin_snapshot(connection).await?;
    if question.after.0 == 0 {
        // Of an answer without rows nothing else tells the columns.
        describe(&mut tx, question).await?;
    }
    limit_time(&mut tx, Some(question.query_max)).await?;
    let mut truths = run(&mut tx, question).await?;
    limit_time(&mut tx, None).await?;
    let end = truths.last().filter(|_| truths.len() >= question.limit).map_or(until, |(id, _)| until.min(*id));
    let (counters, end) = counters_between(&mut tx, (kind, metric), (question.after, end), question.limit).await?;
    truths.retain(|(id, _)| *id <= end);
    tx.commit().await.context("read counters")?;
    Ok(Answer { truths, counters, until: end })
}

/// Has the server end a statement of this session after so long, or none any longer.
async fn limit_time(connection: &mut MySqlConnection, limit: Option<Duration>) -> Result<()> {
    const ACTION: &str = "limit the time of the query";
    let seconds = limit.map_or(0.0, |limit| limit.as_secs_f64());
    let millis = limit.map_or(0, |limit| limit.as_millis());
    let of_mariadb = format!("SET SESSION max_statement_time = {seconds}");
    let set = connection.execute(sqlx::raw_sql(AssertSqlSafe(of_mariadb))).await.context(ACTION);
    match set {
        // MySQL has another name for it, and only for SELECT.
        Err(error) if error.number() == Some(1193) => {
            let of_mysql = format!("SET SESSION max_execution_time = {millis}");
            connection.execute(sqlx::raw_sql(AssertSqlSafe(of_mysql))).await.context(ACTION).map(drop)
        }
        set => set.map(drop),
    }
}

/// Runs the query, and holds its answer to what was asked for.
async fn run(connection: &mut MySqlConnection, question: &Question) -> Told<Vec<(TargetId, i64)>> {
    let mut found: Vec<(TargetId, i64)> = Vec::new();
    let mut last = question.after;
    let mut rows = connection.fetch(sqlx::raw_sql(AssertSqlSafe(question.sql.clone())));
    while let Some(row) = rows.try_next().await.map_err(|error| of_query(error, question.query_max))? {
        let (id, value) = read_row(&row)?;
        if id <= last {
            return Err(wrong(match found.last() {
                None => format!("the query returns target {id} where ids above {last} were asked for"),
                Some(_) => format!(
                    "the query returns target {id} after {last}: each target once, in order of its id (GROUP BY and ORDER BY)"
                ),
            }));
        }
        if found.len() == question.limit {
            let limit = question.limit;
            return Err(wrong(format!("the query returns more than the {limit} rows that :limit says")));
        }
        last = id;
        found.push((id, value));
    }
    Ok(found)
}

fn read_row(row: &MySqlRow) -> Told<(TargetId, i64)> {
    let text = |place: usize| row.try_get_unchecked::<Option<&str>, _>(place).context("read the query's answer");
    let Some(id) = text(0)? else { return Err(wrong("the query returns a target whose id is NULL")) };
    let known = id.parse().ok().filter(|id| (1..=LAST.0).contains(id)).map(TargetId);
    let target = known.ok_or_else(|| wrong(format!("the query returns the target {id}: ids are 1 to {}", LAST.0)))?;
    let Some(value) = text(1)? else {
        return Err(wrong(format!("the query returns NULL for target {id}: COALESCE(..., 0) makes it a number")));
    };
    // A DECIMAL may come as 12.00.
    let whole = match value.split_once('.') {
        Some((whole, fraction)) if fraction.bytes().all(|digit| digit == b'0') => whole,
        _ => value,
    };
    let value = whole.parse();
    Ok((target, value.map_err(|_| wrong(format!("the query returns {whole} for target {id}: that is no integer")))?))
}

/// As many counters of the metric as are wanted, up to the last id, and where they end: earlier where the kind's other metrics have many rows.
async fn counters_between(
    connection: &mut MySqlConnection,
    (kind, metric): (Kind, Metric),
    (after, until): (TargetId, TargetId),
    limit: usize,
) -> Result<(Vec<(TargetId, i64, Micros)>, TargetId)> {
    let (mut counters, mut end, mut read) = (Vec::new(), after, 0);
    while end < until && read < ROWS_MAX {
        let range = list_range(connection, kind, (end, until), STATEMENT_ROWS).await?;
        read += range.rows();
        for Counted { number: (target, other), value, update_at, .. } in range.counters {
            if other == metric {
                counters.push((target.id, value, update_at));
                if counters.len() >= limit {
                    return Ok((counters, target.id));
                }
            }
        }
        end = range.until;
    }
    Ok((counters, end))
}
