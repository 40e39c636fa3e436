//! Tests problems that must not stop other work: lost buckets, keys of another program, wrong times of a lease, and old
//! rows of other runs.

use std::time::Duration;

use sqlx::AssertSqlSafe;
use tallyd_core::model::{Metric, Micros};
use tallyd_mysql::Store;
use tallyd_mysql::changed::{ChangedBefore, Span};

use super::common::{World, drift, eventually, lose, stderr, stdout, target};
use super::settled;

#[tokio::test(flavor = "multi_thread")]
async fn a_full_run_of_the_schedule_ends_where_redis_is_lost() {
    let settings = "[reconcile]\npage_targets = 10\npause_ms = 300\nfull_cron = \"* * * * * *\"";
    let (world, daemon, model) = settled("gives_way", 300, "[reconcile]\npage_targets = 1000").await;
    assert!(daemon.stop().success());
    let mut world = world.hurried();
    world.set(settings);
    let daemon = world.daemon();
    let runs = "SELECT COUNT(*) FROM job_run WHERE owner LIKE '%:%' AND mode = 'full' AND checkpoint IS NOT NULL AND finished_at IS NULL";
    eventually("a full run is active", || async { world.count(runs).await == 1 }).await;
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
    eventually("the run is resumed and ends", || async { world.count(later).await > 0 }).await;
    world.redis_ends_as(&model, daemon).await;
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
    // When these keys are deleted, the run treats their buckets like all other lost buckets.
    let _: i64 = redis::cmd("DEL").arg(key(first)).arg(key(second)).query_async(&mut redis).await.unwrap();
    assert_eq!(world.report(&["reconcile"])["buckets_loaded"], 2);
    world.redis_ends_as(&model, daemon).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lease_and_a_start_from_the_future_hold_no_run() {
    let (world, daemon, _) = settled("future_lease", 3, "").await;
    // If MySQL's clock is a day ahead when a run takes the lock, the run's lease ends a day too late.
    let ahead = "UPDATE job_lock SET lease_until = NOW(6) + INTERVAL 1 DAY WHERE job = 'reconcile'";
    sqlx::query(ahead).execute(&world.pool).await.unwrap();
    let output = world.tallyd(&["reconcile"]);
    assert!(output.status.success(), "{}", stderr(&output));
    let given_back = "SELECT COUNT(*) FROM job_lock WHERE job = 'reconcile' AND lease_until > NOW(6) - INTERVAL 1 DAY";
    assert_eq!(world.count(given_back).await, 0, "a released lock must be free, even if MySQL's clock was put back");
    let ahead = "UPDATE job_run SET started_at = NOW(6) + INTERVAL 1 DAY, finished_at = NOW(6) + INTERVAL 1 DAY";
    sqlx::query(ahead).execute(&world.pool).await.unwrap();
    assert!(daemon.stop().success());
    let mut world = world;
    world.set("[reconcile]\nfull_cron = \"* * * * * *\"");
    let _daemon = world.daemon();
    let due = "SELECT COUNT(*) FROM job_run WHERE mode = 'full' AND outcome = 'done' AND started_at < NOW(6)";
    eventually("a full run is due", || async { world.count(due).await > 0 }).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn old_runs_are_forgotten_but_the_last_one_of_each_outcome() {
    let (world, _daemon, _) = settled("old_runs", 3, "").await;
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
    assert_eq!(world.count(full).await, 1, "the job must not delete the full run's row");
}

#[tokio::test]
async fn a_page_of_changed_targets_reads_no_row_of_the_pages_before_it() {
    const ROWS: u64 = 20_000;
    let world = World::new("changed_pages", "").await;
    let at = Micros(1_764_000_000_000_000);
    for from in (1..=ROWS).step_by(5_000) {
        let rows: Vec<String> =
            (from..from + 5_000).map(|id| format!("(1,{id},1,0,1,FROM_UNIXTIME(1764000000))")).collect();
        let sql =
            format!("INSERT INTO counter (kind, target_id, metric, slot, value, update_at) VALUES {}", rows.join(","));
        sqlx::raw_sql(AssertSqlSafe(sql)).execute(&world.pool).await.unwrap();
    }
    // The test uses a single connection, because MySQL counts the read rows separately for each connection.
    let store = Store::new(&world.config.mysql, 1).unwrap();
    let read = async || {
        let mut lent = store.acquire().await.unwrap();
        let counted = lent.limit("read the session's status", |connection| async move {
            let sql = "SHOW SESSION STATUS LIKE 'Handler_read_prev'";
            let (_, count): (String, String) = sqlx::query_as(sql).fetch_one(connection).await.unwrap();
            Ok(count.parse::<u64>().unwrap())
        });
        counted.await.unwrap()
    };
    let before = ChangedBefore { span: Span::of(at), number: (target(1_001), Metric(1)) };
    let counted = read().await;
    let since = at.before(Duration::from_secs(3_600));
    let page = store.changed_numbers(since, before, 500).await.unwrap();
    let ids: Vec<u64> = page.iter().map(|row| row.number.0.id.0).collect();
    assert_eq!(ids, (501..=1_000).rev().collect::<Vec<_>>());
    let rows = read().await - counted;
    assert!(rows <= 501, "{rows} rows were read for a page of 500");
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_of_an_old_watch_that_cannot_be_deleted_fail_no_run() {
    let (world, _daemon, model) = settled("old_watch", 3, "[mysql]\ntransaction_timeout_ms = 1000").await;
    drift(&world, target(2), 3).await;
    sqlx::query("INSERT INTO watched_target (watch, kind, target_id, metric) VALUES (1, 1, 1, 1)")
        .execute(&world.pool)
        .await
        .unwrap();
    let mut held = world.pool.begin().await.unwrap();
    sqlx::query("SELECT * FROM watched_target FOR UPDATE").fetch_all(&mut *held).await.unwrap();
    let report = world.report(&["reconcile", "--changed"]);
    assert_eq!((&report["ended"], &report["repaired"]), (&"done".into(), &1.into()), "{report}");
    held.rollback().await.unwrap();
    world.assert_redis_equals(&model).await;
    world.report(&["reconcile", "--changed"]);
    assert_eq!(world.count("SELECT COUNT(*) FROM watched_target").await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reload_makes_most_wrong_numbers_right_at_once() {
    let (world, _daemon, model) = settled("reload", 150, "").await;
    for id in 1..=130 {
        drift(&world, target(id), 3).await;
    }
    let braked = world.tallyd(&["reconcile"]);
    assert_eq!(braked.status.code(), Some(1), "{}", stderr(&braked));
    assert!(stdout(&braked).contains("run `tallyd reconcile --reload` instead"), "{}", stdout(&braked));
    let report = world.report(&["reconcile", "--reload"]);
    assert_eq!((&report["buckets_loaded"], &report["drifted"]), (&16.into(), &0.into()), "{report}");
    world.assert_redis_equals(&model).await;
    assert_eq!(world.tallyd(&["reconcile", "--reload", "--full"]).status.code(), Some(64));
}

#[tokio::test(flavor = "multi_thread")]
async fn buckets_that_are_evicted_are_loaded_three_times_an_hour() {
    let (world, daemon, model) = settled("evicted", 50, "").await;
    assert!(daemon.stop().success());
    let key = world.cache.keys.counters("video", world.cache.keys.bucket(target(7)));
    let evict = async || {
        let _: i64 = redis::cmd("DEL").arg(&key).query_async(&mut world.redis().await).await.unwrap();
    };
    for _ in 0..2 {
        evict().await;
        assert_eq!(world.report(&["reconcile", "--changed"])["buckets_loaded"], 1);
    }
    evict().await;
    // In the last hour there were three loads: one load of all buckets, and two loads of the evicted bucket. Three
    // loads an hour are the limit, so the daemon does not load the bucket again.
    let daemon = world.daemon_with(&[("TALLYD__RECONCILE__WATCH_EVERY", "1s")]);
    daemon.logged("redis-evicts").await;
    let put_off = "SELECT COUNT(*) FROM job_run WHERE mode = 'rebuild' AND outcome = 'stopped'";
    eventually("the run has ended", || async { world.count(put_off).await > 0 }).await;
    let is_loaded: bool = redis::cmd("HEXISTS").arg(&key).arg("_").query_async(&mut world.redis().await).await.unwrap();
    assert!(!is_loaded);
    // A run is not delayed if an operator starts it, or if Redis lost data without an eviction.
    assert_eq!(world.reconcile("--changed").await["buckets_loaded"], 1);
    world.redis_ends_as(&model, daemon).await;
}
