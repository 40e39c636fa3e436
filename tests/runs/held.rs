//! What one bad thing must not hold: a lost bucket, a foreign key.

use sqlx::AssertSqlSafe;

use super::common::{assert_redis_equals, drift, eventually, lose, target};
use super::settled;

#[tokio::test(flavor = "multi_thread")]
async fn a_full_run_of_the_schedule_ends_where_redis_is_lost() {
    let settings = "[reconcile]\npage_targets = 10\npause_ms = 300\nfull_cron = \"* * * * * *\"";
    let (world, daemon, model) = settled("gives_way", 300, "[reconcile]\npage_targets = 1000").await;
    assert!(daemon.stop().success());
    let mut world = world;
    world.set(settings);
    let daemon = world.daemon();
    let runs = "SELECT COUNT(*) FROM job_run WHERE owner LIKE '%:%' AND mode = 'full' AND checkpoint IS NOT NULL AND finished_at IS NULL";
    eventually("a full run is at it", || async { world.count(runs).await == 1 }).await;
    let run: u64 = sqlx::query_scalar("SELECT MAX(run) FROM job_run").fetch_one(&world.pool).await.unwrap();
    lose(&world).await;
    let ended = || async move {
        let sql = format!("SELECT outcome, report FROM job_run WHERE run = {run} AND finished_at IS NOT NULL");
        sqlx::query_as(AssertSqlSafe(sql))
    };
    let outcome: std::cell::RefCell<Option<(String, String)>> = std::cell::RefCell::default();
    eventually("the run has ended", || async {
        let found = ended().await.fetch_optional(&world.pool).await.unwrap();
        outcome.replace(found);
        outcome.borrow().is_some()
    })
    .await;
    let (outcome, report) = outcome.into_inner().unwrap();
    assert_eq!(outcome, "stopped", "{report}");
    assert!(report.contains("Redis lost counters"), "{report}");
    let later = "SELECT COUNT(*) FROM job_run WHERE mode = 'full' AND outcome = 'done' AND report NOT LIKE '%\"resumed_run\":null%'";
    eventually("it is resumed to its end", || async { world.count(later).await > 0 }).await;
    assert_redis_equals(&world, &model).await;
    assert!(daemon.stop().success());
    world.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_key_that_is_no_bucket_is_named_and_stops_nothing() {
    let (world, daemon, model) = settled("foreign", 40, "").await;
    let mut redis = world.redis().await;
    let (first, second) = (world.cache.keys.bucket(target(1)), world.cache.keys.bucket(target(2)));
    assert_ne!(first, second);
    let key = |bucket| world.cache.keys.counters("video", bucket);
    let _: i64 = redis::cmd("DEL").arg(key(first)).query_async(&mut redis).await.unwrap();
    let () = redis::cmd("SET").arg(key(first)).arg("x").query_async(&mut redis).await.unwrap();
    let _: i64 = redis::cmd("HSET").arg(key(second)).arg("_").arg("x").query_async(&mut redis).await.unwrap();
    let other = (3..=40).find(|id| ![first, second].contains(&world.cache.keys.bucket(target(*id)))).unwrap();
    drift(&world, target(other), 3).await;
    for mode in ["--changed", "--full"] {
        let report = world.report(&["reconcile", mode]);
        assert_eq!((&report["ended"], &report["repaired"]), (&"done".into(), &i64::from(mode == "--changed").into()));
        let mut foreign = vec![key(first), key(second)];
        foreign.sort();
        let mut named: Vec<String> = serde_json::from_value(report["foreign"].clone()).unwrap();
        named.sort();
        assert_eq!(named, foreign, "{report}");
    }
    // Once they are deleted they are lost, as any bucket.
    let _: i64 = redis::cmd("DEL").arg(key(first)).arg(key(second)).query_async(&mut redis).await.unwrap();
    assert_eq!(world.report(&["reconcile"])["buckets_loaded"], 2);
    assert_redis_equals(&world, &model).await;
    assert!(daemon.stop().success());
    world.close().await;
}
