//! Counts and checksums of a range of rows, computed by the servers, so that an import compares two tables without
//! reading their rows.
//!
//! The checksum of a range is the XOR of `CRC32("target.user") * CRC32("user.target")` over its rows. CRC32 alone is
//! linear: the rows (1,10) and (2,11) have the same XOR as (1,11) and (2,10), in which the users are swapped, and even
//! the same sum for one of 30,000 such swaps. A product is not linear. In an XOR, a row and its duplicate cancel each
//! other, but the count includes both. A sum of the products would take MariaDB twice as long, because it computes sums
//! with decimals.
//!
//! The checksum uses each id as the site's database spells it. If a site spells an id as 042, the checksums differ, and
//! the import reads the row.

use sqlx::mysql::MySqlRow;
use sqlx::{AssertSqlSafe, Executor, MySqlConnection, Row};
use tallyd_core::event::ID_MAX;
use tallyd_core::import::{Key, Sums};
use tallyd_core::model::{Kind, TargetId, UserId};

use super::imports::of_range;
use super::source::{LikeColumns, too_many};
use tallyd_mysql::site_query::{self, Answered, Column, QueryError, Statement};
use tallyd_mysql::{Context, Result, Store};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SiteSums {
    pub answered: usize,
    pub sums: Sums,
    /// The largest key. The value is `None` if a row is invalid, because an id is not a number or `deleted` is neither
    /// 0 nor 1.
    pub last: Option<Key>,
}

/// Packs the two ids of a key into one number: `target * TARGET + user`.
const TARGET: u128 = 10_000_000_000_000_000_000;

/// The statement's query must return at most `limit` rows.
pub(crate) async fn site_sums(
    store: &Store,
    statement: &Statement,
    columns: &LikeColumns,
    limit: usize,
) -> Answered<SiteSums> {
    let mut conn = store.acquire().await?;
    // Without the line break, a comment in the query's last line would hide the rest of the statement.
    let sql = format!("SELECT {} FROM (\n{}\n) AS page", columns.sums, statement.sql);
    let ask = async |connection: &mut MySqlConnection| {
        let row = connection.fetch_one(sqlx::raw_sql(AssertSqlSafe(sql))).await;
        let page = read_page(&row.map_err(|error| statement.error(error))?).map_err(QueryError::Store)?;
        if page.answered > limit { Err(too_many(limit)) } else { Ok(page) }
    };
    site_query::within_its_time(&mut conn, statement, ask).await
}

pub(crate) async fn liked_sums(store: &Store, kind: Kind, (after, until): (Key, Key)) -> Result<Sums> {
    let (of_range, bounds) = of_range(after, until);
    let checksum = checksum("target_id", "user_id");
    let sql = format!(
        "SELECT COUNT(*), BIT_XOR({checksum}) FROM like_record \
         WHERE kind = ? AND {of_range} AND is_del = 0"
    );
    let mut conn = store.acquire().await?;
    let row = conn.unlimited(|connection| async move {
        let query = bounds.iter().fold(sqlx::query(AssertSqlSafe(sql)).bind(kind.0), |query, bound| query.bind(*bound));
        query.fetch_one(connection).await.context("sum like records")
    });
    let row = row.await?;
    let count: i64 = row.try_get(0).context("sum like records")?;
    Ok(Sums { count: count.unsigned_abs(), checksum: row.try_get(1).context("sum like records")? })
}

fn checksum(target: &str, user: &str) -> String {
    format!("CRC32(CONCAT({target}, '.', {user})) * CRC32(CONCAT({user}, '.', {target}))")
}

/// Returns the SQL expressions that compute the count and checksum of a page. The expressions depend on the types of
/// the columns, because MySQL uses only a text's first digits when it compares the text with a number.
pub(super) fn selected(target: Option<&Column>, user: Option<&Column>, deleted: Option<&Column>) -> String {
    let is_integer = |column: Option<&Column>| column.is_some_and(Column::is_integer);
    let id = |column, name: &str| match is_integer(column) {
        true => (format!("page.{name}"), format!("page.{name}")),
        // The conversion is needed for text in UTF-16, because the bytes of UTF-16 differ from ASCII.
        false => (format!("CONVERT(page.{name} USING ascii)"), format!("CAST(page.{name} AS DECIMAL(30))")),
    };
    let ((target, target_number), (user, user_number)) = (id(target, "target"), id(user, "user"));
    let checksum = checksum(&target, &user);
    let (liked, known, checksum) = match deleted {
        None => ("COUNT(*)".to_owned(), "COUNT(*)".to_owned(), checksum),
        Some(column) => {
            let (value, no, yes) = match column.is_integer() || column.kind == "BIT" {
                true => ("page.deleted", "0", "1"),
                false => ("CAST(page.deleted AS BINARY)", "'0'", "'1'"),
            };
            let count = |of: String| format!("COALESCE(SUM({of}), 0)");
            let liked = format!("{value} = {no}");
            let checksum = format!("CASE WHEN {liked} THEN {checksum} END");
            (count(liked), count(format!("{value} IN ({no}, {yes})")), checksum)
        }
    };
    format!("COUNT(*), {liked}, {known}, BIT_XOR({checksum}), MAX({target_number} * {TARGET}.0 + {user_number})")
}

fn read_page(row: &MySqlRow) -> Result<SiteSums> {
    let answered = integer(row, 0)?.unwrap_or(0);
    let sums = Sums { count: integer(row, 1)?.unwrap_or(0), checksum: integer(row, 3)?.unwrap_or(0) };
    let last = integer(row, 4)?.and_then(key).filter(|_| integer(row, 2).ok().flatten() == Some(answered));
    Ok(SiteSums { answered: usize::try_from(answered).unwrap_or(usize::MAX), sums, last })
}

fn key(number: u128) -> Option<Key> {
    let [target, user] = [number / TARGET, number % TARGET].map(|id| u64::try_from(id).ok());
    let is_id = |id: &u64| (1..=ID_MAX).contains(id);
    Some((TargetId(target.filter(is_id)?), UserId(user.filter(is_id)?)))
}

fn integer<T: std::str::FromStr>(row: &MySqlRow, place: usize) -> Result<Option<T>> {
    let text: Option<&str> = row.try_get_unchecked(place).context("read sums of rows")?;
    Ok(text.and_then(|text| site_query::number(text).ok()))
}
