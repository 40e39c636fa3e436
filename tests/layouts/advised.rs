//! What counters take in each layout, measured.

use serde_json::Value;
use sqlx::AssertSqlSafe;

use crate::common::private::Private;
use crate::common::{World, stderr, stdout};

/// So many targets with snowflakes for ids, and two numbers each.
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
async fn the_advice_is_a_number_of_buckets_that_stay_compact() {
    let world = World::new("advised", "[metrics]\nlike = 1\ncomment = 2\n").await;
    assert!(stdout(&world.tallyd(&["layout", "advise"])).contains("no kind has counters in MySQL yet"));
    fill(&world, 10_000).await;
    let advice = world.report(&["layout", "advise"]);
    assert_eq!(advice["hash_max_listpack_entries"], 512);
    let kind = &advice["kinds"][0];
    assert_eq!((&kind["kind"], &kind["targets"], &kind["numbers"]), (&"video".into(), &10_000.into(), &2.into()));
    let layouts = kind["layouts"].as_array().unwrap();
    let named = |name: &str| layouts.iter().find(|layout| layout["layout"] == name).unwrap();
    let bytes = |name: &str| named(name)["bytes_per_counter"].as_f64().unwrap();
    // 2^7 buckets of 78.
    let advised: Vec<&Value> = layouts.iter().filter(|layout| layout["advised"] == true).collect();
    assert_eq!((advised.len(), &advised[0]["layout"]), (1, &"packed:7".into()));
    assert_eq!(named("packed:4")["configured"], true);
    assert!(named("packed:4")["fields_most"].as_u64() > Some(512), "{advice}");
    assert!(bytes("string:7") > 5.0 * bytes("packed:7"), "{advice}");
    assert!(bytes("entity:7") > bytes("packed:7") && bytes("packed:4") > 2.0 * bytes("packed:7"), "{advice}");
    let text = stdout(&world.tallyd(&["layout", "advise"]));
    assert!(text.contains("packed:4") && text.contains("as configured") && text.contains("advised"), "{text}");
    assert!(text.contains("hash-max-listpack-entries must be"), "{text}");
    let mut redis = world.redis().await;
    let keys: Vec<String> = redis::cmd("KEYS").arg(format!("{}:*", world.name)).query_async(&mut redis).await.unwrap();
    assert_eq!(keys, Vec::<String>::new(), "nothing is left of what was measured");
    world.close().await;
}

#[tokio::test]
async fn the_measured_room_is_what_redis_uses() {
    let world = World::new("weighed", "[redis]\nbucket_bits = 9\n").await;
    fill(&world, 60_000).await;
    let advice = world.report(&["layout", "advise"]);
    let layouts = advice["kinds"][0]["layouts"].as_array().unwrap();
    let estimate = layouts.iter().find(|layout| layout["layout"] == "packed:9").unwrap()["bytes"].as_f64().unwrap();
    let server = Private::start(&[]).await;
    let mut config = world.config.clone();
    config.redis.url = server.url().as_str().into();
    let cache = tallyd::cache::Cache::new(&config.redis, &config.metrics).unwrap();
    let mut redis = server.connect().await;
    let used = async |redis: &mut redis::aio::MultiplexedConnection| {
        let info: String = redis::cmd("INFO").arg("memory").query_async(redis).await.unwrap();
        let line = info.lines().find_map(|line| line.strip_prefix("used_memory:")).unwrap();
        line.trim().parse::<f64>().unwrap()
    };
    let rows: Vec<(u64, i64)> = sqlx::query_as("SELECT target_id, value FROM counter WHERE metric = 1 AND value <> 0")
        .fetch_all(&world.pool)
        .await
        .unwrap();
    let before = used(&mut redis).await;
    for rows in rows.chunks(500) {
        let mut pipeline = redis::pipe();
        for (id, likes) in rows {
            let target = crate::common::target(*id);
            pipeline.hset(cache.keys.counters("video", cache.keys.bucket(target)), id, likes).ignore();
        }
        let () = pipeline.query_async(&mut redis).await.unwrap();
    }
    let real = used(&mut redis).await - before;
    assert!((0.85..1.15).contains(&(estimate / real)), "estimated {estimate}, really {real}");
    drop(server);
    world.close().await;
}

#[tokio::test]
async fn a_server_or_buckets_that_do_not_fit_are_warned_of() {
    let world = World::new("crowded", "[redis]\nbucket_bits = 0\n").await;
    assert!(!stdout(&world.tallyd(&["check-config"])).contains("a bucket of the kind"));
    let mut redis = world.redis().await;
    let fields: Vec<(u64, u64)> = (1..=420).map(|id| (id, id)).collect();
    let () = redis::cmd("HSET")
        .arg(world.cache.keys.counters("video", 0))
        .arg(fields)
        .query_async(&mut redis)
        .await
        .unwrap();
    let checked = stdout(&world.tallyd(&["check-config"]));
    assert!(checked.contains("a bucket of the kind video has 420 of 512 fields"), "{checked}");
    let daemon = world.daemon();
    daemon.logged("\"consuming\"").await;
    let compared = world.tallyd(&["reconcile", "--full"]);
    assert!(stderr(&compared).contains("buckets-full"), "{}", stderr(&compared));
    assert!(daemon.stop().success());

    let server = Private::start(&["--hash-max-listpack-entries", "128"]).await;
    let mut command = world.command();
    let checked = command.env("TALLYD__REDIS__URL", server.url()).arg("check-config").output().unwrap();
    assert!(stdout(&checked).contains("hash-max-listpack-entries is 128"), "{}{}", stdout(&checked), stderr(&checked));
    drop(server);
    world.close().await;
}
