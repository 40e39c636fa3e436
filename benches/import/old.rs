//! A site before tallyd: its own like table, and the worker that writes to it.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use futures_util::future::try_join_all;
use serde::Serialize;
use sqlx::mysql::MySqlPoolOptions;
use sqlx::{AssertSqlSafe, Executor, MySqlPool};
use tallyd_testkit::dice::Dice;
use tokio_util::sync::CancellationToken;

use crate::common::report::quantile;
use crate::common::world::World;

/// The number of likes of each target in a table with many targets.
const LIKES_OF_TARGET: u64 = 20;

/// Number of rows that one statement inserts.
const ROWS_PER_STATEMENT: u64 = 1_000_000;

/// Number of connections of the old worker.
const WORKERS: u32 = 4;

/// The old worker's users have higher ids than all users in the table.
const NEW_USERS: u64 = 1 << 40;

/// How the rows are distributed over targets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shape {
    Spread,
    OneTarget,
}

/// The tables that the old worker writes to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tables {
    /// The worker writes only to the old table.
    Old,
    /// The worker writes to the old table and to `like_record`, as if the daemon applied the events.
    Both,
}

/// The durations of the old worker's statements.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Waits {
    pub statements: usize,
    pub longest_ms: f64,
    pub p99_ms: f64,
}

pub struct Old {
    database: String,
    /// The name of tallyd's database.
    world: String,
    pool: MySqlPool,
    shape: Shape,
    pub rows: u64,
}

impl Old {
    /// Creates a table with this number of rows, in key order.
    pub async fn fill(world: &World, shape: Shape, rows: u64) -> Result<Self> {
        let database = format!("{}_old", world.name);
        run(&world.pool, format!("CREATE DATABASE {database}")).await?;
        run(
            &world.pool,
            format!(
                "CREATE TABLE {database}.likes (post_id BIGINT NOT NULL, user_id BIGINT NOT NULL, created_at DATETIME NOT NULL, \
                 PRIMARY KEY (post_id, user_id)) ENGINE = InnoDB"
            ),
        )
        .await?;
        let (target, user) = match shape {
            Shape::Spread => (format!("1 + seq DIV {LIKES_OF_TARGET}"), format!("1 + 7 * (seq MOD {LIKES_OF_TARGET})")),
            Shape::OneTarget => ("1".to_owned(), "1 + seq".to_owned()),
        };
        for from in (0..rows).step_by(usize::try_from(ROWS_PER_STATEMENT)?) {
            let last = rows.min(from + ROWS_PER_STATEMENT) - 1;
            let sql = format!(
                "INSERT INTO {database}.likes SELECT {target}, {user}, '2025-01-01' + INTERVAL seq DIV 1000 SECOND \
                 FROM seq_{from}_to_{last}"
            );
            run(&world.pool, sql).await.context("insert from a sequence (only MariaDB has sequences)")?;
        }
        let pool = MySqlPoolOptions::new()
            .max_connections(WORKERS)
            .connect_with((*world.pool.connect_options()).clone().database(&database))
            .await?;
        Ok(Self { database, world: world.name.clone(), pool, shape, rows })
    }

    pub async fn drop(self) -> Result<()> {
        run(&self.pool, format!("DROP DATABASE {}", self.database)).await?;
        self.pool.close().await;
        Ok(())
    }

    /// Returns the part of config.toml that describes the old table.
    pub fn block(&self) -> String {
        format!(
            "\n[[import]]\nname = \"old\"\nkind = \"video\"\nquery = \"\"\"\nSELECT post_id AS target, user_id AS user, created_at AS at \
             FROM {}.likes WHERE post_id > :after_target OR (post_id = :after_target AND user_id > :after_user) \
             ORDER BY post_id, user_id LIMIT :rows\"\"\"\n",
            self.database
        )
    }

    /// Copies the table with one statement.
    pub async fn copy_bare(&self, world: &World) -> Result<()> {
        run(&world.pool, "CREATE TABLE bare LIKE like_record".to_owned()).await?;
        let mut connection = world.pool.acquire().await?;
        connection.execute("SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED").await?;
        let sql = format!("INSERT INTO bare SELECT 1, post_id, user_id, 0, created_at FROM {}.likes", self.database);
        connection.execute(AssertSqlSafe(sql)).await?;
        Ok(())
    }

    pub async fn drop_bare(&self, world: &World) -> Result<()> {
        run(&world.pool, "DROP TABLE bare".to_owned()).await
    }

    /// Reads both tables once, to count their rows and to compute a checksum.
    pub async fn scan_both(&self, world: &World) -> Result<()> {
        for (target, user, table) in
            [("target_id", "user_id", "like_record"), ("post_id", "user_id", &*format!("{}.likes", self.database))]
        {
            let sql = format!("SELECT COUNT(*), BIT_XOR(CRC32(CONCAT_WS(':', {target}, {user}))) FROM {table}");
            run(&world.pool, sql).await?;
        }
        Ok(())
    }

    /// Copies to `like_record` the rows that the old worker wrote during the import.
    pub async fn catch_up(&self, world: &World) -> Result<()> {
        let sql = format!(
            "INSERT IGNORE INTO like_record SELECT 1, post_id, user_id, 0, created_at FROM {}.likes WHERE user_id >= {NEW_USERS}",
            self.database
        );
        run(&world.pool, sql).await
    }

    /// Runs `work` while the old worker writes likes at the given rate per second.
    pub async fn beside<T>(
        &self,
        rate: u32,
        tables: Tables,
        work: impl Future<Output = Result<T>>,
    ) -> Result<(T, Waits)> {
        let ends = CancellationToken::new();
        let every = Duration::from_secs(1) * WORKERS / rate;
        let workers = try_join_all((0..WORKERS).map(|worker| self.work(worker, every, tables, &ends)));
        let work = async {
            let done = work.await;
            ends.cancel();
            done
        };
        let (done, waits) = tokio::join!(work, workers);
        let mut waits: Vec<f64> = waits?.into_iter().flatten().collect();
        waits.sort_by(f64::total_cmp);
        let seen = Waits {
            statements: waits.len(),
            longest_ms: waits.last().copied().unwrap_or_default(),
            p99_ms: quantile(&waits, 0.99),
        };
        Ok((done?, seen))
    }

    /// Writes likes at random places of the table, each with its own statement.
    async fn work(&self, worker: u32, every: Duration, tables: Tables, ends: &CancellationToken) -> Result<Vec<f64>> {
        let mut connection = self.pool.acquire().await?;
        let mut turn = tokio::time::interval(every);
        let (mut waits, targets) = (Vec::new(), (self.rows / LIKES_OF_TARGET).max(1));
        // With `Tables::Both`, the worker chooses other users than in the runs with `Tables::Old`.
        let mut dice = Dice::new(u64::from(worker) + if tables == Tables::Both { 100 } else { 0 });
        let applied = format!("INSERT IGNORE INTO {}.like_record VALUES (1, ?, ?, 0, UTC_TIMESTAMP(6))", self.world);
        while !ends.is_cancelled() {
            turn.tick().await;
            let target = if self.shape == Shape::OneTarget { 1 } else { 1 + dice.below(targets) };
            let user = NEW_USERS + dice.below(NEW_USERS);
            let began = Instant::now();
            sqlx::query("INSERT IGNORE INTO likes (post_id, user_id, created_at) VALUES (?, ?, UTC_TIMESTAMP())")
                .bind(target)
                .bind(user)
                .execute(&mut *connection)
                .await?;
            waits.push(began.elapsed().as_secs_f64() * 1e3);
            if tables == Tables::Both {
                sqlx::query(AssertSqlSafe(applied.clone())).bind(target).bind(user).execute(&mut *connection).await?;
            }
        }
        Ok(waits)
    }
}

async fn run(pool: &MySqlPool, sql: String) -> Result<()> {
    sqlx::raw_sql(AssertSqlSafe(sql)).execute(pool).await?;
    Ok(())
}
