//! Questions to MySQL that change nothing: what the account may do, and how the server is set.

use sqlx::mysql::MySqlDatabaseError;
use sqlx::{AssertSqlSafe, MySqlConnection, Row};

use super::schema::MIGRATIONS;
use super::{Result, Store, StoreError, Tried};

/// Tables whose partitions the daemon changes.
const PARTITIONED: [&str; 2] = ["applied_event", "recent_delta"];

/// How the server is set.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// As it calls itself.
    pub version: String,
    /// Bytes that one statement may have.
    pub packet_max: u64,
    /// In which sort of letters the database keeps text.
    pub charset: String,
}

impl StoreError {
    /// The account or the database is refused.
    pub fn is_refusal(&self) -> bool {
        // No right to the database, wrong password, no such database, no right to the table or a setting, no login that way.
        self.number().is_some_and(|number| matches!(number, 1044 | 1045 | 1049 | 1142 | 1143 | 1227 | 1698))
    }
}

impl Store {
    /// How the server is set.
    ///
    /// # Errors
    /// MySQL is away.
    pub async fn settings(&self) -> Result<Settings> {
        const ACTION: &str = "read the server's settings";
        let mut lent = self.lend().await?;
        lent.limit(ACTION, |connection| async move {
            let row = sqlx::query("SELECT VERSION(), @@max_allowed_packet, @@character_set_database")
                .fetch_one(connection)
                .await
                .tried(ACTION)?;
            Ok(Settings {
                version: row.try_get_unchecked(0).tried(ACTION)?,
                packet_max: row.try_get_unchecked::<i64, _>(1).tried(ACTION)?.unsigned_abs(),
                charset: row.try_get_unchecked(2).tried(ACTION)?,
            })
        })
        .await
    }

    /// The rights that the daemon needs and its account lacks: `INSERT on counter`. Each is tried with a statement that finds no row, in
    /// a transaction that is taken back. Those to change partitions are looked for among the grants; none are said where there are roles.
    ///
    /// # Errors
    /// MySQL is away.
    pub async fn missing_rights(&self) -> Result<Vec<String>> {
        let mut lent = self.lend().await?;
        lent.limit("try what the account may do", |connection| async move {
            let mut missing = Vec::new();
            execute(connection, "START TRANSACTION".to_owned()).await.tried("begin")?;
            for table in tables() {
                missing.extend(missing_of(connection, table).await?);
            }
            execute(connection, "ROLLBACK".to_owned()).await.tried("take it back")?;
            let grants: Vec<String> =
                sqlx::query_scalar("SHOW GRANTS").fetch_all(connection).await.tried("read the grants")?;
            let lacks = PARTITIONED.iter().filter(|table| !may_change(&grants, table));
            missing.extend(lacks.map(|table| format!("CREATE, ALTER, DROP on {table}")));
            Ok(missing)
        })
        .await
    }
}

/// All tables, by the steps that make them.
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
    .tried("read the columns")?;
    let column = column.unwrap_or_else(|| "1".to_owned());
    let mut missing = Vec::new();
    for (right, sql) in [
        ("SELECT", format!("SELECT 1 FROM {table} WHERE FALSE")),
        ("INSERT", format!("INSERT INTO {table} SELECT * FROM {table} WHERE FALSE")),
        ("UPDATE", format!("UPDATE {table} SET {column} = {column} WHERE FALSE")),
        ("DELETE", format!("DELETE FROM {table} WHERE FALSE")),
    ] {
        if let Err(sqlx::Error::Database(error)) = execute(connection, sql).await
            && error.try_downcast_ref::<MySqlDatabaseError>().is_some_and(|error| matches!(error.number(), 1142 | 1143))
        {
            missing.push(format!("{right} on {table}"));
        }
    }
    Ok(missing)
}

async fn execute(connection: &mut MySqlConnection, sql: String) -> std::result::Result<(), sqlx::Error> {
    sqlx::raw_sql(AssertSqlSafe(sql)).execute(connection).await.map(drop)
}

/// Whether some grant allows it, or may.
fn may_change(grants: &[String], table: &str) -> bool {
    grants.iter().any(|grant| {
        let Some((rights, on)) = grant.split_once(" ON ") else {
            // GRANT role TO account
            return grant.starts_with("GRANT ") && !grant.contains(" PROXY ");
        };
        let of = on.split(" TO ").next().unwrap_or_default().replace('`', "");
        let fits = of.ends_with(".*") || of.ends_with(&format!(".{table}"));
        let all = ["CREATE", "ALTER", "DROP"];
        let has = |right: &str| rights.trim_start_matches("GRANT ").split(", ").any(|it| it == right);
        fits && (rights.contains("ALL PRIVILEGES") || all.into_iter().all(has))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rights_to_change_partitions_are_read_from_grants() {
        let may =
            |grant: &str| may_change(&["GRANT USAGE ON *.* TO `a`@`%`".to_owned(), grant.to_owned()], "applied_event");
        assert!(may("GRANT CREATE, ALTER, DROP ON `t`.`applied_event` TO `a`@`%`"));
        assert!(may("GRANT SELECT, CREATE, DROP, INDEX, ALTER ON `t`.* TO `a`@`%`"));
        assert!(may("GRANT ALL PRIVILEGES ON *.* TO `root`@`%`"));
        assert!(may("GRANT `role`@`%` TO `a`@`%`"), "what a role may do is not known");
        assert!(!may("GRANT CREATE, ALTER, DROP ON `t`.`recent_delta` TO `a`@`%`"));
        assert!(!may("GRANT SELECT, CREATE VIEW, ALTER ROUTINE ON `t`.* TO `a`@`%`"));
    }

    #[test]
    fn every_table_is_tried() {
        let tables: Vec<&str> = tables().collect();
        assert!(
            tables.contains(&"like_record") && tables.contains(&"applied_event") && tables.len() > 10,
            "{tables:?}"
        );
    }
}
