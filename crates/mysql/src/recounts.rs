//! Numbers whose truth is another table: the operator's query beside `counter`, in one snapshot.
//!
//! The query ([`site_query`]) runs in a READ ONLY transaction, for so long at most, and its answer is not read further than was asked for.

use futures_util::TryStreamExt;
use sqlx::mysql::MySqlRow;
use sqlx::{AssertSqlSafe, Executor, MySqlConnection, Row};
use tallyd_core::model::{Kind, Metric, Micros, TargetId};

use super::counters::begin_snapshot;
use super::ranges::{Counted, LAST, list_range};
use super::site_query::{self, Column, Plan, QueryError, Statement, Told, number, part, wrong};
use super::{Context, Result, Store};

/// Rows of `counter` that one statement reads.
const STATEMENT_ROWS: usize = 20_000;

/// Rows of `counter` that are read for one page: seconds.
const ROWS_MAX: u64 = 1_000_000;

/// A query, made for one page.
#[derive(Clone, Debug)]
pub struct Question {
    pub statement: Statement,
    /// Ids are above this one.
    pub after: TargetId,
    /// No more than so many are wanted.
    pub limit: usize,
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
    /// Asks MySQL what the query returns, without running it; and how it would be run.
    pub async fn explain_recount(&self, question: &Question) -> Told<Vec<Plan>> {
        let mut conn = self.acquire().await?;
        let told = conn.unlimited(|connection| async move {
            let plan = match describe(connection, question).await {
                Ok(()) => site_query::explain(connection, &question.statement).await,
                Err(error) => Err(error),
            };
            part(plan)
        });
        told.await?.map_err(QueryError::Query)
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
        let ask = async |connection: &mut MySqlConnection| ask(connection, (kind, metric), question, until).await;
        site_query::within_its_time(&mut conn, &question.statement, ask).await
    }
}

/// What the query returns must be two columns of integers.
async fn describe(connection: &mut MySqlConnection, question: &Question) -> Told<()> {
    let columns = site_query::columns(connection, &question.statement).await?;
    let [id, value] = columns.as_slice() else {
        return Err(wrong(format!(
            "the query returns {} columns: it must be two, target id and number",
            columns.len()
        )));
    };
    if !id.is_integer() {
        let Column { name, kind } = id;
        return Err(wrong(format!(
            "the query's first column, {name}, is {kind}: it must be the target's id, an integer"
        )));
    }
    // SUM makes a DECIMAL of integers.
    if !value.is_integer() && value.kind != "DECIMAL" {
        let Column { name, kind } = value;
        return Err(wrong(format!(
            "the query's second column, {name}, is {kind}: it must be the number, an integer; CAST(... AS SIGNED) makes it one"
        )));
    }
    Ok(())
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
    site_query::limit_time(&mut tx, Some(question.statement.query_max)).await?;
    let mut truths = run(&mut tx, question).await?;
    site_query::limit_time(&mut tx, None).await?;
    let end = truths.last().filter(|_| truths.len() >= question.limit).map_or(until, |(id, _)| until.min(*id));
    let (counters, end) = counters_between(&mut tx, (kind, metric), (question.after, end), question.limit).await?;
    truths.retain(|(id, _)| *id <= end);
    tx.commit().await.context("read counters")?;
    Ok(Answer { truths, counters, until: end })
}

/// Runs the query, and holds its answer to what was asked for.
async fn run(connection: &mut MySqlConnection, question: &Question) -> Told<Vec<(TargetId, i64)>> {
    let mut found: Vec<(TargetId, i64)> = Vec::new();
    let mut last = question.after;
    let mut rows = connection.fetch(sqlx::raw_sql(AssertSqlSafe(question.statement.sql.clone())));
    while let Some(row) = rows.try_next().await.map_err(|error| question.statement.error(error))? {
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
    Ok((
        target,
        number(value).map_err(|no| wrong(format!("the query returns {no} for target {id}: that is no integer")))?,
    ))
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
