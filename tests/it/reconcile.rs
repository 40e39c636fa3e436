//! Runs `tallyd reconcile`, which compares the counters in Redis and MySQL while the daemon writes.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test ends at its first failure")]

use std::sync::Arc;

use crate::common;
use common::clicker::Clicker;
use common::site::Site;
use common::{Model, World, as_api, drift, event_of, eventually, lose, stderr, stdout, target};
use tallyd_core::model::{Micros, UserId};

/// The number of tasks that run at the same time. The users of each task like a few busy targets and many quiet
/// targets.
const CLICKERS: u64 = 16;
const HOT: u64 = 3;
const COLD: u64 = 2_000;

/// The settings that all these tasks have in common.
const EACH: Clicker = Clicker { number: 0, users: 20, hot: HOT, cold: COLD };

fn number(report: &serde_json::Value, name: &str) -> u64 {
    report[name].as_u64().unwrap_or_else(|| panic!("{name} in {report}"))
}

#[tokio::test(flavor = "multi_thread")]
async fn without_drift_nothing_is_repaired_under_live_load_on_hot_targets() {
    let world = World::new("no_drift", "").await;
    let publisher = world.publisher().await;
    let client = Arc::new(world.api_server());
    let daemon = world.daemon();
    assert_eq!(world.report(&["reconcile"])["drifted"], 0);
    let site = Site::of(&client, CLICKERS, EACH);
    site.clicked(1_000).await;
    for mode in ["--full", "--changed", "--full", "--changed"] {
        let report = world.report(&["reconcile", mode]);
        for name in ["drifted", "repaired", "counters_off", "busy"] {
            assert_eq!(number(&report, name), 0, "{name} in {report}");
        }
        assert!(number(&report, "checked") > HOT, "{report}");
    }
    let model = site.close().await;
    world.ends_as(&model, &publisher, daemon).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn every_injected_drift_is_repaired_under_live_load_and_nothing_else() {
    let world = World::new("drift", "").await;
    let publisher = world.publisher().await;
    let client = Arc::new(world.api_server());
    let _daemon = world.daemon();
    assert_eq!(world.report(&["reconcile"])["drifted"], 0);
    let mut quiet = Vec::new();
    for id in 100..103 {
        quiet.push(event_of(client.like(target(id), UserId(u64::from(u32::MAX)), &[]).await.unwrap()));
    }
    let site = Site::of(&client, CLICKERS, EACH);
    site.clicked(2_000).await;
    // If a target's first like arrives during a run, the run leaves the target to the next run.
    eventually("MySQL counts the targets of all drifts", || async {
        world.count("SELECT COUNT(*) FROM counter WHERE target_id IN (1, 2, 100, 101, 102)").await == 5
    })
    .await;
    let mut repaired = 0;
    for round in 0..3 {
        // These drifts stand for double counts, lost publishes and manual changes in Redis. The drifts are on busy
        // targets, on quiet targets, and on targets that MySQL does not know.
        let drifts = [(target(1), 5), (target(2), -3), (target(100 + round), 1), (target(777_000 + round), 2)];
        for (target, by) in drifts {
            drift(&world, target, by).await;
        }
        site.clicked(500).await;
        let report = world.report(&["reconcile", "--full"]);
        assert_eq!(
            (number(&report, "drifted"), number(&report, "drift_sum"), number(&report, "left")),
            (4, 11, 0),
            "{report}"
        );
        repaired += number(&report, "repaired");
    }
    assert_eq!(repaired, 12);
    let mut model = site.close().await;
    quiet.iter().for_each(|event| model.apply(event));
    world.drained(&publisher).await;
    world.assert_equals(&model).await;
    let report = world.report(&["reconcile", "--full"]);
    assert_eq!(report["drifted"], 0, "{report}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_flushed_redis_is_unknown_until_it_is_rebuilt_exactly_under_load() {
    let world = World::new("flushed", "").await;
    let publisher = world.publisher().await;
    let client = Arc::new(world.api_server());
    let _daemon = world.daemon();
    let loaded = world.report(&["reconcile"]);
    assert_eq!(number(&loaded, "buckets_loaded"), u64::from(world.cache.keys.buckets()));
    let site = Site::of(&client, CLICKERS, EACH);
    site.clicked(2_000).await;
    eventually("more than 200 counters exist", || async { world.count("SELECT COUNT(*) FROM counter").await > 200 })
        .await;
    // Only what Redis had at its loss must be loaded later.
    world.outbox_added().await;
    lose(&world).await;
    site.clicked(500).await;
    let one = world.report(&["reconcile", "--target", "video:1"]);
    assert_eq!((&one["unknown"], &one["drifted"]), (&1.into(), &0.into()), "{one}");
    // In any mode, a run first loads the data that Redis has lost.
    let report = world.report(&["reconcile", "--changed"]);
    assert_eq!(number(&report, "buckets_loaded"), number(&loaded, "buckets_loaded"), "{report}");
    assert!(number(&report, "counters_loaded") > 100, "{report}");
    let model = site.close().await;
    world.drained(&publisher).await;
    world.assert_equals(&model).await;
    assert_eq!(world.report(&["reconcile"])["drifted"], 0);
}

/// Ten users like each of twenty targets, and MySQL and Redis have these likes.
async fn settled(name: &str, settings: &str) -> (World, common::Daemon, Model) {
    let world = World::new(name, settings).await;
    let (daemon, model) = world.liked(20, 10).await;
    (world, daemon, model)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dry_run_finds_drift_and_changes_nothing() {
    let (world, _daemon, _) = settled("dry_run", "").await;
    assert_eq!(world.tallyd(&["reconcile", "--dry-run"]).status.code(), Some(0));
    drift(&world, target(3), 2).await;
    drift(&world, target(888), 1).await;
    let before = world.redis_counters().await;
    let output = world.tallyd(&["reconcile", "--dry-run"]);
    assert_eq!(output.status.code(), Some(2), "{}", stderr(&output));
    let text = stdout(&output);
    assert!(text.contains("2 drifted by 3 in all, 0 repaired"), "{text}");
    assert!(text.contains("video:3: drifted, Redis 12, MySQL 10"), "{text}");
    assert!(text.contains("video:888: drifted, Redis 1, MySQL 0"), "{text}");
    assert_eq!(world.redis_counters().await, before);
}

#[tokio::test(flavor = "multi_thread")]
async fn one_target_is_repaired_alone() {
    let (world, daemon, model) = settled("one_target", "").await;
    drift(&world, target(3), -4).await;
    drift(&world, target(4), 1).await;
    let output = world.tallyd(&["reconcile", "--target", "video:3", "--target", "video:5"]);
    let text = stdout(&output);
    assert!(output.status.success(), "{}", stderr(&output));
    assert!(text.contains("video:3: repaired, Redis 6, MySQL 10, added +4"), "{text}");
    assert!(text.contains("video:5: exact, Redis 10, MySQL 10"), "{text}");
    assert!(
        text.contains("Redis was wrong at two cuts, and the difference was added; 10 like records; 10 in counter"),
        "{text}"
    );
    assert_eq!(world.redis_counters().await[&target(4)], 11, "the run must not repair this target");
    assert!(world.tallyd(&["--reconcile-once"]).status.success());
    world.redis_ends_as(&model, daemon).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_changed_run_looks_at_what_changed_since_the_last_one() {
    let (world, daemon, model) = settled("changed", "[reconcile]\noverlap = \"0s\"").await;
    let newest = model.rows.values().map(|(at, _)| at.0).max().unwrap();
    // A run checks the likes since the last run, and also the likes in the `publish_grace` before the last run. So the
    // test waits until all likes are older than `publish_grace`.
    let cut = Micros(newest).after(world.config.reconcile.publish_grace.0);
    eventually("the likes are older than publish_grace", || async { tallyd_base::runtime::clock::now() > cut }).await;
    let first = world.report(&["reconcile", "--changed"]);
    assert_eq!((number(&first, "checked"), number(&first, "exact")), (20, 20), "{first}");
    assert_eq!(number(&world.report(&["reconcile", "--changed"]), "checked"), 0, "no target has changed since");
    let client = world.api_server();
    let publisher = world.broker.connect_publisher("test").await.unwrap();
    let mut model = model;
    model.apply(&event_of(client.like(target(7), UserId(99), &[]).await.unwrap()));
    drift(&world, target(7), 3).await;
    world.drained(&publisher).await;
    let second = world.report(&["reconcile", "--changed"]);
    assert_eq!((number(&second, "checked"), number(&second, "repaired")), (1, 1), "{second}");
    world.redis_ends_as(&model, daemon).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_counter_that_differs_from_its_rows_is_corrected() {
    let (world, _daemon, model) = settled("counter_off", "").await;
    sqlx::query("UPDATE counter SET value = value + 7 WHERE target_id = 5").execute(&world.pool).await.unwrap();
    sqlx::query("DELETE FROM counter WHERE target_id = 6").execute(&world.pool).await.unwrap();
    let output = world.tallyd(&["reconcile", "--dry-run", "--format", "json"]);
    assert_eq!(output.status.code(), Some(2));
    assert_eq!(serde_json::from_slice::<serde_json::Value>(&output.stdout).unwrap()["counters_off"], 2);
    assert_eq!(world.report(&["reconcile"])["counters_off"], 2);
    world.assert_equals(&model).await;
    let again = world.report(&["reconcile"]);
    assert_eq!((&again["counters_off"], &again["drifted"]), (&0.into(), &0.into()), "{again}");
}

#[tokio::test(flavor = "multi_thread")]
async fn without_a_daemon_it_works_on_an_empty_queue_and_says_why_not_on_a_full_one() {
    let (world, daemon, model) = settled("no_daemon", &as_api("[reconcile]\nfence_max = \"1s\"")).await;
    assert!(daemon.stop().success());
    drift(&world, target(1), 1).await;
    let report = world.report(&["reconcile"]);
    assert_eq!((&report["repaired"], &report["left"]), (&1.into(), &0.into()), "{report}");
    world.assert_redis_equals(&model).await;
    let client = world.api_server();
    client.like(target(1), UserId(500), &[]).await.unwrap();
    let output = world.tallyd(&["reconcile"]);
    assert_eq!(output.status.code(), Some(75), "{}", stderr(&output));
    let text = stderr(&output);
    assert!(text.contains(".events.0 has 1 messages and no consumer"), "{text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn likes_that_were_deleted_by_hand_go_from_redis_too() {
    let (world, _daemon, _) = settled("deleted", "").await;
    sqlx::query("DELETE FROM like_record WHERE target_id = 9").execute(&world.pool).await.unwrap();
    let report = world.report(&["reconcile"]);
    assert_eq!((&report["counters_off"], &report["repaired"]), (&1.into(), &0.into()), "{report}");
    world.outbox_added().await;
    assert_eq!(world.redis_counters().await.get(&target(9)), None);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_daemon_makes_up_for_a_missed_run_at_its_start() {
    // The schedule has one run per year. So if the daemon starts a run in this test, the reason is a run that the
    // daemon missed before its own start.
    let (world, daemon, model) = settled("catch_up", "").await;
    assert!(daemon.stop().success());
    sqlx::query("DELETE FROM job_run").execute(&world.pool).await.unwrap();
    drift(&world, target(2), 5).await;
    let daemon = world.daemon_with(&[("TALLYD__RECONCILE__FULL_CRON", "0 0 0 1 1 *")]);
    eventually("the run is done", || async {
        world.count("SELECT COUNT(*) FROM job_run WHERE mode = 'full' AND outcome = 'done'").await == 1
    })
    .await;
    world.redis_ends_as(&model, daemon).await;
    // At the next start the daemon has nothing to catch up on, because this run is newer than the last scheduled time.
    let daemon = world.consuming_with(&[("TALLYD__RECONCILE__FULL_CRON", "0 0 0 1 1 *")]).await;
    assert!(daemon.stop().success());
    assert_eq!(world.count("SELECT COUNT(*) FROM job_run").await, 1);
}
