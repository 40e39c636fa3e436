//! A reconcile waits until a consumer passes its fence message. The consumer crashes, and another consumer takes over.

use super::stage::{Stage, assert_numbers, repair};
use crate::common::{drift, target};

/// With SIGKILL, kills the daemon that owns the partition. Another daemon then takes over the partition.
async fn fail_over(stage: &mut Stage) {
    let next = stage.world.daemon();
    std::mem::replace(&mut stage.daemon, next).kill();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_consumer_that_dies_with_the_fence_in_its_queue_delays_the_run_and_nothing_else() {
    let mut stage = Stage::new("failover_fence", "").await;
    drift(&stage.world, target(1), 2).await;
    drift(&stage.world, target(2), -1).await;
    let points = ["reconcile:sampled", "fence:sent", "reconcile:looked", "fence:sent"];
    let mut run = stage.paused(&["--full"], &points).await;
    for user in [50, 60] {
        run.paused().await;
        // From here on the frozen daemon still owns the partition, but receives no messages.
        stage.daemon.logged("consuming").await;
        stage.daemon.signal("STOP");
        // Users like targets with right and with wrong counters, before and after the run publishes its fence message.
        // All these likes come between the sample of the first pass and the sample of the second pass.
        for id in 1..=3 {
            stage.like(id, user).await;
        }
        run.next().await;
        for id in 1..=3 {
            stage.like(id, user + 1).await;
        }
        fail_over(&mut stage).await;
        if user == 50 {
            run.resume();
        }
    }
    let report = run.report().await;
    assert_numbers(&report, &[("drifted", 2), ("drift_sum", 3), ("repaired", 2), ("left", 0)]);
    assert_eq!(stage.repairs().await, [repair(1, -2, Some("done")), repair(2, 1, Some("done"))]);
    stage.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_consumer_that_dies_while_targets_are_watched_leads_to_no_wrong_repair() {
    let mut stage = Stage::new("failover_watch", "").await;
    drift(&stage.world, target(1), 2).await;
    let samples = ["reconcile:sampled", "reconcile:sampled-again", "reconcile:sampled-watched"];
    let mut run = stage.paused(&["--full"], &[samples[0], samples[1], samples[2], samples[1], samples[2]]).await;
    for user in 50..55 {
        run.paused().await;
        stage.like(1, user).await;
        stage.like(2, user).await;
        if user >= 52 {
            stage.daemon.signal("STOP");
            stage.like(1, user + 100).await;
            fail_over(&mut stage).await;
            stage.like(2, user + 100).await;
        }
        if user < 54 {
            run.resume();
        }
    }
    let report = run.report().await;
    assert_numbers(&report, &[("drifted", 1), ("drift_sum", 2), ("repaired", 1), ("busy", 2)]);
    assert_eq!(stage.repairs().await, [repair(1, -2, Some("done"))]);
    stage.close().await;
}
