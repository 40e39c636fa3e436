//! The right values of some counters are in another table. A recount corrects these counters with a query.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test ends at its first failure")]

mod live;
mod plain;
mod refused;
mod runs;

use std::collections::BTreeMap;

use common::{Daemon, World};
use sqlx::{AssertSqlSafe, Row};

use tallyd_testkit as common;

/// A query that counts the comments of each video.
const QUERY: &str = "SELECT video_id, COUNT(*) FROM comment WHERE video_id > :after AND deleted = 0 GROUP BY video_id ORDER BY video_id \
                     LIMIT :limit";

/// Returns a configuration with one `[[recount]]` block. The block ends with the lines in `more`.
fn settings(query: &str, more: &str) -> String {
    format!(
        "[metrics]\nlike = 1\ncomment = 2\n[[recount]]\nkind = \"video\"\nmetric = \"comment\"\nquery = \"\"\"{query}\"\"\"\n{more}\n"
    )
}

/// Makes a test environment with an empty table of comments and with queues that have no consumer.
async fn world(name: &str, settings: &str) -> World {
    let world = World::new(name, settings).await;
    world.publisher().await;
    let table = "CREATE TABLE comment (id BIGINT UNSIGNED NOT NULL AUTO_INCREMENT PRIMARY KEY, video_id BIGINT NOT NULL, \
                 deleted BOOLEAN NOT NULL DEFAULT 0, KEY (video_id))";
    sqlx::query(table).execute(&world.pool).await.unwrap();
    world
}

/// Makes the same test environment, but with a daemon.
async fn served(name: &str, settings: &str) -> (World, Daemon) {
    let world = world(name, settings).await;
    let daemon = world.daemon();
    daemon.logged("\"consuming\"").await;
    (world, daemon)
}

async fn run(world: &World, sql: &str) {
    sqlx::raw_sql(AssertSqlSafe(sql.to_owned())).execute(&world.pool).await.unwrap();
}

/// Adds comments to the table. Each entry of `comments` has the id of a video and the number of its comments.
async fn comment(world: &World, comments: &[(u64, usize)]) {
    for (id, count) in comments {
        run(world, &format!("INSERT INTO comment (video_id) VALUES {}", vec![format!("({id})"); *count].join(",")))
            .await;
    }
}

/// Adds rows to `counter`, with right or wrong counts.
async fn count(world: &World, counters: &[(u64, u8, i64)]) {
    for (id, slot, value) in counters {
        let columns = "kind, target_id, metric, slot, value, update_at";
        run(world, &format!("INSERT INTO counter ({columns}) VALUES (1, {id}, 2, {slot}, {value}, NOW(6))")).await;
    }
}

/// Runs the query, and returns the counts that are not zero, by id.
async fn numbers(world: &World, sql: &'static str) -> BTreeMap<u64, i64> {
    let rows = sqlx::query(sql).fetch_all(&world.pool).await.unwrap();
    let numbers = rows.iter().map(|row| (row.get(0), row.get(1)));
    numbers.filter(|(_, number)| *number != 0).collect()
}

async fn counters(world: &World) -> BTreeMap<u64, i64> {
    let sql =
        "SELECT target_id, CAST(SUM(value) AS SIGNED) FROM counter WHERE kind = 1 AND metric = 2 GROUP BY target_id";
    numbers(world, sql).await
}

async fn comments(world: &World) -> BTreeMap<u64, i64> {
    numbers(world, "SELECT CAST(video_id AS UNSIGNED), COUNT(*) FROM comment WHERE deleted = 0 GROUP BY video_id").await
}

/// Returns for each counter the sum of all amounts that recounts added.
async fn added(world: &World) -> BTreeMap<u64, i64> {
    let sql = "SELECT target_id, CAST(SUM(added) AS SIGNED) FROM repair WHERE store = 'mysql' AND outcome = 'done' AND metric = 2 \
               GROUP BY target_id";
    numbers(world, sql).await
}
