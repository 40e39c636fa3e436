//! Checks MySQL without changing it: the account's rights and the server's settings.

use sqlx::{AssertSqlSafe, MySqlConnection, Row};

use super::grants::lacking;
use super::schema::MIGRATIONS;
use super::{Context, Result, Store, StoreError};

const PARTITIONED: [&str; 2] = ["applied_event", "recent_delta"];

const TO_PARTITION: [&str; 3] = ["CREATE", "ALTER", "DROP"];

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    pub version: String,
    pub packet_max: u64,
    pub wait_timeout_s: u64,
}

impl Store {
    pub async fn settings(&self) -> Result<Settings> {
        const ACTION: &str = "read the server's settings";
        let mut conn = self.acquire().await?;
        conn.limit(ACTION, |connection| async move {
            let asks = "SELECT VERSION(), @@max_allowed_packet, @@SESSION.wait_timeout";
            let row = sqlx::query(asks).fetch_one(connection).await.context(ACTION)?;
            let number = |index: usize| row.try_get_unchecked::<i64, _>(index).context(ACTION).map(i64::unsigned_abs);
            Ok(Settings {
                version: row.try_get_unchecked(0).context(ACTION)?,
                packet_max: number(1)?,
                wait_timeout_s: number(2)?,
            })
        })
        .await
    }

    pub async fn tls_version(&self) -> Result<Option<String>> {
        const ACTION: &str = "read the connection's TLS version";
        let mut conn = self.acquire().await?;
        conn.limit(ACTION, |connection| async move {
            let row = sqlx::query("SHOW SESSION STATUS LIKE 'Ssl_version'")
                .fetch_optional(connection)
                .await
                .context(ACTION)?;
            let version: Option<String> = row.map(|row| row.try_get(1).context(ACTION)).transpose()?;
            Ok(version.filter(|version| !version.is_empty()))
        })
        .await
    }

    /// For example `INSERT on counter`. Each right is tested with a statement that matches no row and uses one table,
    /// so that waiting for an ALTER locks no other table. The rights to change partitions are read from the grants, and
    /// not reported for accounts with roles.
    pub async fn missing_rights(&self) -> Result<Vec<String>> {
        let mut conn = self.acquire().await?;
        conn.limit("test the account's rights", |connection| async move {
            let mut missing = Vec::new();
            for table in tables() {
                missing.extend(missing_of(connection, table).await?);
            }
            let grants: Vec<String> =
                sqlx::query_scalar("SHOW GRANTS").fetch_all(&mut *connection).await.context("read the grants")?;
            let database: String = sqlx::query_scalar("SELECT DATABASE()")
                .fetch_one(connection)
                .await
                .context("read the database's name")?;
            for table in PARTITIONED {
                let lacking = lacking(&grants, &database, table, &TO_PARTITION);
                if !lacking.is_empty() {
                    missing.push(format!("{} on {table}", lacking.join(", ")));
                }
            }
            Ok(missing)
        })
        .await
    }
}

fn tables() -> impl Iterator<Item = &'static str> {
    let text = MIGRATIONS.iter().map(|step| step.sql.as_str());
    text.flat_map(|sql| sql.split("CREATE TABLE IF NOT EXISTS ").skip(1))
        .filter_map(|rest| rest.split_whitespace().next())
}

async fn missing_of(connection: &mut MySqlConnection, table: &str) -> Result<Vec<String>> {
    let column: Option<String> = sqlx::query_scalar(
        "SELECT CAST(column_name AS CHAR) FROM information_schema.columns \
         WHERE table_schema = DATABASE() AND table_name = ? AND ordinal_position = 1",
    )
    .bind(table)
    .fetch_optional(&mut *connection)
    .await
    .context("read the columns")?;
    let column = column.unwrap_or_else(|| "1".to_owned());
    let mut missing = Vec::new();
    for (right, sql) in [
        ("SELECT", format!("SELECT 1 FROM {table} WHERE FALSE")),
        ("INSERT", format!("INSERT INTO {table} SELECT * FROM {table} WHERE FALSE")),
        ("UPDATE", format!("UPDATE {table} SET {column} = {column} WHERE FALSE")),
        ("DELETE", format!("DELETE FROM {table} WHERE FALSE")),
    ] {
        let tried =
            sqlx::raw_sql(AssertSqlSafe(sql)).execute(&mut *connection).await.context("test the account's rights");
        match tried.as_ref().map_err(StoreError::number) {
            Err(Some(1142 | 1143)) => missing.push(format!("{right} on {table}")),
            // The server checks the rights first, so another error means that the right exists.
            Ok(_) | Err(Some(_)) => {}
            Err(None) => return tried.map(|_| missing),
        }
    }
    Ok(missing)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_table_is_tried() {
        let tables: Vec<&str> = tables().collect();
        assert!(
            tables.contains(&"like_record") && tables.contains(&"applied_event") && tables.len() > 10,
            "{tables:?}"
        );
    }
}
