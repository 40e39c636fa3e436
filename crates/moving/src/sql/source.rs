//! Reads the site's table with the site's query, page by page. The reads take no locks, because they are plain reads at
//! READ COMMITTED.

use chrono::NaiveDateTime;
use futures_util::TryStreamExt;
use sqlx::mysql::MySqlRow;
use sqlx::{AssertSqlSafe, MySqlConnection, Row};
use tallyd_core::import::{EARLIEST, Key, SiteLike};
use tallyd_core::model::{Micros, TargetId, UserId};
use tallyd_core::unit::Unit;

use super::sums;
use tallyd_mysql::ranges::LAST;
use tallyd_mysql::site_query::{self, Answered, Column, Plan, QueryError, Statement, number, part, wrong};
use tallyd_mysql::{Context, Store, micros};

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LikeColumns {
    target: usize,
    user: usize,
    deleted: Option<usize>,
    at: Option<(usize, Option<Unit>)>,
    pub(super) sums: String,
}

impl LikeColumns {
    pub fn has_times(&self) -> bool {
        self.at.is_some()
    }

    pub(crate) fn has_deleted(&self) -> bool {
        self.deleted.is_some()
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NumberColumns {
    target: usize,
    value: usize,
}

#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    pub after: Key,
    pub limit: usize,
    /// If a row of the site has a time later than this, the import rejects the row. A row with a wrong time in the
    /// future would win against later events with correct times.
    pub latest: Micros,
}

#[derive(Clone, Debug, Default)]
pub struct SitePage<T> {
    pub rows: Vec<T>,
    pub answered: usize,
    pub repeated: u64,
    pub unordered: u64,
    pub fault: Option<String>,
}

pub(crate) async fn like_columns(
    store: &Store,
    statement: &Statement,
    unit: Option<Unit>,
) -> Answered<(LikeColumns, Vec<Plan>)> {
    let (columns, plan) = described(store, statement).await?;
    Ok((find_columns(&columns, unit)?, plan))
}

pub(crate) async fn number_columns(store: &Store, statement: &Statement) -> Answered<(NumberColumns, Vec<Plan>)> {
    let (columns, plan) = described(store, statement).await?;
    let known = ["target", "value"];
    let place = |name| place(&columns, name, &known)?.ok_or_else(|| lacks(&columns, name));
    Ok((NumberColumns { target: place("target")?, value: place("value")? }, plan))
}

async fn described(store: &Store, statement: &Statement) -> Answered<(Vec<Column>, Vec<Plan>)> {
    let mut conn = store.acquire().await?;
    let answer = conn.unlimited(|connection| async move {
        let described = async {
            let columns = site_query::columns(connection, statement).await?;
            Ok((columns, site_query::explain(connection, statement).await?))
        };
        part(described.await)
    });
    answer.await?.map_err(QueryError::Query)
}

pub(crate) async fn site_likes(
    store: &Store,
    statement: &Statement,
    columns: &LikeColumns,
    bounds: Bounds,
) -> Answered<SitePage<SiteLike>> {
    let read = |row: &MySqlRow| read_like(row, columns, bounds.latest);
    site_page(store, statement, bounds, |like| like.key, read).await
}

pub(crate) async fn site_numbers(
    store: &Store,
    statement: &Statement,
    columns: NumberColumns,
    bounds: Bounds,
) -> Answered<SitePage<(TargetId, i64)>> {
    let read = |row: &MySqlRow| read_number(row, columns);
    site_page(store, statement, bounds, |(target, _)| (*target, bounds.after.1), read).await
}

async fn site_page<T>(
    store: &Store,
    statement: &Statement,
    bounds: Bounds,
    key: impl Fn(&T) -> Key,
    read: impl Fn(&MySqlRow) -> Answered<T>,
) -> Answered<SitePage<T>> {
    let mut conn = store.acquire().await?;
    let ask = async |connection: &mut MySqlConnection| {
        let mut page = SitePage { rows: Vec::new(), answered: 0, repeated: 0, unordered: 0, fault: None };
        let mut last = bounds.after;
        let mut rows = sqlx::raw_sql(AssertSqlSafe(statement.sql.clone())).fetch(&mut *connection);
        while let Some(row) = rows.try_next().await.map_err(|error| statement.error(error))? {
            if page.answered == bounds.limit {
                return Err(too_many(bounds.limit));
            }
            page.answered += 1;
            let row = read(&row)?;
            let this = key(&row);
            if this > last {
                last = this;
                page.rows.push(row);
                continue;
            }
            *(if this == last { &mut page.repeated } else { &mut page.unordered }) += 1;
            page.fault.get_or_insert_with(|| disorder(last, this));
        }
        Ok(page)
    };
    site_query::within_its_time(&mut conn, statement, ask).await
}

pub(super) fn too_many(limit: usize) -> QueryError {
    wrong(format!("the query returns more rows than :rows = {limit}"))
}

fn disorder((target, user): Key, (next_target, next_user): Key) -> String {
    let row = |target: TargetId, user: UserId| match user.0 {
        0 => format!("target {target}"),
        _ => format!("target {target} and user {user}"),
    };
    let (last, next) = (row(target, user), row(next_target, next_user));
    if (target, user) == (next_target, next_user) {
        return format!(
            "the query returns the row of {next} again: return each row once, and only rows after :after_target and :after_user"
        );
    }
    format!(
        "the query returns the row of {next} after the row of {last}: order the rows by their numeric ids, with ORDER BY target, user; \
         if ids are text, write CAST(... AS UNSIGNED)"
    )
}

fn lacks(columns: &[Column], name: &str) -> QueryError {
    let names: Vec<&str> = columns.iter().map(|column| column.name.as_str()).collect();
    wrong(format!("the query has no column {name}: it returns {}; add ... AS {name}", names.join(", ")))
}

fn place(columns: &[Column], name: &str, known: &[&str]) -> Answered<Option<usize>> {
    if let Some(other) = columns.iter().find(|column| !known.contains(&column.name.to_ascii_lowercase().as_str())) {
        return Err(wrong(format!(
            "the query returns the unknown column {}: allowed are {}",
            other.name,
            known.join(", ")
        )));
    }
    let mut found = columns.iter().enumerate().filter(|(_, column)| column.name.eq_ignore_ascii_case(name));
    let place = found.next().map(|(place, _)| place);
    if found.next().is_some() { Err(wrong(format!("the query returns the column {name} twice"))) } else { Ok(place) }
}

fn find_columns(columns: &[Column], unit: Option<Unit>) -> Answered<LikeColumns> {
    let known = ["target", "user", "deleted", "at"];
    let required = |name| place(columns, name, &known)?.ok_or_else(|| lacks(columns, name));
    let at = place(columns, "at", &known)?;
    let at = match (at, at.and_then(|place| columns.get(place)), unit) {
        (Some(place), Some(column), unit) => Some((place, time_of(column, unit)?)),
        (_, _, Some(_)) => return Err(wrong("unit describes the column `at`, but the query has no such column")),
        _ => None,
    };
    let (target, user, deleted) = (required("target")?, required("user")?, place(columns, "deleted", &known)?);
    let of = |place: usize| columns.get(place);
    let sums = sums::selected(of(target), of(user), deleted.and_then(of));
    Ok(LikeColumns { target, user, deleted, at, sums })
}

fn time_of(column: &Column, unit: Option<Unit>) -> Answered<Option<Unit>> {
    let is_date = matches!(column.kind.as_str(), "DATETIME" | "TIMESTAMP");
    match unit {
        None if is_date => Ok(None),
        Some(unit) if column.is_integer() => Ok(Some(unit)),
        None if column.is_integer() => {
            Err(wrong("the query's column `at` is an integer: set unit = \"s\", \"ms\" or \"us\""))
        }
        Some(_) if is_date => {
            Err(wrong(format!("the query's column `at` is {}, which has no unit: leave unit out", column.kind)))
        }
        _ => Err(wrong(format!(
            "the query's column `at` is {}: it must be DATETIME, TIMESTAMP or an integer with a unit",
            column.kind
        ))),
    }
}

fn bytes(row: &MySqlRow, place: usize) -> Answered<Option<&[u8]>> {
    Ok(row.try_get_unchecked::<Option<&[u8]>, _>(place).context("read the query's answer")?)
}

fn shown(value: Option<&[u8]>) -> String {
    value.map_or_else(|| "NULL".to_owned(), |bytes| String::from_utf8_lossy(bytes).into_owned())
}

/// Parses an id in tallyd's spelling. Returns `None` for other spellings, for example 042 or +42.
fn read_id(value: Option<&[u8]>) -> Option<u64> {
    let text = std::str::from_utf8(value?).ok().filter(|text| text.bytes().all(|byte| byte.is_ascii_digit()))?;
    text.parse().ok().filter(|id| (1..=LAST.0).contains(id) && !text.starts_with('0'))
}

fn read_like(row: &MySqlRow, columns: &LikeColumns, latest: Micros) -> Answered<SiteLike> {
    let (target, user) = (bytes(row, columns.target)?, bytes(row, columns.user)?);
    let named = || format!("the row of target {} and user {}", shown(target), shown(user));
    let (Some(target_id), Some(user_id)) = (read_id(target), read_id(user)) else {
        return Err(wrong(format!(
            "the query returns {}: ids must be whole numbers from 1 to {}, in decimal; other ids can't be imported",
            named(),
            LAST.0
        )));
    };
    let liked = match columns.deleted.map(|place| bytes(row, place)).transpose()? {
        None | Some(Some(b"0" | b"\0")) => true,
        Some(Some(b"1" | b"\x01")) => false,
        Some(other) => {
            return Err(wrong(format!(
                "the query returns deleted = {} for {}: it must be 0 or 1",
                shown(other),
                named()
            )));
        }
    };
    let at = match columns.at {
        None => None,
        Some((place, unit)) => {
            let text = bytes(row, place)?;
            let at = text.and_then(|text| read_time(std::str::from_utf8(text).ok()?, unit));
            let at = at.filter(|at| *at >= EARLIEST);
            let at = at.ok_or_else(|| {
                wrong(format!(
                    "the query returns at = {} for {}: it must be a time from 1970-01-02 on (CONVERT_TZ returns NULL if the server has no time zone tables)",
                    shown(text),
                    named()
                ))
            })?;
            if at > latest {
                return Err(wrong(format!(
                    "the query returns at = {} for {}, which is in the future: times are read as UTC, convert other times with CONVERT_TZ",
                    shown(text),
                    named()
                )));
            }
            Some(at)
        }
    };
    Ok(SiteLike { key: (TargetId(target_id), UserId(user_id)), liked, at })
}

fn read_time(text: &str, unit: Option<Unit>) -> Option<Micros> {
    match unit {
        None => NaiveDateTime::parse_from_str(text, "%Y-%m-%d %H:%M:%S%.f").ok().map(micros),
        Some(unit) => unit.read(text),
    }
}

fn read_number(row: &MySqlRow, columns: NumberColumns) -> Answered<(TargetId, i64)> {
    let (target, value) = (bytes(row, columns.target)?, bytes(row, columns.value)?);
    let Some(id) = read_id(target) else {
        return Err(wrong(format!(
            "the query returns the target {}: ids must be whole numbers from 1 to {}, in decimal; other ids can't be imported",
            shown(target),
            LAST.0
        )));
    };
    let text = value.and_then(|value| std::str::from_utf8(value).ok()).unwrap_or_default();
    match number::<i64>(text) {
        Ok(number) if number >= 0 => Ok((TargetId(id), number)),
        _ => Err(wrong(format!(
            "the query returns the value {} for target {id}: it must be a whole number of at least 0",
            shown(value)
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn column(name: &str, kind: &str) -> Column {
        Column { name: name.to_owned(), kind: kind.to_owned() }
    }

    #[test]
    fn columns_are_found_by_their_names_and_others_refused() {
        let target_and_user = [column("Target", "BIGINT"), column("user", "VARCHAR")];
        let with = |more: &[Column]| [target_and_user.as_slice(), more].concat();
        let found = find_columns(&with(&[column("at", "DATETIME"), column("deleted", "BIT")]), None).unwrap();
        let LikeColumns { target, user, deleted, at, .. } = found;
        assert_eq!((target, user, deleted, at), (0, 1, Some(3), Some((2, None))));
        for (columns, unit, why) in [
            (
                vec![column("post_id", "BIGINT")],
                None,
                "returns the unknown column post_id: allowed are target, user, deleted, at",
            ),
            (vec![column("user", "BIGINT")], None, "has no column target: it returns user"),
            (with(&[column("user", "BIGINT")]), None, "returns the column user twice"),
            (with(&[column("at", "BIGINT")]), None, "column `at` is an integer: set unit"),
            (with(&[column("at", "TIMESTAMP")]), Some(Unit::Ms), "leave unit out"),
            (with(&[column("at", "DATE")]), None, "is DATE: it must be"),
            (with(&[]), Some(Unit::S), "unit describes the column `at`"),
        ] {
            let error = find_columns(&columns, unit).unwrap_err().to_string();
            assert!(error.contains(why), "{error}");
        }
    }

    #[test]
    fn ids_are_decimals_as_we_write_them_and_nothing_else() {
        for (text, id) in [("1", Some(1)), ("9223372036854775807", Some(LAST.0)), ("9223372036854775808", None)] {
            assert_eq!(read_id(Some(text.as_bytes())), id);
        }
        for text in ["0", "042", "+42", "-1", "1.0", "", "a", "99999999999999999999"] {
            assert_eq!(read_id(Some(text.as_bytes())), None, "{text}");
        }
        assert_eq!(read_id(None), None);
    }

    #[test]
    fn times_are_read_as_dates_or_in_their_unit() {
        for (text, unit, at) in [
            ("2025-11-24 16:00:00", None, Some(1_764_000_000_000_000)),
            ("2025-11-24 16:00:00.25", None, Some(1_764_000_000_250_000)),
            ("1764000000", Some(Unit::S), Some(1_764_000_000_000_000)),
            ("1764000000250", Some(Unit::Ms), Some(1_764_000_000_250_000)),
            ("1764000000000007", Some(Unit::Us), Some(1_764_000_000_000_007)),
            ("0000-00-00 00:00:00", None, None),
            ("9223372036854775807", Some(Unit::S), None),
        ] {
            assert_eq!(read_time(text, unit), at.map(Micros), "{text}");
        }
    }
}
