//! During a reconcile run, Redis is flushed or loses its newest data.

use super::stage::{Stage, assert_numbers, repair};
use crate::common::private::Private;
use crate::common::{drift, eventually, lose, stderr, target};

#[tokio::test(flavor = "multi_thread")]
async fn a_flush_between_look_and_repair_adds_nothing_and_the_next_run_loads_exactly() {
    let mut stage = Stage::new("lost_repair", "").await;
    drift(&stage.world, target(1), 2).await;
    drift(&stage.world, target(2), -2).await;
    let run = stage.paused(&["--full"], &["reconcile:noted"]).await;
    lose(&stage.world).await;
    stage.like(1, 50).await;
    stage.like(2, 50).await;
    let report = run.report().await;
    assert_numbers(&report, &[("drifted", 2), ("repaired", 0), ("left", 2)]);
    assert_eq!(stage.repairs().await, [repair(1, -2, Some("stale")), repair(2, 2, Some("stale"))]);
    let redis = stage.world.redis_counters().await;
    assert_eq!(
        (redis.len(), redis[&target(1)], redis[&target(2)]),
        (2, 1, 1),
        "Redis must have only the likes that were made after the flush"
    );
    let buckets = i64::from(stage.world.cache.keys.buckets());
    assert_numbers(&stage.world.report(&["reconcile"]), &[("buckets_loaded", buckets), ("drifted", 0)]);
    stage.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_flush_between_two_looks_makes_the_targets_unknown() {
    let mut stage = Stage::new("lost_look", "").await;
    drift(&stage.world, target(1), 2).await;
    let run = stage.paused(&["--full"], &["reconcile:looked"]).await;
    lose(&stage.world).await;
    stage.like(1, 50).await;
    assert_numbers(&run.report().await, &[("unknown", 1), ("drifted", 0), ("repaired", 0)]);
    assert_eq!(stage.repairs().await, []);
    assert_numbers(&stage.world.report(&["reconcile"]), &[("drifted", 0), ("unknown", 0)]);
    stage.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_flush_while_what_was_lost_is_added_leaves_the_buckets_to_the_next_run() {
    let mut stage = Stage::new("lost_load", "").await;
    lose(&stage.world).await;
    stage.like(1, 50).await;
    let run = stage.paused(&["--changed"], &["reconcile:loading"]).await;
    lose(&stage.world).await;
    stage.like(1, 51).await;
    let report = run.report().await;
    assert_numbers(&report, &[("buckets_loaded", 0), ("drifted", 0)]);
    assert_eq!(
        stage.world.redis_counters().await.values().sum::<i64>(),
        1,
        "Redis must have only the like that was made after the second flush"
    );
    let buckets = i64::from(stage.world.cache.keys.buckets());
    assert_numbers(&stage.world.report(&["reconcile", "--changed"]), &[("buckets_loaded", buckets), ("drifted", 0)]);
    stage.close().await;
}

/// Makes `server` a copy of `other`, without closing the connections to `server`.
async fn become_copy_of(server: &Private, other: &Private) {
    let mut redis = server.connect().await;
    let replica_of = |arguments: [String; 2]| redis::cmd("REPLICAOF").arg(&arguments).to_owned();
    let port = other.url().trim_end_matches('/').rsplit(':').next().unwrap().to_owned();
    let () = replica_of(["127.0.0.1".to_owned(), port]).query_async(&mut redis).await.unwrap();
    eventually("the copy is complete", || async {
        let asked = redis::cmd("INFO").arg("replication").query_async::<String>(&mut server.connect().await).await;
        asked.is_ok_and(|info| info.contains("master_link_status:up"))
    })
    .await;
    let () = replica_of(["NO".to_owned(), "ONE".to_owned()]).query_async(&mut redis).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_drift_that_was_lost_with_the_old_master_is_not_repaired() {
    let (server, replica) = (Private::start(&[]).await, Private::start(&[]).await);
    let stage = Stage::new("lost_drift", &format!("[redis]\nurl = \"{}\"", server.url())).await;
    // The field `_` of a bucket shows the bucket's last load and last repair. At this point the master and the replica
    // have the same `_` in each bucket. An outdated replica also has the same `_`, if no run has repaired a counter
    // since.
    become_copy_of(&replica, &server).await;
    drift(&stage.world, target(1), 2).await;
    let run = stage.paused(&["--full"], &["reconcile:agreed"]).await;
    become_copy_of(&server, &replica).await;
    run.resume();
    let output = run.ended().await;
    assert_eq!(stage.world.redis_counters().await[&target(1)], 3, "it was right");
    assert_eq!(output.status.code(), Some(75), "{}", stderr(&output));
    assert!(stderr(&output).contains("Redis was restarted or failed over"), "{}", stderr(&output));
    stage.close().await;
}
