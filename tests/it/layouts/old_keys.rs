//! The daemon takes over the keys `like:count:{id}` of an older site. These keys already have counts, and the site's
//! old servers still change them.

use std::collections::BTreeMap;

use redis::aio::MultiplexedConnection;
use tallyd_core::event::LikeEvent;
use tallyd_core::model::UserId;

use crate::common::{Daemon, World, body, stderr, target};

/// The daemon uses the site's keys as its counters.
const OLD_KEYS: &str = "[redis]\nlayout = \"string\"\ncounter_key = \"like:count:{id}\"\n";

/// The number of targets whose likes the old servers count without publishing an event.
const STILL_COUNTED: u64 = 150;

fn key(world: &World, id: impl std::fmt::Display) -> String {
    format!("{}:like:count:{id}", world.name)
}

/// Adds rows and counters to MySQL. `likes` has the number of users who like each target.
async fn imported(world: &World, likes: &[(u64, u64)]) {
    for (id, users) in likes {
        for user in 1..=*users {
            let sql = "INSERT INTO like_record (kind, target_id, user_id, is_del, update_at) VALUES (1, ?, ?, 0, '2026-01-01')";
            sqlx::query(sql).bind(id).bind(user).execute(&world.pool).await.unwrap();
        }
        let sql = "INSERT INTO counter (kind, target_id, metric, slot, value, update_at) VALUES (1, ?, 1, 0, ?, '2026-01-01')";
        sqlx::query(sql).bind(id).bind(*users as i64).execute(&world.pool).await.unwrap();
    }
}

async fn ask<T: redis::FromRedisValue>(redis: &mut MultiplexedConnection, words: &[&str]) -> T {
    redis::Cmd::new().arg(words).query_async(redis).await.unwrap()
}

/// Starts a daemon, and waits until it has loaded all buckets.
async fn loaded(world: &World) -> Daemon {
    let daemon = world.consuming().await;
    world.succeeds(&["reconcile", "--changed"]).await;
    daemon
}

#[tokio::test(flavor = "multi_thread")]
async fn existing_values_become_those_of_mysql_and_foreign_keys_stay() {
    let world = World::new("old_values", OLD_KEYS).await;
    imported(&world, &[(1, 3), (2, 3), (3, 3), (4, 2), (5, 2), (6, 1)]).await;
    let mut redis = world.redis().await;
    // In Redis, the count of target 1 is right, the count of target 2 is too high, and the count of target 3 is too
    // low. Target 4 has no key, target 5 has a negative count, and the key of target 6 has an expiry. Redis also has a
    // key for a target that is not in MySQL, and a value that is not a number. Some other keys have no valid id, or
    // have another type.
    for (id, value) in [("1", "3"), ("2", "10"), ("3", "1"), ("5", "-4"), ("6", "7"), ("99", "8"), ("98", "many")] {
        let () = ask(&mut redis, &["SET", &key(&world, id), value]).await;
    }
    let _: i64 = ask(&mut redis, &["EXPIRE", &key(&world, 6), "100000"]).await;
    let () = ask(&mut redis, &["SET", &key(&world, "today"), "5"]).await;
    let () = ask(&mut redis, &["SET", &key(&world, "042"), "6"]).await;
    let _: i64 = ask(&mut redis, &["HSET", &key(&world, 97), "likes", "9"]).await;

    let _daemon = loaded(&world).await;
    let read = async || {
        let mut redis = world.redis().await;
        let mut found = BTreeMap::new();
        for id in ["1", "2", "3", "4", "5", "6", "99", "98", "today", "042"] {
            let value: String = ask(&mut redis, &["GET", &key(&world, id)]).await;
            found.insert(id, value);
        }
        found
    };
    let mut expected = BTreeMap::from([("1", "3"), ("2", "3"), ("3", "3"), ("4", "2"), ("5", "2"), ("6", "1")]);
    expected.extend([("99", "8"), ("98", "many"), ("today", "5"), ("042", "6")]);
    assert_eq!(
        read().await,
        expected.iter().map(|(id, value)| (*id, (*value).to_owned())).collect(),
        "the keys after the load"
    );
    let report = world.reconcile("--full").await;
    assert_eq!((&report["phantoms"], &report["ended"]), (&1.into(), &"done".into()), "{report}");
    expected.insert("99", "0");
    assert_eq!(
        read().await,
        expected.iter().map(|(id, value)| (*id, (*value).to_owned())).collect(),
        "after a full run"
    );
    assert_eq!(ask::<String>(&mut redis, &["HGET", &key(&world, 97), "likes"]).await, "9");
    assert!(ask::<i64>(&mut redis, &["TTL", &key(&world, 6)]).await > 0, "the key keeps its expiry");

    // From now on the daemon counts in these keys.
    let publisher = world.publisher().await;
    let at = tallyd_base::runtime::clock::now();
    world.consumed(&publisher, &[body(&LikeEvent { target: target(2), user: UserId(77), at, liked: true })]).await;
    world.outbox_added().await;
    assert_eq!(ask::<String>(&mut redis, &["GET", &key(&world, 2)]).await, "4");
}

#[tokio::test(flavor = "multi_thread")]
async fn old_servers_that_still_count_are_named_in_the_third_run() {
    let settings = format!("{OLD_KEYS}[reconcile]\nrepair_targets_max_percent = 100\n");
    let world = World::new("old_servers", &settings).await;
    let likes: Vec<(u64, u64)> = (1..=STILL_COUNTED).map(|id| (id, 1)).collect();
    imported(&world, &likes).await;
    let _daemon = loaded(&world).await;
    let count = async || {
        let mut pipeline = redis::pipe();
        for id in 1..=STILL_COUNTED {
            pipeline.incr(key(&world, id), 1);
        }
        let _: Vec<i64> = pipeline.query_async(&mut world.redis().await).await.unwrap();
    };
    let value = async || ask::<i64>(&mut world.redis().await, &["GET", &key(&world, 7)]).await;
    for _ in 0..2 {
        count().await;
        let report = world.reconcile("--full").await;
        assert_eq!((&report["repaired"], &report["ended"]), (&STILL_COUNTED.into(), &"done".into()), "{report}");
        assert_eq!(value().await, 1);
    }
    for (run, held) in [(3, 2), (4, 3)] {
        count().await;
        let report = world.reconcile("--full").await;
        assert_eq!((&report["repaired"], &report["left"]), (&0.into(), &STILL_COUNTED.into()), "{report}");
        assert_eq!(report["ended"], "braked", "{report}");
        let why = report["ended_early"].as_str().unwrap();
        assert!(why.starts_with("the like counters of 150 targets are too high again"), "{why}");
        let place = format!("an API server still counts in {}:like:count:{{id}} without publishing", world.name);
        assert!(why.contains(&place) && why.contains("`tallyd reconcile --force`"), "{why}");
        assert_eq!(value().await, held, "run {run} must not subtract anything");
    }
    assert_eq!(world.tallyd(&["reconcile", "--full", "--dry-run"]).status.code(), Some(2));
    assert_eq!(world.count("SELECT COUNT(*) FROM job_run WHERE outcome = 'braked'").await, 2);
    assert_eq!(world.count("SELECT COUNT(*) FROM repair WHERE outcome = 'held'").await, 300);

    // The old servers no longer run. A `changed` run also finds the counters that the last run did not repair.
    let report = world.reconcile("--changed").await;
    assert_eq!((&report["repaired"], &report["ended"]), (&STILL_COUNTED.into(), &"done".into()), "{report}");
    assert_eq!(value().await, 1);
    let report = world.reconcile("--full").await;
    assert_eq!((&report["drifted"], &report["exact"]), (&0.into(), &STILL_COUNTED.into()), "{report}");
}

#[tokio::test(flavor = "multi_thread")]
async fn one_metric_that_stops_leaves_the_repairs_of_others_and_force() {
    let settings = "[metrics]\nlike = 1\nshare = 2\n[redis]\nlayout = \"string\"\ncounter_key = \"{metric}:count:{id}\"\n\
                    [reconcile]\nrepair_targets_max_percent = 100\n";
    let world = World::new("old_metrics", settings).await;
    let likes: Vec<(u64, u64)> = (1..=STILL_COUNTED).map(|id| (id, 1)).collect();
    imported(&world, &likes).await;
    let _daemon = loaded(&world).await;
    let count = async |shares: &[u64]| {
        let mut pipeline = redis::pipe();
        for id in 1..=STILL_COUNTED {
            pipeline.incr(key(&world, id), 1);
        }
        for id in shares {
            pipeline.incr(format!("{}:share:count:{id}", world.name), 1);
        }
        let _: Vec<i64> = pipeline.query_async(&mut world.redis().await).await.unwrap();
    };
    for _ in 0..2 {
        count(&[1, 2, 3]).await;
        assert_eq!(world.reconcile("--full").await["repaired"], STILL_COUNTED + 3);
    }
    count(&[1, 2, 3]).await;
    let report = world.reconcile("--full").await;
    assert_eq!((&report["repaired"], &report["left"]), (&3.into(), &STILL_COUNTED.into()), "{report}");
    let forced = world.tallyd(&["reconcile", "--full", "--force", "--yes"]);
    assert!(forced.status.success(), "{}", stderr(&forced));
    assert_eq!(ask::<i64>(&mut world.redis().await, &["GET", &key(&world, 7)]).await, 1);
}
