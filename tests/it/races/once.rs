//! A repair is added once, even if Redis runs its command late.

use std::os::unix::process::ExitStatusExt;

use super::stage::{Run, Stage, assert_numbers, repair};
use crate::common::proxy::Proxy;
use crate::common::{drift, eventually, stderr, target};

/// The answer of Redis to a repair that it rejects, which is an empty list.
const REFUSED: &[u8] = b"*0\r\n";

/// The answer of Redis to a repair that changes the counter of one target.
const ADDED: &[u8] = b"*1\r\n:1\r\n";

/// Starts a run that finds a drift of 3. The run fails, because a proxy holds back its repair command.
async fn with_a_repair_on_the_way(name: &str) -> (Stage, Proxy) {
    let mut stage = Stage::new(name, "").await;
    // An earlier repair loads the script into Redis. If Redis did not have the script, the delayed command would fail.
    drift(&stage.world, target(1), 1).await;
    assert_numbers(&stage.world.report(&["reconcile"]), &[("repaired", 1)]);
    drift(&stage.world, target(1), 3).await;
    let (proxy, url) = Proxy::before(stage.world.config.redis.url.expose()).await;
    let environment = [
        ("TALLYD__REDIS__URL", url.as_str()),
        ("TALLYD__REDIS__TIMEOUT_MS", "500"),
        ("TALLYD_PAUSE_POINT", "reconcile:noted"),
    ];
    let mut run = Run::start(&stage.world, &["--full"], &environment);
    run.paused().await;
    proxy.hold();
    run.resume();
    let output = run.ended().await;
    assert_eq!(output.status.code(), Some(75), "{}", stderr(&output));
    assert!(stderr(&output).contains("repair counters"), "{}", stderr(&output));
    assert_eq!(stage.repairs().await, [repair(1, -1, Some("done")), repair(1, -3, None)]);
    assert_eq!(stage.world.redis_counters().await[&target(1)], 6, "Redis must not have added the repair yet");
    stage.like(1, 50).await;
    (stage, proxy)
}

async fn runs_late(proxy: &Proxy, answer: &[u8]) {
    proxy.release();
    eventually("Redis answers the held command", || async { !proxy.answers().is_empty() }).await;
    assert_eq!(String::from_utf8_lossy(&proxy.answers()), String::from_utf8_lossy(answer));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_repair_that_runs_after_a_later_one_is_refused() {
    let (mut stage, proxy) = with_a_repair_on_the_way("once_after").await;
    assert_numbers(&stage.world.report(&["reconcile"]), &[("drifted", 1), ("drift_sum", 3), ("repaired", 1)]);
    stage.like(1, 51).await;
    runs_late(&proxy, REFUSED).await;
    assert_eq!(stage.repairs().await[1..], [repair(1, -3, None), repair(1, -3, Some("done"))]);
    stage.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_repair_that_runs_late_makes_the_one_that_was_measured_before_it_stale() {
    let (mut stage, proxy) = with_a_repair_on_the_way("once_before").await;
    let run = stage.paused(&["--full"], &["reconcile:noted"]).await;
    runs_late(&proxy, ADDED).await;
    stage.like(1, 51).await;
    let report = run.report().await;
    assert_numbers(&report, &[("drifted", 1), ("repaired", 0), ("left", 1)]);
    assert_eq!(stage.repairs().await[1..], [repair(1, -3, None), repair(1, -3, Some("stale"))]);
    stage.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_repair_that_runs_late_before_the_next_sample_is_seen_by_it() {
    let (stage, proxy) = with_a_repair_on_the_way("once_seen").await;
    runs_late(&proxy, ADDED).await;
    assert_numbers(&stage.world.report(&["reconcile"]), &[("drifted", 0), ("transient", 0)]);
    stage.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_repair_that_runs_late_between_two_looks_is_not_added_twice() {
    let (stage, proxy) = with_a_repair_on_the_way("once_between").await;
    let run = stage.paused(&["--full"], &["reconcile:looked"]).await;
    runs_late(&proxy, ADDED).await;
    assert_numbers(&run.report().await, &[("drifted", 0), ("transient", 1), ("repaired", 0)]);
    stage.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_run_killed_on_either_side_of_its_repair_is_made_up_for_once() {
    let mut stage = Stage::new("once_killed", "").await;
    for (point, left, user) in [("reconcile:noted", 1, 50), ("reconcile:repaired", 0, 51)] {
        drift(&stage.world, target(1), 3).await;
        drift(&stage.world, target(2), -1).await;
        let run = Run::start(&stage.world, &["--full"], &[("TALLYD_FAULT_POINT", point)]);
        let ended = run.ended().await;
        assert!(ended.status.signal().is_some(), "{point}: {}", stderr(&ended));
        let noted = stage.repairs().await;
        assert_eq!(noted[noted.len() - 2..], [repair(1, -3, None), repair(2, 1, None)], "{point}");
        stage.like(1, user).await;
        stage.end_lease().await;
        let report = stage.world.report(&["reconcile"]);
        assert_numbers(&report, &[("drifted", 2 * left), ("drift_sum", 4 * left), ("repaired", 2 * left)]);
    }
    stage.close().await;
}
