//! Two reconcile runs compete. The first run is frozen until its lease has ended. Then the second run starts, and the
//! first run resumes.

use std::process::Output;

use super::stage::{Stage, assert_numbers, repair};
use crate::common::{drift, stderr, stdout, target};

/// The first run is frozen at `point`, and a second run repairs the drifts that the first run has found. Then the first
/// run resumes and ends. `noted` has the outcomes that the first run's rows must have in the end.
async fn overtaken_at(name: &str, point: &str, noted: &[Option<&str>]) -> Output {
    let mut stage = Stage::new(name, "").await;
    drift(&stage.world, target(1), 3).await;
    let first = stage.paused(&["--full"], &[point]).await;
    stage.end_lease().await;
    stage.like(1, 50).await;
    assert_numbers(&stage.world.report(&["reconcile"]), &[("drifted", 1), ("drift_sum", 3), ("repaired", 1)]);
    stage.like(1, 51).await;
    stage.applied(1).await;
    let before = stage.everything().await;
    first.resume();
    let output = first.ended().await;
    let after = stage.everything().await;
    assert_eq!((after.0, after.1), (before.0, before.1));
    let mut expected: Vec<_> = noted.iter().map(|outcome| repair(1, -3, *outcome)).collect();
    expected.push(repair(1, -3, Some("done")));
    assert_eq!(after.2, expected);
    stage.close().await;
    output
}

#[tokio::test(flavor = "multi_thread")]
async fn a_run_that_wakes_up_before_its_first_look_after_a_takeover_changes_nothing() {
    let output = overtaken_at("rival_sampled", "reconcile:sampled", &[]).await;
    assert_eq!(output.status.code(), Some(75), "{}", stderr(&output));
    assert!(stderr(&output).contains("another run has taken over"), "{}", stderr(&output));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_run_that_wakes_up_with_agreed_drifts_after_a_takeover_changes_nothing() {
    let output = overtaken_at("rival_agreed", "reconcile:agreed", &[]).await;
    assert!(!output.status.success(), "{}{}", stdout(&output), stderr(&output));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_run_that_wakes_up_between_note_and_repair_after_a_takeover_changes_nothing() {
    // The first run wrote its row to MySQL before the second run took over. So MySQL did not stop the repair of the
    // first run, and Redis must reject it.
    let output = overtaken_at("rival_noted", "reconcile:noted", &[Some("stale")]).await;
    let report = serde_json::from_slice(&output.stdout).unwrap();
    assert_numbers(&report, &[("drifted", 1), ("repaired", 0), ("left", 1)]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_run_that_wakes_up_while_it_loads_after_a_takeover_adds_nothing() {
    let mut stage = Stage::new("rival_loading", "").await;
    let mut redis = stage.world.redis().await;
    let key = stage.world.cache.keys.counters("video", stage.world.cache.keys.bucket(target(1)));
    let _: i64 = redis::cmd("DEL").arg(&key).query_async(&mut redis).await.unwrap();
    let first = stage.paused(&["--full"], &["reconcile:loading"]).await;
    stage.end_lease().await;
    stage.like(1, 50).await;
    assert_numbers(&stage.world.report(&["reconcile"]), &[("buckets_loaded", 1), ("drifted", 0)]);
    stage.like(1, 51).await;
    stage.applied(1).await;
    let before = stage.everything().await;
    first.resume();
    let output = first.ended().await;
    assert!(!output.status.success(), "{}{}", stdout(&output), stderr(&output));
    assert_eq!(stage.everything().await, before);
    stage.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_run_that_wakes_up_at_the_end_of_its_load_does_not_end_the_load_of_its_successor() {
    let stage = Stage::new("rival_loaded", "").await;
    let mut redis = stage.world.redis().await;
    let key = stage.world.cache.keys.counters("video", stage.world.cache.keys.bucket(target(1)));
    let _: i64 = redis::cmd("DEL").arg(&key).query_async(&mut redis).await.unwrap();
    let first = stage.paused(&["--full"], &["reconcile:loaded"]).await;
    stage.end_lease().await;
    let second = stage.paused(&["--full"], &["reconcile:loaded"]).await;
    let state: String = redis::cmd("HGET").arg(&key).arg("_").query_async(&mut redis).await.unwrap();
    assert!(state.starts_with('~'), "{state}: the second run must be loading the bucket");
    first.resume();
    let output = first.ended().await;
    assert!(!output.status.success(), "{}{}", stdout(&output), stderr(&output));
    let after: String = redis::cmd("HGET").arg(&key).arg("_").query_async(&mut redis).await.unwrap();
    assert_eq!(after, state);
    assert_numbers(&second.report().await, &[("buckets_loaded", 1), ("drifted", 0), ("unknown", 0)]);
    stage.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_run_that_wakes_up_before_it_corrects_a_counter_after_a_takeover_changes_nothing() {
    let mut stage = Stage::new("rival_correcting", "").await;
    sqlx::query("UPDATE counter SET value = value + 7 WHERE target_id = 1").execute(&stage.world.pool).await.unwrap();
    let first = stage.paused(&["--full"], &["reconcile:correcting"]).await;
    stage.end_lease().await;
    stage.like(1, 50).await;
    assert_numbers(&stage.world.report(&["reconcile"]), &[("counters_off", 1), ("drifted", 0)]);
    let before = stage.everything().await;
    assert_eq!(before.2, [(1, "mysql".to_owned(), -7, Some("done".to_owned()))]);
    first.resume();
    let output = first.ended().await;
    assert!(!output.status.success(), "{}{}", stdout(&output), stderr(&output));
    assert_eq!(stage.everything().await, before);
    stage.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_repair_of_a_frozen_run_is_refused_once_its_lease_is_over() {
    let mut stage = Stage::new("rival_deadline", "").await;
    let counted = stage.count(1, 50).await;
    let first = stage.paused(&["--full"], &["reconcile:noted"]).await;
    stage.publish(&counted).await;
    stage.applied(1).await;
    // The second run starts after the lease has ended. The second run finds the right count, so it does not change the
    // bucket.
    stage.world.no_run().await;
    assert_numbers(&stage.world.reconcile("--full").await, &[("drifted", 0), ("exact", 5)]);
    first.resume();
    first.ended().await;
    assert_eq!(stage.world.redis_counters().await[&target(1)], 4);
    let repairs = stage.repairs().await;
    assert!(matches!(repairs.as_slice(), [(1, _, -1, outcome)] if outcome.as_deref() != Some("done")), "{repairs:?}");
    stage.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn of_two_runs_with_one_number_only_the_later_one_writes() {
    let stage = Stage::new("rival_number", "").await;
    drift(&stage.world, target(1), 3).await;
    let first = stage.paused(&["--full"], &["reconcile:agreed"]).await;
    let run: u64 = sqlx::query_scalar("SELECT MAX(run) FROM job_run").fetch_one(&stage.world.pool).await.unwrap();
    // After a failover to a MySQL server without the newest commits, the second run gets the same run id as the first
    // run.
    for sql in [
        format!("DELETE FROM job_run WHERE run = {run}"),
        format!("ALTER TABLE job_run AUTO_INCREMENT = {run}"),
        "DELETE FROM partition_fence".to_owned(),
    ] {
        sqlx::raw_sql(sqlx::AssertSqlSafe(sql)).execute(&stage.world.pool).await.unwrap();
    }
    stage.end_lease().await;
    let second = stage.paused(&["--full"], &["reconcile:agreed"]).await;
    let again: u64 = sqlx::query_scalar("SELECT MAX(run) FROM job_run").fetch_one(&stage.world.pool).await.unwrap();
    assert_eq!(again, run);
    first.resume();
    let output = first.ended().await;
    assert!(!output.status.success(), "{}{}", stdout(&output), stderr(&output));
    assert_eq!(stage.repairs().await, [], "the first run must not have noted a repair");
    assert_numbers(&second.report().await, &[("drifted", 1), ("repaired", 1)]);
    assert_eq!(stage.repairs().await, [repair(1, -3, Some("done"))]);
    stage.close().await;
}
