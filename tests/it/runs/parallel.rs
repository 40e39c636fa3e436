//! A full run recounts two ranges in parallel while MySQL has few threads.

use std::process::Stdio;
use std::time::Duration;

use futures_util::future::join_all;
use tallyd_core::model::UserId;

use super::settled;
use crate::common::{World, drift, eventually, grouping_client_of, target};

#[tokio::test(flavor = "multi_thread")]
async fn a_full_run_recounts_two_ranges_in_parallel_and_misses_nothing() {
    // Without a limit of threads, the other tests on this server do not matter.
    let settings = "[reconcile]\npage_targets = 10\nthreads_running_max = 0";
    let (world, daemon, model) = settled("parallel", 60, settings).await;
    for id in [5, 15, 25, 35, 45, 55] {
        drift(&world, target(id), 3).await;
    }
    // While the table is locked, recounts wait.
    let mut locker = world.pool.acquire().await.unwrap();
    sqlx::raw_sql("LOCK TABLES like_record WRITE").execute(&mut *locker).await.unwrap();
    let run = world
        .command()
        .args(["reconcile", "--force", "--yes", "--format", "json"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    eventually("two recounts wait", || async {
        let recounts = "SELECT COUNT(*) FROM information_schema.PROCESSLIST \
                        WHERE DB = DATABASE() AND INFO LIKE 'SELECT target_id, COUNT(IF(is_del%'";
        world.count(recounts).await == 2
    })
    .await;
    locker.close().await.unwrap();
    let output = run.wait_with_output().unwrap();
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&report["checked"], &report["repaired"]), (&60.into(), &6.into()), "{report}");
    world.redis_ends_as(&model, daemon).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_batch_tells_in_mysql_whether_more_messages_wait() {
    let world = World::new("behind", "[consumer]\nbatch_events_max = 5\n").await;
    let (publisher, client) = (world.publisher().await, grouping_client_of(&world.api, Duration::ZERO));
    let like = async |user| client.like(target(1), UserId(user)).await.unwrap();
    let daemon = world.daemon();
    let is_behind = "SELECT COUNT(*) FROM partition_owner WHERE is_behind";
    eventually("the consumer is behind", async || {
        join_all((1..=500).map(like)).await;
        world.count(is_behind).await == 1
    })
    .await;
    world.drained(&publisher).await;
    eventually("the consumer is no longer behind", async || {
        like(501).await;
        world.count(is_behind).await == 0
    })
    .await;
    assert!(daemon.stop().success());
}
