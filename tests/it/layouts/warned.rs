//! `config check` warns about the size of the buckets and the settings of Redis.

use serde_json::Value;
use sqlx::AssertSqlSafe;

use crate::common::private::Private;
use crate::common::{World, stderr, stdout};

/// Adds targets with snowflake ids. Each target has two counters.
async fn fill(world: &World, targets: u64) {
    let ids: Vec<u64> = (0..targets).map(|number| (1_700_000_000_000 + number * 7) << 22 | 5 << 12).collect();
    for ids in ids.chunks(1_000) {
        let row =
            |metric: u64| move |id: &u64| format!("(1, {id}, {metric}, 0, {}, NOW(6))", id / 7 % 900 * (3 - metric));
        let rows: Vec<String> = ids.iter().map(row(1)).chain(ids.iter().map(row(2))).collect();
        let sql =
            format!("INSERT INTO counter (kind, target_id, metric, slot, value, update_at) VALUES {}", rows.join(","));
        sqlx::query(AssertSqlSafe(sql)).execute(&world.pool).await.unwrap();
    }
}

#[tokio::test]
async fn more_targets_than_the_buckets_suit_are_warned_of() {
    let world = World::new("advised", "[metrics]\nlike = 1\ncomment = 2\n").await;
    fill(&world, 10_000).await;
    sqlx::query("ANALYZE TABLE counter").execute(&world.pool).await.unwrap();
    let checked = stdout(&world.tallyd(&["config", "check"]));
    // 10,000 targets need 2^7 buckets. The command estimates the number of targets. The estimate can be half or twice
    // the right number, so the recommended value can differ by one.
    let suited = ["6", "7", "8"].map(|bits| format!("targets, which need bucket_bits = {bits}"));
    assert!(suited.iter().any(|suited| checked.contains(suited)), "{checked}");
}

#[tokio::test]
async fn a_server_or_buckets_that_do_not_fit_are_warned_of() {
    let world = World::new("crowded", "[redis]\nbucket_bits = 0\n").await;
    assert!(!stdout(&world.tallyd(&["config", "check"])).contains("a bucket of the kind"));
    let mut redis = world.redis().await;
    let fields: Vec<(u64, u64)> = (1..=420).map(|id| (id, id)).collect();
    let () = redis::cmd("HSET")
        .arg(world.cache.keys.counters("video", 0))
        .arg(fields)
        .query_async(&mut redis)
        .await
        .unwrap();
    let checked = stdout(&world.tallyd(&["config", "check"]));
    assert!(checked.contains("a bucket of the kind video has 420 of at most 512 fields"), "{checked}");
    let daemon = world.consuming().await;
    let compared = world.tallyd(&["reconcile", "--full"]);
    assert!(stderr(&compared).contains("buckets-full"), "{}", stderr(&compared));
    assert!(daemon.stop().success());

    let server = Private::start(&["--hash-max-listpack-entries", "128"]).await;
    let mut command = world.command();
    let checked = command.env("TALLYD__REDIS__URL", server.url()).args(["config", "check"]).output().unwrap();
    assert!(stdout(&checked).contains("hash-max-listpack-entries is 128"), "{}{}", stdout(&checked), stderr(&checked));
    // In a target's field, each code up to the highest code takes two bytes, even if no metric has this code.
    let long = "hash-max-listpack-value is 64, but a target with counters of seven digits takes 92 bytes";
    let marked = "a mark for each of the 64 partitions: the marks of a bucket take about 1242 bytes";
    for (name, value, text, warns) in [
        ("TALLYD__METRICS__SHARE", "40", long, true),
        ("TALLYD__METRICS__SHARE", "20", "hash-max-listpack-value", false),
        ("TALLYD__AMQP__PARTITIONS", "64", marked, true),
        ("TALLYD__AMQP__PARTITIONS", "32", "a mark for each", false),
    ] {
        let redis = world.config.redis.url.expose();
        let environment = [("TALLYD__REDIS__URL", redis), ("TALLYD__METRICS__LIKE", "1"), (name, value)];
        let output = world.command().envs(environment).args(["config", "check", "--format", "json"]).output().unwrap();
        let report: Value = serde_json::from_slice(&output.stdout).unwrap();
        let found = |check: &Value| check["status"] == "warning" && check["found"].as_str().unwrap().contains(text);
        assert_eq!(report["checks"].as_array().unwrap().iter().any(found), warns, "{name} {value}: {report:#}");
    }
    drop(server);
}
