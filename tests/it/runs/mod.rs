//! Tests reconcile runs that an operator stops, that are killed, that run too long, or that find more drifts than the
//! limits allow. In some tests Redis loses data while the daemon runs.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test ends at its first failure")]

mod back;
mod clock;
mod held;
mod kept;
mod load;
mod parallel;
mod paused;
mod replica;
mod rows;
mod scrub;
mod snapshot;

use crate::common;
use common::{Model, World, as_api, drift, event_of, eventually, lose, stderr, stdout, target};
use tallyd_core::model::UserId;

/// Two users like each of `targets` targets, and MySQL and Redis have these likes.
async fn settled(name: &str, targets: u64, settings: &str) -> (World, common::Daemon, Model) {
    let world = World::new(name, settings).await;
    let (daemon, model) = world.liked(targets, 2).await;
    (world, daemon, model)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_run_that_would_change_a_counter_by_too_much_brakes_and_force_goes_on() {
    let (world, daemon, model) = settled("brake_abs", 5, "[reconcile]\nrepair_abs_max = 50").await;
    drift(&world, target(3), 51).await;
    let output = world.tallyd(&["reconcile", "--format", "json"]);
    assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
    let report: serde_json::Value = serde_json::from_str(&stdout(&output)).unwrap();
    assert_eq!((&report["ended"], &report["repaired"]), (&"braked".into(), &0.into()), "{report}");
    let why = report["ended_early"].as_str().unwrap();
    assert!(why.contains("off by 51, more than [reconcile] repair_abs_max = 50"), "{why}");
    assert!(why.contains("--force"), "{why}");
    assert_eq!(world.redis_counters().await[&target(3)], 53, "nothing was changed");
    assert_eq!(world.count("SELECT COUNT(*) FROM repair").await, 0);
    assert_eq!(world.count("SELECT COUNT(*) FROM job_run WHERE outcome = 'braked'").await, 1);
    assert_eq!(world.report(&["reconcile", "--force", "--yes"])["repaired"], 1);
    world.redis_ends_as(&model, daemon).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_run_that_would_change_too_many_targets_brakes() {
    let (world, daemon, model) = settled("brake_many", 200, "[reconcile]\nrepair_targets_max_percent = 60").await;
    for id in 1..=121 {
        drift(&world, target(id), 1).await;
    }
    let output = world.tallyd(&["reconcile"]);
    assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
    assert!(stdout(&output).contains("121 of 200 targets have drifted"), "{}", stdout(&output));
    drift(&world, target(1), -1).await;
    assert_eq!(world.report(&["reconcile"])["repaired"], 120, "120 of 200 are allowed");
    world.redis_ends_as(&model, daemon).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn every_repair_is_noted_with_what_was_before() {
    let (world, daemon, model) = settled("audit", 4, "").await;
    drift(&world, target(1), 5).await;
    drift(&world, target(2), -1).await;
    sqlx::query("UPDATE counter SET value = value + 7 WHERE target_id = 3").execute(&world.pool).await.unwrap();
    assert_eq!(world.report(&["reconcile"])["repaired"], 3);
    world.outbox_added().await;
    let noted: Vec<(u64, String, i64, i64, Option<String>)> =
        sqlx::query_as("SELECT target_id, store, before_it, added, outcome FROM repair ORDER BY target_id, store")
            .fetch_all(&world.pool)
            .await
            .unwrap();
    let done = || Some("done".to_owned());
    let expected = [
        (1, "redis".to_owned(), 7, -5, done()),
        (2, "redis".to_owned(), 1, 1, done()),
        // The correction also comes to Redis, which was right. So the run first makes Redis equal to the row.
        (3, "mysql".to_owned(), 9, -7, done()),
        (3, "redis".to_owned(), 2, 7, done()),
    ];
    assert_eq!(noted, expected);
    // A row of `repair` is kept for 90 days. The first run after this time deletes it.
    sqlx::query("UPDATE repair SET repaired_at = NOW(6) - INTERVAL 91 DAY WHERE target_id = 1")
        .execute(&world.pool)
        .await
        .unwrap();
    assert_eq!(world.report(&["reconcile"])["repaired"], 0);
    assert_eq!(world.count("SELECT COUNT(*) FROM repair").await, 3);
    world.redis_ends_as(&model, daemon).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_run_whose_time_is_over_is_resumed_where_it_ended() {
    let pages = "[reconcile]\npage_targets = 10\npause_ms = 400";
    let (world, daemon, model) = settled("run_time", 100, pages).await;
    for id in [5, 95] {
        drift(&world, target(id), 3).await;
    }
    let first = world.report(&["reconcile", "--run-time", "2s"]);
    assert_eq!(first["ended"], "time-over", "{first}");
    let checked = first["checked"].as_u64().unwrap();
    assert!((10..100).contains(&checked), "{first}");
    assert_eq!(first["repaired"], 1, "{first}");
    let second = world.report(&["reconcile", "--resume"]);
    assert_eq!(second["checked"].as_u64().unwrap() + checked, 100, "{first} {second}");
    assert_eq!((&second["ended"], &second["repaired"]), (&"done".into(), &1.into()), "{second}");
    assert!(second["resumed_run"].is_u64(), "{second}");
    // The second run has reached its end, so the third run starts at the first target.
    let third = world.report(&["reconcile", "--resume"]);
    assert_eq!((&third["checked"], &third["resumed_run"]), (&100.into(), &serde_json::Value::Null), "{third}");
    world.redis_ends_as(&model, daemon).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_run_killed_at_any_page_is_resumed_and_misses_nothing() {
    let pages = "[reconcile]\npage_targets = 10\npause_ms = 100";
    let (world, daemon, model) = settled("resume_killed", 100, pages).await;
    for id in 60..=100 {
        drift(&world, target(id), if id % 2 == 0 { 1 } else { 2 }).await;
    }
    let mut run = world.command().args(["reconcile", "--force", "--yes"]).spawn().unwrap();
    eventually("some pages are compared", || async {
        world
            .count("SELECT COUNT(*) FROM job_run WHERE mode = 'full' AND checkpoint IS NOT NULL AND outcome IS NULL")
            .await
            == 1
    })
    .await;
    run.kill().unwrap();
    run.wait().unwrap();
    // The lease of the killed run would end later. The test ends it now, so that the next run can start.
    sqlx::query("UPDATE job_lock SET lease_until = NOW(6) WHERE job = 'reconcile'").execute(&world.pool).await.unwrap();
    let resumed = world.report(&["reconcile", "--resume", "--force", "--yes"]);
    assert!(resumed["resumed_run"].is_u64(), "{resumed}");
    assert!(resumed["checked"].as_u64().unwrap() < 100, "{resumed}");
    world.redis_ends_as(&model, daemon).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_run_waits_while_a_partition_has_much_to_do() {
    let (world, daemon, model) = settled("paced", 5, &as_api("[reconcile]\nqueue_depth_max = 10")).await;
    drift(&world, target(2), 1).await;
    assert!(daemon.stop().success());
    let client = world.api_server();
    let mut model = model;
    for user in 100..120 {
        model.apply(&event_of(client.like(target(1), UserId(user), &[]).await.unwrap()));
    }
    let log = tempfile::NamedTempFile::new().unwrap();
    let mut run = world
        .command()
        .arg("reconcile")
        .stderr(log.reopen().unwrap())
        .stdout(std::process::Stdio::null())
        .spawn()
        .unwrap();
    eventually("the run logs the reason of its wait", || async {
        std::fs::read_to_string(log.path()).unwrap().contains(".events.0 has 20 messages, above the limit of 10")
    })
    .await;
    let _daemon = world.daemon();
    let ended = tokio::task::spawn_blocking(move || run.wait().unwrap()).await.unwrap();
    assert!(ended.success());
    world.drained(&world.publisher().await).await;
    world.assert_equals(&model).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_daemon_loads_what_redis_has_lost_within_seconds() {
    let (world, first, model) = settled("lookout", 50, "").await;
    assert!(first.stop().success());
    let daemon = world.consuming_with(&[("TALLYD__RECONCILE__WATCH_EVERY", "1s")]).await;
    lose(&world).await;
    daemon.logged("redis-lost").await;
    daemon.logged("job-ended").await;
    world.assert_redis_equals(&model).await;
    // The test deletes a single bucket, as an eviction does.
    let key = world.cache.keys.counters("video", world.cache.keys.bucket(target(7)));
    let _: i64 = redis::cmd("DEL").arg(&key).query_async(&mut world.redis().await).await.unwrap();
    eventually("the bucket is loaded again", || async {
        let state: Option<String> =
            redis::cmd("HGET").arg(&key).arg("_").query_async(&mut world.redis().await).await.unwrap();
        state.is_some_and(|state| !state.starts_with('~'))
    })
    .await;
    world.redis_ends_as(&model, daemon).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_target_that_changes_all_the_time_is_repaired_by_changed_runs() {
    let (world, _daemon, _) = settled("always_changing", 3, "").await;
    let client = std::sync::Arc::new(world.api_server());
    assert_eq!(world.report(&["reconcile", "--changed"])["drifted"], 0);
    let stop = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
    let clicker = tokio::spawn({
        let (client, stop) = (std::sync::Arc::clone(&client), std::sync::Arc::clone(&stop));
        async move {
            for user in 100.. {
                if stop.load(std::sync::atomic::Ordering::Relaxed) {
                    return;
                }
                client.like(target(1), UserId(user), &[]).await.unwrap();
            }
        }
    });
    let key = world.cache.keys.counters("video", world.cache.keys.bucket(target(1)));
    let script = "return redis.call('HSET', KEYS[1], ARGV[1], redis.call('HGET', KEYS[1], ARGV[1]) + 4)";
    let mut redis = world.redis().await;
    let _: i64 = redis::Script::new(script).key(key).arg(1).invoke_async(&mut redis).await.unwrap();
    let report = world.report(&["reconcile", "--changed"]);
    assert_eq!((&report["repaired"], &report["drift_sum"]), (&1.into(), &4.into()), "{report}");
    stop.store(true, std::sync::atomic::Ordering::Relaxed);
    clicker.await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn likes_of_many_targets_that_have_no_counter_are_counted() {
    let (world, _daemon, mut model) = settled("uncounted", 3, "").await;
    // The test inserts like records of targets that have no counters. A run can't keep so many targets in memory
    // together with a page.
    let rows: Vec<String> = (0..11_000).map(|id| format!("(1,{},7,0,'2026-01-01')", 100 + id)).collect();
    let sql =
        format!("INSERT INTO like_record (kind, target_id, user_id, is_del, update_at) VALUES {}", rows.join(","));
    sqlx::raw_sql(sqlx::AssertSqlSafe(sql)).execute(&world.pool).await.unwrap();
    let braked = world.tallyd(&["reconcile"]);
    assert_eq!(braked.status.code(), Some(1), "{}", stdout(&braked));
    let report = world.report(&["reconcile", "--force", "--yes"]);
    assert_eq!((&report["counters_off"], &report["repaired"]), (&11_000.into(), &0.into()), "{report}");
    world.outbox_added().await;
    let again = world.report(&["reconcile"]);
    assert_eq!((&again["counters_off"], &again["exact"]), (&0.into(), &11_003.into()), "{again}");
    for id in 0..11_000 {
        model.apply(&tallyd_core::event::LikeEvent {
            target: target(100 + id),
            user: UserId(7),
            at: tallyd_core::model::Micros(1_767_225_600_000_000),
            liked: true,
        });
    }
    world.assert_equals(&model).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_run_that_ends_in_the_first_of_two_kinds_is_resumed_there() {
    let settings = "[reconcile]\npage_targets = 10\npause_ms = 100\n[kinds]\nvideo = 1\npost = 2";
    let (world, daemon, model) = settled("two_kinds", 60, settings).await;
    drift(&world, target(55), 3).await;
    let first = world.report(&["reconcile", "--run-time", "300ms"]);
    assert_eq!(first["ended"], "time-over", "{first}");
    let second = world.report(&["reconcile", "--resume"]);
    let checked = |report: &serde_json::Value| report["checked"].as_u64().unwrap();
    assert_eq!((checked(&first) + checked(&second), &second["repaired"]), (60, &1.into()), "{first} {second}");
    world.redis_ends_as(&model, daemon).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dry_run_on_a_lost_redis_says_that_it_is_lost() {
    let (world, _daemon, _) = settled("lost_dry", 3, "").await;
    lose(&world).await;
    let output = world.tallyd(&["reconcile", "--dry-run"]);
    assert_eq!(output.status.code(), Some(2), "{}", stderr(&output));
    assert!(stdout(&output).contains("3 unknown"), "{}", stdout(&output));
}
