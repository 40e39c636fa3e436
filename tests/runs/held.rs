//! What one bad thing must not hold: a lost bucket, a foreign key, a lease.

use sqlx::AssertSqlSafe;

use super::common::{assert_redis_equals, drift, eventually, lose, stderr, target};
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

#[tokio::test(flavor = "multi_thread")]
async fn a_lease_and_a_start_from_the_future_hold_no_run() {
    let (world, daemon, _) = settled("future_lease", 3, "").await;
    // As MySQL's clock leaves them that was ahead by a day.
    let ahead = "UPDATE job_lock SET lease_until = NOW(6) + INTERVAL 1 DAY";
    sqlx::query(ahead).execute(&world.pool).await.unwrap();
    let output = world.tallyd(&["reconcile"]);
    assert!(output.status.success(), "{}", stderr(&output));
    let given_back = "SELECT COUNT(*) FROM job_lock WHERE lease_until > NOW(6) - INTERVAL 1 DAY";
    assert_eq!(world.count(given_back).await, 0, "a lock that is given back is free by any clock");
    let ahead = "UPDATE job_run SET started_at = NOW(6) + INTERVAL 1 DAY, finished_at = NOW(6) + INTERVAL 1 DAY";
    sqlx::query(ahead).execute(&world.pool).await.unwrap();
    assert!(daemon.stop().success());
    let mut world = world;
    world.set("[reconcile]\nfull_cron = \"* * * * * *\"");
    let daemon = world.daemon();
    let due = "SELECT COUNT(*) FROM job_run WHERE mode = 'full' AND outcome = 'done' AND started_at < NOW(6)";
    eventually("a full run is due", || async { world.count(due).await > 0 }).await;
    assert!(daemon.stop().success());
    world.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn old_runs_are_forgotten_but_the_last_one_of_each_outcome() {
    let (world, daemon, _) = settled("old_runs", 3, "").await;
    for _ in 0..3 {
        assert_eq!(world.report(&["reconcile", "--changed"])["ended"], "done");
    }
    let full = "SELECT COUNT(*) FROM job_run WHERE mode = 'full'";
    assert_eq!(world.count(full).await, 1);
    let old = "UPDATE job_run SET finished_at = NOW(6) - INTERVAL 91 DAY";
    sqlx::query(old).execute(&world.pool).await.unwrap();
    let failed = "UPDATE job_run SET outcome = 'failed' WHERE mode = 'changed' ORDER BY run LIMIT 1";
    sqlx::query(failed).execute(&world.pool).await.unwrap();
    assert_eq!(world.report(&["reconcile", "--changed"])["ended"], "done");
    let outcomes: Vec<(String, i64)> = sqlx::query_as(
        "SELECT outcome, COUNT(*) FROM job_run WHERE mode = 'changed' GROUP BY outcome ORDER BY outcome",
    )
    .fetch_all(&world.pool)
    .await
    .unwrap();
    assert_eq!(outcomes, [("done".to_owned(), 1), ("failed".to_owned(), 1)]);
    assert_eq!(world.count(full).await, 1, "of another mode");
    assert!(daemon.stop().success());
    world.close().await;
}
