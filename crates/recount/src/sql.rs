//! Reads counters, and their correct values from a table of the site. The operator's query and the read of `counter`
//! use the same snapshot (decision 0037).
//!
//! The query ([`site_query`]) runs in a READ ONLY transaction with a time limit. tallyd requests a limited number of
//! rows and reads no more rows.

use futures_util::TryStreamExt;
use sqlx::mysql::MySqlRow;
use sqlx::{AssertSqlSafe, Executor, MySqlConnection, Row};
use tallyd_core::model::{Kind, Metric, Micros, TargetId};

use tallyd_mysql::counters::begin_snapshot;
use tallyd_mysql::ranges::{Counted, LAST, list_range};
use tallyd_mysql::site_query::{self, Answered, Column, Plan, QueryError, Statement, number, part, wrong};
use tallyd_mysql::{Context, Result, Store};

const STATEMENT_ROWS: usize = 20_000;

/// The maximum number of rows of `counter` that are read for one page. Reading this number of rows takes seconds.
const ROWS_MAX: u64 = 1_000_000;

#[derive(Clone, Debug)]
pub(crate) struct Question {
    pub statement: Statement,
    /// The page's ids are above this id.
    pub after: TargetId,
    pub limit: usize,
}

#[derive(Clone, Debug, Default)]
pub(crate) struct Answer {
    pub truths: Vec<(TargetId, i64)>,
    pub counters: Vec<(TargetId, i64, Micros)>,
    pub until: TargetId,
}

pub(crate) async fn explain(store: &Store, question: &Question) -> Answered<Vec<Plan>> {
    let mut conn = store.acquire().await?;
    let answer = conn.unlimited(|connection| async move {
        let plan = match describe(connection, question).await {
            Ok(()) => site_query::explain(connection, &question.statement).await,
            Err(error) => Err(error),
        };
        part(plan)
    });
    answer.await?.map_err(QueryError::Query)
}

/// The page ends with the answer's last id if the answer has the maximum number of rows, otherwise with `until`, or
/// with the last counter within the limit of counters.
pub(crate) async fn ask(
    store: &Store,
    (kind, metric): (Kind, Metric),
    question: &Question,
    until: TargetId,
) -> Answered<Answer> {
    let mut conn = store.acquire().await?;
    let ask = async |connection: &mut MySqlConnection| ask_page(connection, (kind, metric), question, until).await;
    site_query::within_its_time(&mut conn, &question.statement, ask).await
}

async fn describe(connection: &mut MySqlConnection, question: &Question) -> Answered<()> {
    let columns = site_query::columns(connection, &question.statement).await?;
    let [id, value] = columns.as_slice() else {
        return Err(wrong(format!(
            "the query returns {} columns: it must return two, the target's id and the number",
            columns.len()
        )));
    };
    if !id.is_integer() {
        let Column { name, kind } = id;
        return Err(wrong(format!(
            "the query's first column, {name}, is {kind}: it must be the target's id, an integer"
        )));
    }
    // In MySQL, a SUM of integers is a DECIMAL.
    if !value.is_integer() && value.kind != "DECIMAL" {
        let Column { name, kind } = value;
        return Err(wrong(format!(
            "the query's second column, {name}, is {kind}: it must be the number, an integer: use CAST(... AS SIGNED)"
        )));
    }
    Ok(())
}

async fn ask_page(
    connection: &mut MySqlConnection,
    (kind, metric): (Kind, Metric),
    question: &Question,
    until: TargetId,
) -> Answered<Answer> {
    let mut tx = begin_snapshot(connection).await?;
    if question.after.0 == 0 {
        // If the answer has no rows, the answer does not show the columns, so the columns are requested separately.
        describe(&mut tx, question).await?;
    }
    site_query::limit_time(&mut tx, Some(question.statement.query_max)).await?;
    let mut truths = run(&mut tx, question).await?;
    site_query::limit_time(&mut tx, None).await?;
    let end = truths.last().filter(|_| truths.len() >= question.limit).map_or(until, |(id, _)| until.min(*id));
    let (counters, end) = counters_between(&mut tx, (kind, metric), (question.after, end), question.limit).await?;
    truths.retain(|(id, _)| *id <= end);
    tx.commit().await.context("read counters")?;
    Ok(Answer { truths, counters, until: end })
}

async fn run(connection: &mut MySqlConnection, question: &Question) -> Answered<Vec<(TargetId, i64)>> {
    let mut found: Vec<(TargetId, i64)> = Vec::new();
    let mut last = question.after;
    let mut rows = connection.fetch(sqlx::raw_sql(AssertSqlSafe(question.statement.sql.clone())));
    while let Some(row) = rows.try_next().await.map_err(|error| question.statement.error(error))? {
        let (id, value) = read_row(&row)?;
        if id <= last {
            return Err(wrong(match found.last() {
                None => format!("the query returns target {id}, but ids must be above {last}"),
                Some(_) => format!(
                    "the query returns target {id} after {last}: return each target once, in the order of the ids (GROUP BY and ORDER BY)"
                ),
            }));
        }
        if found.len() == question.limit {
            let limit = question.limit;
            return Err(wrong(format!("the query returns more rows than :limit = {limit}")));
        }
        last = id;
        found.push((id, value));
    }
    Ok(found)
}

fn read_row(row: &MySqlRow) -> Answered<(TargetId, i64)> {
    let text = |place: usize| row.try_get_unchecked::<Option<&str>, _>(place).context("read the query's answer");
    let Some(id) = text(0)? else { return Err(wrong("the query returns a target with the id NULL")) };
    let known = id.parse().ok().filter(|id| (1..=LAST.0).contains(id)).map(TargetId);
    let target =
        known.ok_or_else(|| wrong(format!("the query returns the target {id}: ids must be 1 to {}", LAST.0)))?;
    let Some(value) = text(1)? else {
        return Err(wrong(format!("the query returns NULL for target {id}: use COALESCE(..., 0)")));
    };
    Ok((
        target,
        number(value).map_err(|no| wrong(format!("the query returns {no} for target {id}: it must be an integer")))?,
    ))
}

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
