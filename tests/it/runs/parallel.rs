//! A full run recounts two ranges in parallel while MySQL has few threads.

use std::process::Stdio;

use super::settled;
use crate::common::{drift, eventually, target};

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
