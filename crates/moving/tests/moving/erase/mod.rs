//! `tallyd admin erase`: afterwards no table and no key has the erased id, and everything else is unchanged.

#![expect(clippy::unwrap_used, reason = "a test ends at its first failure")]

mod boards;
#[cfg(feature = "fault-points")]
mod crash;
mod letters;
mod target;
mod user;

use std::process::Output;

use redis::AsyncCommands;
use serde_json::Value;
use sqlx::{AssertSqlSafe, Row};
use tallyd_core::event::LikeEvent;
use tallyd_core::model::{Target, UserId};
use tallyd_rabbitmq::Publisher;

use crate::common;
use common::{Model, World, body, stderr, stdout};

/// The id of the user to erase. The id has so many digits that a search for these digits finds only this user.
const USER: UserId = UserId(70_070_070_007);

/// The id of the target to erase. The id has so many digits that a search for these digits finds only this target.
const VIDEO: u64 = 42_042_042_042;

/// The daemon counts both metrics, and API servers only publish.
const METRICS: &str = "[metrics]\nlike = 1\nview = 3\n";

/// Collects likes and unlikes. Each event is later than the event before it.
struct Likes {
    model: Model,
    events: Vec<LikeEvent>,
}

impl Likes {
    fn new() -> Self {
        Self { model: Model::default(), events: Vec::new() }
    }

    fn add(&mut self, target: Target, user: UserId) {
        self.set(target, user, true);
    }

    fn set(&mut self, target: Target, user: UserId, liked: bool) {
        let event = LikeEvent { target, user, at: tallyd_base::runtime::clock::now(), liked };
        self.model.apply(&event);
        self.events.push(event);
    }

    /// Publishes the events that were added after the last call of this method.
    async fn publish(&mut self, world: &World, publisher: &Publisher) {
        let bodies: Vec<_> = std::mem::take(&mut self.events).iter().map(body).collect();
        world.publish(publisher, &bodies).await;
    }
}

/// Checks the exit code and returns the report.
#[track_caller]
fn report(output: &Output, code: i32) -> Value {
    assert_eq!(output.status.code(), Some(code), "{}{}", stdout(output), stderr(output));
    serde_json::from_slice(&output.stdout).unwrap()
}

fn erase(world: &World, arguments: &[&str]) -> Output {
    world.tallyd(&[&["admin", "erase", "--yes"], arguments, &["--format", "json"]].concat())
}

/// Returns the names of all columns in MySQL and all keys in Redis that contain the id.
async fn named(world: &World, id: u64) -> Vec<String> {
    let mut named = Vec::new();
    let columns = "SELECT TABLE_NAME, COLUMN_NAME FROM information_schema.COLUMNS WHERE TABLE_SCHEMA = DATABASE()";
    let columns = sqlx::query(columns).fetch_all(&world.pool).await.unwrap();
    assert!(columns.len() > 100, "all tables must be searched");
    for row in columns {
        let (table, column): (String, String) = (row.get(0), row.get(1));
        let sql = format!("SELECT COUNT(*) FROM `{table}` WHERE LOCATE('{id}', `{column}`) > 0");
        let rows: i64 = sqlx::query_scalar(AssertSqlSafe(sql)).fetch_one(&world.pool).await.unwrap();
        if rows > 0 {
            named.push(format!("{table}.{column}: {rows}"));
        }
    }
    let (mut redis, id) = (world.redis().await, id.to_string());
    let keys: Vec<String> = redis.keys(format!("{}:*", world.name)).await.unwrap();
    for key in keys {
        let kind: String = redis::cmd("TYPE").arg(&key).query_async(&mut redis).await.unwrap();
        let parts: Vec<Vec<u8>> = match kind.as_str() {
            "hash" => redis::cmd("HGETALL").arg(&key).query_async(&mut redis).await.unwrap(),
            "zset" => redis.zrange(&key, 0, -1).await.unwrap(),
            "set" => redis.smembers(&key).await.unwrap(),
            "string" => vec![redis.get(&key).await.unwrap()],
            // The daemon deleted this key between the test's list of keys and this read.
            "none" => Vec::new(),
            other => panic!("{key} is a {other}"),
        };
        let has = |part: &Vec<u8>| part.windows(id.len()).any(|window| window == id.as_bytes());
        if key.contains(&id) || parts.iter().any(has) {
            named.push(key);
        }
    }
    named
}
