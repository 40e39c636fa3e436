//! The database schema. `tallyd migrate` (migrate.rs) creates the schema, and the other commands of tallyd check the
//! schema when they start. The daemon's account needs no rights to change tables.

use std::sync::LazyLock;

use sqlx::migrate::{Migration, MigrationType, Migrator};
use sqlx::{MySqlConnection, Row, SqlSafeStr};

use super::{Conn, Context, Result, Store, StoreError};

pub(super) static MIGRATIONS: LazyLock<Migrator> = LazyLock::new(|| {
    let step = |(version, name, sql): (i64, &str, &'static str)| {
        Migration::new(version, name.replace('_', " ").into(), MigrationType::Simple, sql.into_sql_str(), false)
    };
    Migrator::with_migrations(STEPS.map(step).into())
});

/// The files in `migrations`. sqlx's macro would list them too, but it compiles sqlx and its dependencies twice.
const STEPS: [(i64, &str, &str); 6] = [
    (1, "likes", include_str!("../../../migrations/0001_likes.sql")),
    (2, "consumer", include_str!("../../../migrations/0002_consumer.sql")),
    (3, "jobs", include_str!("../../../migrations/0003_jobs.sql")),
    (4, "boards", include_str!("../../../migrations/0004_boards.sql")),
    (5, "control", include_str!("../../../migrations/0005_control.sql")),
    (6, "maps", include_str!("../../../migrations/0006_maps.sql")),
];

pub(super) const HISTORY: &str = "_sqlx_migrations";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Schema {
    Current,
    Behind(usize),
    Newer(usize),
    /// A newer version has applied a step that this version does not work with.
    TooNew,
}

impl Schema {
    pub fn problem(self) -> Option<String> {
        match self {
            Self::Current | Self::Newer(_) => None,
            Self::Behind(steps) => Some(format!("MySQL's schema lacks {steps} steps: run `tallyd migrate`")),
            Self::TooNew => Some(
                "MySQL's schema was made by a newer tallyd, and this version does not work with it: run the newer version"
                    .to_owned(),
            ),
        }
    }
}

impl Store {
    pub async fn schema(&self) -> Result<Schema> {
        let mut conn = self.acquire().await?;
        let (applied, floor) = conn
            .limit("read the schema's version", async |connection| {
                Ok((applied(connection).await?, floor(connection).await?))
            })
            .await?;
        Ok(judge(&MIGRATIONS.iter().map(|step| step.version).collect::<Vec<_>>(), &applied, floor))
    }

    pub async fn durability(&self) -> Result<(String, Vec<String>)> {
        const ACTION: &str = "read the server's settings";
        const SQL: &str = "SELECT VERSION(), @@innodb_flush_log_at_trx_commit, @@log_bin, @@sync_binlog";
        let mut conn: Conn = self.acquire().await?;
        let (row, log) = conn
            .limit(ACTION, async |connection| {
                let row = sqlx::query(SQL).fetch_one(&mut *connection).await.context(ACTION)?;
                let log = "SHOW SESSION VARIABLES LIKE 'binlog_format'";
                Ok((row, sqlx::query(log).fetch_optional(connection).await.context(ACTION)?))
            })
            .await?;
        let number = |index: usize| row.try_get_unchecked::<i64, _>(index).context(ACTION);
        let log: Option<String> = log.map(|row| row.try_get(1)).transpose().context(ACTION)?;
        if number(2)? != 0 && log.as_deref() == Some("STATEMENT") {
            return Err(StoreError::StatementLog);
        }
        let mut warnings = Vec::new();
        if number(1)? != 1 {
            warnings.push("innodb_flush_log_at_trx_commit is not 1: a crash of the host loses commits".to_owned());
        }
        if number(2)? != 0 && number(3)? != 1 {
            warnings.push("sync_binlog is not 1: if the host crashes, its replicas can lack commits".to_owned());
        }
        Ok((row.try_get_unchecked(0).context(ACTION)?, warnings))
    }
}

fn judge(known: &[i64], applied: &[i64], floor: Option<i64>) -> Schema {
    let missing = known.iter().filter(|step| !applied.contains(step)).count();
    let newer = applied.iter().filter(|step| !known.contains(step)).count();
    if floor.is_some_and(|floor| !known.contains(&floor)) {
        // The result is also `TooNew` while `tallyd migrate` runs the step that raises the floor, or if this step was
        // interrupted.
        return Schema::TooNew;
    }
    match (missing, newer) {
        (0, 0) => Schema::Current,
        (0, newer) if floor.is_some() => Schema::Newer(newer),
        (_, 0) => Schema::Behind(missing),
        _ => Schema::TooNew,
    }
}

pub(super) async fn applied(connection: &mut MySqlConnection) -> Result<Vec<i64>> {
    if !has_table(connection, HISTORY).await? {
        return Ok(Vec::new());
    }
    sqlx::query_scalar("SELECT version FROM _sqlx_migrations WHERE success")
        .fetch_all(connection)
        .await
        .context("read the schema's version")
}

/// Returns the floor: a version works with the schema only if the version contains this step.
async fn floor(connection: &mut MySqlConnection) -> Result<Option<i64>> {
    if !has_table(connection, "schema_floor").await? {
        return Ok(None);
    }
    sqlx::query_scalar("SELECT step FROM schema_floor WHERE one = 1")
        .fetch_optional(connection)
        .await
        .context("read which versions can work with the schema")
}

pub(super) async fn has_table(connection: &mut MySqlConnection, name: &'static str) -> Result<bool> {
    let tables: i64 = sqlx::query_scalar(
        "SELECT COUNT(*) FROM information_schema.tables WHERE table_schema = DATABASE() AND table_name = ?",
    )
    .bind(name)
    .fetch_one(connection)
    .await
    .context("check for the schema")?;
    Ok(tables > 0)
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::{fs, io};

    use super::{STEPS, Schema, judge};

    #[test]
    fn the_steps_are_the_files_in_the_folder_of_migrations() -> io::Result<()> {
        let mut files = Vec::new();
        for entry in fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../migrations"))? {
            let entry = entry?;
            files.push((entry.file_name().to_string_lossy().into_owned(), fs::read_to_string(entry.path())?));
        }
        files.sort();
        let steps = STEPS.map(|(version, name, sql)| (format!("{version:04}_{name}.sql"), sql.to_owned()));
        assert_eq!(files, steps);
        Ok(())
    }

    #[test]
    fn a_version_works_with_the_steps_it_knows_and_with_newer_ones_that_only_add() {
        for (applied, floor, judged) in [
            (&[1, 2][..], Some(2), Schema::Current),
            (&[], None, Schema::Behind(2)),
            (&[1], None, Schema::Behind(1)),
            (&[1, 2, 3, 4], Some(2), Schema::Newer(2)),
            (&[1, 2, 3], Some(3), Schema::TooNew),
            (&[1, 2, 3], None, Schema::TooNew),
            // The step that needs a newer version was interrupted.
            (&[1, 2], Some(3), Schema::TooNew),
            // The table of completed steps is lost.
            (&[], Some(2), Schema::Behind(2)),
            (&[], Some(3), Schema::TooNew),
            // The two versions have different steps.
            (&[1, 3], Some(1), Schema::TooNew),
        ] {
            assert_eq!(judge(&[1, 2], applied, floor), judged, "{applied:?}, {floor:?}");
        }
    }
}
