//! Handles the query of a `[[recount]]` or an `[[import]]`: reads the query's columns and plan, runs the query with a
//! time limit, and explains errors.
//!
//! The operator writes the query. If the query is wrong, the error is a sentence that explains the mistake to the
//! operator ([`QueryError::Query`]). If the server fails or is unreachable, the error is [`QueryError::Store`]. tallyd
//! reads only the requested number of rows.

use std::fmt::{self, Display};
use std::time::Duration;

use sqlx::mysql::MySqlRow;
use sqlx::{
    AssertSqlSafe, Column as _, Connection, Executor, MySqlConnection, Row, SqlSafeStr, Statement as _, TypeInfo,
};

use super::{Conn, Context, Result, StoreError};

/// If no answer arrives within the server's time limit plus this duration, tallyd closes the connection.
const ANSWER_GRACE: Duration = Duration::from_secs(5);

#[derive(Debug, thiserror::Error)]
pub enum QueryError {
    /// The query is wrong or not permitted. The value is a sentence that tells the operator why.
    #[error("{0}")]
    Query(String),
    #[error(transparent)]
    Store(#[from] StoreError),
}

pub type Answered<T> = std::result::Result<T, QueryError>;

#[derive(Clone, Debug)]
pub struct Statement {
    pub sql: String,
    pub query_max: Duration,
    pub page_key: &'static str,
    pub url_key: &'static str,
}

impl Statement {
    pub fn error(&self, error: sqlx::Error) -> QueryError {
        let message = error.as_database_error().map_or_else(String::new, |error| error.message().to_owned());
        let error = StoreError::sql("run the query")(error);
        match error.number() {
            _ if error.is_out_of_time() => self.too_long(),
            Some(1044 | 1142 | 1143 | 1227 | 1370) => wrong(format!(
                "the account of {} is not allowed to run the query ({message}): grant this account the right to SELECT from the table",
                self.url_key
            )),
            _ if error.is_of_statement() => wrong(format!("MySQL rejects the query ({message})")),
            _ => error.into(),
        }
    }

    fn too_long(&self) -> QueryError {
        wrong(format!(
            "the query took longer than query_max = {} s: add an index on the target's id, reduce {} or increase query_max",
            self.query_max.as_secs(),
            self.page_key
        ))
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Column {
    pub name: String,
    pub kind: String,
}

impl Column {
    pub fn is_integer(&self) -> bool {
        let name = self.kind.trim_end_matches(" UNSIGNED");
        matches!(name, "TINYINT" | "SMALLINT" | "MEDIUMINT" | "INT" | "BIGINT" | "BOOLEAN")
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    table: String,
    access: String,
    possible_keys: String,
    key: String,
    pub rows: u64,
    extra: String,
}

impl Plan {
    /// Returns a description of the problem if the plan makes each page slower than the page before.
    pub fn fault(&self) -> Option<String> {
        let Self { table, access, possible_keys, key, extra, .. } = self;
        if table == "-" || table.starts_with('<') {
            return None;
        }
        if access == "ALL" || key == "-" {
            return Some(format!("reads the table {table} without an index"));
        }
        // A condition such as (a, b) > (1, 2) can use no index, so each page would read all earlier rows again.
        if access == "index" && possible_keys == "-" {
            return Some(format!("reads the index {key} of the table {table} from its beginning for each page"));
        }
        extra.contains("filesort").then(|| format!("sorts the table {table} for each page"))
    }
}

impl Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { table, access, key, rows, .. } = self;
        write!(f, "table {table}, access {access}, key {key}, about {rows} rows")
    }
}

/// Moves an error of the query into the `Ok` value, so that only errors of the server close the connection.
pub fn part<T>(result: Answered<T>) -> Result<std::result::Result<T, String>> {
    match result {
        Ok(answer) => Ok(Ok(answer)),
        Err(QueryError::Query(sentence)) => Ok(Err(sentence)),
        Err(QueryError::Store(error)) => Err(error),
    }
}

pub fn wrong(sentence: impl Display) -> QueryError {
    QueryError::Query(sentence.to_string())
}

/// A whole DECIMAL can be 12.00.
pub fn number<T: std::str::FromStr>(value: &str) -> std::result::Result<T, &str> {
    let whole = match value.split_once('.') {
        Some((whole, fraction)) if fraction.bytes().all(|digit| digit == b'0') => whole,
        _ => value,
    };
    whole.parse().map_err(|_| whole)
}

pub async fn within_its_time<T>(
    conn: &mut Conn,
    statement: &Statement,
    ask: impl AsyncFnOnce(&mut MySqlConnection) -> Answered<T>,
) -> Answered<T> {
    let longest = statement.query_max + ANSWER_GRACE;
    let read = conn.unlimited(|connection| async move {
        limit_time(connection, Some(statement.query_max)).await?;
        match tokio::time::timeout(longest, ask(connection)).await {
            Ok(Ok(answer)) => {
                // Later statements of this connection must not have the limit.
                limit_time(connection, None).await?;
                Ok(Ok(answer))
            }
            Ok(failed) => part(failed),
            // Closing the connection ends the query.
            Err(_) => Err(StoreError::Timeout { action: "run the query", limit: longest }),
        }
    });
    let read = match read.await {
        Err(StoreError::Timeout { .. }) => Err(statement.too_long()),
        read => read?.map_err(QueryError::Query),
    };
    // The rest of the answer can be very long, so the connection is not used again.
    conn.broken |= read.is_err();
    read
}

pub async fn columns(connection: &mut MySqlConnection, statement: &Statement) -> Answered<Vec<Column>> {
    let prepared = connection.prepare(AssertSqlSafe(statement.sql.clone()).into_sql_str()).await;
    let prepared = prepared.map_err(|error| statement.error(error))?;
    // Otherwise sqlx would return the same columns again after the site has changed its table.
    connection.clear_cached_statements().await.map_err(|error| statement.error(error))?;
    let column = |column: &sqlx::mysql::MySqlColumn| Column {
        name: column.name().to_owned(),
        kind: column.type_info().name().to_owned(),
    };
    Ok(prepared.columns().iter().map(column).collect())
}

pub async fn explain(connection: &mut MySqlConnection, statement: &Statement) -> Answered<Vec<Plan>> {
    // Without FORMAT, MySQL 9 would return the plan as a tree.
    let sql = format!("EXPLAIN FORMAT=TRADITIONAL {}", statement.sql);
    let rows = connection.fetch_all(sqlx::raw_sql(AssertSqlSafe(sql))).await;
    let rows = rows.map_err(|error| statement.error(error))?;
    let plan = |row: &MySqlRow| {
        let of = |name: &str| row.try_get_unchecked::<Option<&str>, _>(name).ok().flatten().unwrap_or("-").to_owned();
        Plan {
            table: of("table"),
            access: of("type"),
            possible_keys: of("possible_keys"),
            key: of("key"),
            rows: of("rows").parse().unwrap_or(0),
            extra: of("Extra"),
        }
    };
    Ok(rows.iter().map(plan).collect())
}

pub async fn limit_time(connection: &mut MySqlConnection, limit: Option<Duration>) -> Result<()> {
    const ACTION: &str = "limit the time of the query";
    let seconds = limit.map_or(0.0, |limit| limit.as_secs_f64());
    let millis = limit.map_or(0, |limit| limit.as_millis());
    let of_mariadb = format!("SET SESSION max_statement_time = {seconds}");
    let set = connection.execute(sqlx::raw_sql(AssertSqlSafe(of_mariadb))).await.context(ACTION);
    match set {
        // In MySQL the setting has another name and applies only to SELECT.
        Err(error) if error.number() == Some(1193) => {
            let of_mysql = format!("SET SESSION max_execution_time = {millis}");
            connection.execute(sqlx::raw_sql(AssertSqlSafe(of_mysql))).await.context(ACTION).map(drop)
        }
        set => set.map(drop),
    }
}
