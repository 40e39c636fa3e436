//! Counts and checksums of a range of rows, made at the servers, so that two sides are compared without reading their rows.
//!
//! A row's part of the checksum is `CRC32("target.user") * CRC32("user.target")`, 64 bits, and the range's is the XOR of all. CRC32 alone is
//! linear: the rows (1,10) and (2,11) have the same XOR as (1,11) and (2,10), and about one in 30,000 of such swaps even the same sum. A
//! product of two different ones carries from bit to bit, so it is not linear: the XOR of such a swap is as good as random in each part of its
//! bits. A row that comes twice cancels itself in an XOR, but it is counted, and `like_record` has no row twice. A sum of the products would do
//! as well, and takes MariaDB twice as long, because it adds up decimals.
//!
//! It is made of the text of the ids, as the site writes them: an id such as 042 is never the same as ours, and is then read as a row.

use sqlx::mysql::MySqlRow;
use sqlx::{AssertSqlSafe, Executor, MySqlConnection, Row};
use tallyd_core::event::ID_MAX;
use tallyd_core::import::{Key, Sums};
use tallyd_core::model::{Kind, TargetId, UserId};

use super::imports::of_range;
use super::source::{LikeColumns, too_many};
use crate::site_query::{self, Column, QueryError, Statement, Told};
use crate::{Context, Result, Store};

/// A page of the site's rows, as a whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SiteSums {
    /// How many rows the answer had.
    pub answered: usize,
    /// Count and checksum of the rows that say "likes".
    pub sums: Sums,
    /// The largest key. `None` where a row can't be read: an id is no number, or `deleted` neither 0 nor 1.
    pub last: Option<Key>,
}

/// The larger id of a key counts so much more than the smaller one.
const TARGET: u128 = 10_000_000_000_000_000_000;

impl Store {
    /// The likes that follow, as a whole: the query of at most `limit` rows runs within another one.
    pub async fn site_sums(&self, statement: &Statement, columns: &LikeColumns, limit: usize) -> Told<SiteSums> {
        let mut conn = self.acquire().await?;
        // The query's last line can be a comment.
        let sql = format!("SELECT {} FROM (\n{}\n) AS page", columns.sums, statement.sql);
        let ask = async |connection: &mut MySqlConnection| {
            site_query::limit_time(connection, Some(statement.query_max)).await?;
            let row = connection.fetch_one(sqlx::raw_sql(AssertSqlSafe(sql))).await;
            let page = read_page(&row.map_err(|error| statement.error(error))?).map_err(QueryError::Store)?;
            if page.answered > limit { Err(too_many(limit)) } else { Ok(page) }
        };
        site_query::within_its_time(&mut conn, statement, ask).await
    }

    /// The rows that say "likes" after the first key and up to the second one, as a whole.
    pub async fn liked_sums(&self, kind: Kind, (after, until): (Key, Key)) -> Result<Sums> {
        let (of_range, bounds) = of_range(after, until);
        let checksum = checksum("target_id", "user_id");
        let sql = format!(
            "SELECT COUNT(*), BIT_XOR({checksum}) FROM like_record \
             WHERE kind = ? AND {of_range} AND is_del = 0"
        );
        let mut conn = self.acquire().await?;
        let row = conn.unlimited(|connection| async move {
            let query =
                bounds.iter().fold(sqlx::query(AssertSqlSafe(sql)).bind(kind.0), |query, bound| query.bind(*bound));
            query.fetch_one(connection).await.context("sum like records")
        });
        let row = row.await?;
        let count: i64 = row.try_get(0).context("sum like records")?;
        Ok(Sums { count: count.unsigned_abs(), checksum: row.try_get(1).context("sum like records")? })
    }
}

/// A row's part of the checksum.
fn checksum(target: &str, user: &str) -> String {
    format!("CRC32(CONCAT({target}, '.', {user})) * CRC32(CONCAT({user}, '.', {target}))")
}

/// The expressions that count a page's rows and make their checksum. They depend on the types of the columns: MySQL would compare text with
/// numbers by its first digits.
pub(super) fn selected(target: Option<&Column>, user: Option<&Column>, deleted: Option<&Column>) -> String {
    let is_integer = |column: Option<&Column>| column.is_some_and(Column::is_integer);
    let id = |column, name: &str| match is_integer(column) {
        true => (format!("page.{name}"), format!("page.{name}")),
        // Also of text in UTF-16, which has other bytes.
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

/// A number of any size; `None` where it is none that we have.
fn integer<T: std::str::FromStr>(row: &MySqlRow, place: usize) -> Result<Option<T>> {
    let text: Option<&str> = row.try_get_unchecked(place).context("read sums of rows")?;
    Ok(text.and_then(|text| site_query::number(text).ok()))
}
