//! Writes the statements of a batch as text. A batch contains only integers and times, so nothing needs quoting
//! (decision 0005). If statements are text, a statement can contain any number of rows, and a packet can contain
//! several statements. So even a large batch needs few round trips, and the server prepares no statements. For large
//! batches, prepared statements would be equally fast (`dev/bench write`).

use std::fmt::Write;

use sqlx::mysql::MySqlRow;
use sqlx::{AssertSqlSafe, MySqlConnection};
use tallyd_core::model::Micros;

use super::conn::is_galera;
use super::{Context, Result, datetime};

/// When a packet has this size, the next statement begins a new packet. Single statements have about the same maximum
/// size, so a packet is far below the usual values of `max_allowed_packet`.
const PACKET_BYTES: usize = 320 * 1024;

#[derive(Default)]
pub struct Text {
    full: Vec<String>,
    sql: String,
    /// The time of the last written row, in whole seconds. Many rows of a batch have the same second, so the field
    /// `written` keeps the text of this second.
    second: Option<i64>,
    written: String,
}

impl Text {
    /// Adds a part of a statement. Removes the comma that follows the previous row.
    pub fn push(&mut self, sql: &str) {
        if self.sql.ends_with(',') {
            self.sql.pop();
            self.sql.push(' ');
        }
        self.sql.push_str(sql);
    }

    pub fn statement(&mut self, sql: &str) {
        // If a Galera node rolls a transaction back because of another node's commit, MariaDB 10.11 runs the packet's
        // other statements outside of the transaction, and can then answer COMMIT without an error. So there each
        // packet has one statement.
        if self.sql.len() >= PACKET_BYTES || is_galera() {
            self.full.push(std::mem::take(&mut self.sql));
        }
        self.push(if self.sql.is_empty() { "" } else { "; " });
        self.push(sql);
    }

    pub fn row<const N: usize>(&mut self, numbers: [i64; N], at: Micros) {
        self.sql.push('(');
        for number in numbers {
            // Writing to a String cannot fail.
            let _ = write!(self.sql, "{number},");
        }
        let second = at.0.div_euclid(1_000_000);
        if self.second.replace(second) != Some(second) {
            self.written = datetime(Micros(second * 1_000_000)).format("%Y-%m-%d %H:%M:%S").to_string();
        }
        let _ = write!(self.sql, "'{}.{:06}'),", self.written, at.0.rem_euclid(1_000_000));
    }

    /// Runs the statements in order, and stops at the first error. Returns the rows of all statements.
    pub async fn run(mut self, connection: &mut MySqlConnection, action: &'static str) -> Result<Vec<MySqlRow>> {
        let mut rows = Vec::new();
        self.full.push(self.sql);
        for packet in self.full.into_iter().filter(|packet| !packet.is_empty()) {
            rows.extend(sqlx::raw_sql(AssertSqlSafe(packet)).fetch_all(&mut *connection).await.context(action)?);
        }
        Ok(rows)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_written_as_the_server_reads_them() {
        let mut text = Text::default();
        text.push("INSERT INTO t VALUES ");
        text.row([1, -2], Micros(1_764_000_000_000_007));
        text.row([3, i64::MAX], Micros(1_764_000_000_999_999));
        text.row([5, i64::MIN], Micros(1));
        text.push("ON DUPLICATE KEY UPDATE a = 1");
        assert_eq!(
            text.sql,
            "INSERT INTO t VALUES (1,-2,'2025-11-24 16:00:00.000007'),\
             (3,9223372036854775807,'2025-11-24 16:00:00.999999'),\
             (5,-9223372036854775808,'1970-01-01 00:00:00.000001') ON DUPLICATE KEY UPDATE a = 1"
        );
    }
}
