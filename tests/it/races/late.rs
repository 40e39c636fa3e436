//! Some events are in flight: Redis has counted these events, but MySQL does not have them yet.

use std::time::Duration;

use super::stage::{Stage, assert_numbers, repair};
use crate::common::{drift, target};

#[tokio::test(flavor = "multi_thread")]
async fn a_like_published_after_the_first_look_is_no_drift() {
    let mut stage = Stage::new("late_first", "").await;
    let counted = stage.count(1, 50).await;
    // The run reaches this point of its second pass only if its first pass has found a drift.
    let run = stage.paused(&["--full"], &["reconcile:looked"]).await;
    stage.publish(&counted).await;
    let report = run.report().await;
    assert_numbers(&report, &[("drifted", 0), ("transient", 1), ("repaired", 0)]);
    assert_eq!(stage.repairs().await, []);
    stage.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_like_published_after_the_second_sample_is_no_drift() {
    let mut stage = Stage::new("late_second", "").await;
    let counted = stage.count(1, 50).await;
    let run = stage.paused(&["--full"], &["reconcile:sampled-again"]).await;
    stage.publish(&counted).await;
    let report = run.report().await;
    assert_numbers(&report, &[("drifted", 0), ("transient", 1), ("repaired", 0)]);
    assert_eq!(stage.repairs().await, []);
    stage.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn two_late_likes_each_seen_by_one_look_are_no_drift() {
    let mut stage = Stage::new("late_two", "").await;
    let first = stage.count(1, 50).await;
    let mut run = stage.paused(&["--full"], &["reconcile:looked", "reconcile:sampled-again"]).await;
    // The first pass has not sampled this second event, but the second pass does. If the second pass did not wait for
    // this event, the pass would find the same drift as the first pass.
    stage.publish(&first).await;
    let second = stage.count(1, 51).await;
    run.next().await;
    stage.publish(&second).await;
    let report = run.report().await;
    assert_numbers(&report, &[("drifted", 0), ("transient", 1), ("repaired", 0)]);
    assert_eq!(stage.repairs().await, []);
    stage.close().await;
}

/// A `publish_grace` that is longer than any delay on a slow machine.
const LONG_GRACE: &str = "[reconcile]\npublish_grace = \"2s\"";

#[tokio::test(flavor = "multi_thread")]
async fn a_like_published_within_twice_the_grace_after_the_first_look_is_waited_for() {
    let mut stage = Stage::new("late_waited", LONG_GRACE).await;
    let counted = stage.count(1, 50).await;
    let run = stage.paused(&["--full"], &["reconcile:looked"]).await;
    run.resume();
    tokio::time::sleep(Duration::from_millis(2_500)).await;
    stage.publish(&counted).await;
    assert_numbers(&run.report().await, &[("drifted", 0), ("transient", 1), ("repaired", 0)]);
    stage.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_like_published_within_the_grace_after_the_second_sample_is_waited_for() {
    let mut stage = Stage::new("late_fenced", "[reconcile]\npublish_grace = \"4s\"").await;
    let first = stage.count(1, 50).await;
    let mut run = stage.paused(&["--full"], &["reconcile:looked", "reconcile:sampled-again"]).await;
    stage.publish(&first).await;
    let second = stage.count(1, 51).await;
    run.next().await;
    run.resume();
    // Three quarters of the grace.
    tokio::time::sleep(Duration::from_secs(3)).await;
    stage.publish(&second).await;
    assert_numbers(&run.report().await, &[("drifted", 0), ("transient", 1), ("repaired", 0)]);
    stage.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_like_published_after_twice_the_grace_is_repaired_and_the_repair_is_undone() {
    let mut stage = Stage::new("late_twice", "").await;
    let counted = stage.count(1, 50).await;
    assert_numbers(&stage.world.report(&["reconcile"]), &[("drifted", 1), ("repaired", 1)]);
    assert_eq!(stage.world.redis_counters().await[&target(1)], 3, "the fourth like is not counted");
    stage.publish(&counted).await;
    stage.drained().await;
    // The event's `at` is within `overlap` before this run, so a run of any mode checks the event's target.
    let report = stage.world.report(&["reconcile", "--changed"]);
    assert_numbers(&report, &[("drifted", 1), ("repaired", 1)]);
    assert_eq!(stage.repairs().await, [repair(1, -1, Some("done")), repair(1, 1, Some("done"))]);
    stage.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_like_between_sample_and_fence_makes_its_target_busy_and_is_judged_right() {
    let mut stage = Stage::new("late_busy", "").await;
    let mut run = stage.paused(&["--full"], &["reconcile:sampled", "reconcile:looked"]).await;
    stage.like(1, 50).await;
    // The run checks the target in a second pass, although its first pass can't have found a drift.
    run.next().await;
    let report = run.report().await;
    assert_numbers(&report, &[("drifted", 0), ("transient", 0), ("busy", 0), ("repaired", 0)]);
    assert_numbers(&report, &[("exact", 5)]);
    assert_eq!(stage.repairs().await, []);
    stage.close().await;
}

/// The pause points of a run that follow a sample of Redis. The first point is in the first pass, and the second point
/// is in the second pass. The run reaches the other points while it watches a target.
const SAMPLES: [&str; 5] = [
    "reconcile:sampled",
    "reconcile:sampled-again",
    "reconcile:sampled-watched",
    "reconcile:sampled-again",
    "reconcile:sampled-watched",
];

#[tokio::test(flavor = "multi_thread")]
async fn likes_between_every_sample_and_its_fence_are_judged_right_by_the_log() {
    let mut stage = Stage::new("late_watched", "").await;
    let mut run = stage.paused(&["--full"], &SAMPLES[..3]).await;
    for user in [50, 51, 52] {
        run.paused().await;
        stage.like(1, user).await;
        stage.unlike(1, 2).await;
        stage.like(1, 2).await;
        if user < 52 {
            run.resume();
        }
    }
    let report = run.report().await;
    assert_numbers(&report, &[("drifted", 0), ("transient", 0), ("busy", 1), ("exact", 5), ("repaired", 0)]);
    assert_eq!(stage.repairs().await, []);
    stage.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_drift_under_likes_between_every_sample_and_its_fence_is_repaired_exactly() {
    let mut stage = Stage::new("late_drift", "").await;
    drift(&stage.world, target(1), 4).await;
    let mut run = stage.paused(&["--full"], &SAMPLES).await;
    for user in 50..55 {
        run.paused().await;
        stage.like(1, user).await;
        match user % 2 {
            0 => stage.unlike(1, 3).await,
            _ => stage.like(1, 3).await,
        }
        if user < 54 {
            run.resume();
        }
    }
    let report = run.report().await;
    assert_numbers(&report, &[("drifted", 1), ("drift_sum", 4), ("busy", 1), ("repaired", 1)]);
    assert_eq!(stage.repairs().await, [repair(1, -4, Some("done"))]);
    stage.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn likes_between_the_second_look_and_the_repair_stay() {
    let mut stage = Stage::new("late_stay", "").await;
    drift(&stage.world, target(1), 2).await;
    drift(&stage.world, target(2), -2).await;
    let mut run = stage.paused(&["--full"], &["reconcile:agreed", "reconcile:noted"]).await;
    stage.like(1, 50).await;
    stage.unlike(2, 1).await;
    run.next().await;
    stage.like(1, 51).await;
    stage.like(2, 51).await;
    stage.unlike(1, 50).await;
    let report = run.report().await;
    assert_numbers(&report, &[("drifted", 2), ("repaired", 2), ("left", 0)]);
    assert_eq!(stage.repairs().await, [repair(1, -2, Some("done")), repair(2, 2, Some("done"))]);
    stage.close().await;
}
