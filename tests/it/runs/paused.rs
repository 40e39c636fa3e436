//! An operator pauses and throttles reconcile runs, also while such a run is active.

use std::time::{Duration, Instant};

use super::common::{World, eventually, stderr, stdout};
use super::settled;

/// Returns true if a full run is active and has already noted its progress.
async fn is_amidst(world: &World) -> bool {
    let amidst = "SELECT COUNT(*) FROM job_run WHERE mode = 'full' AND checkpoint IS NOT NULL AND finished_at IS NULL";
    world.count(amidst).await > 0
}

fn ordered(world: &World, arguments: &[&str]) -> String {
    let output = world.tallyd(arguments);
    assert_eq!(output.status.code(), Some(0), "{arguments:?}: {}", stderr(&output));
    stdout(&output)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_run_that_is_paused_amidst_is_resumed_where_it_was() {
    let (mut world, daemon, _) = settled("paused_run", 200, "").await;
    assert!(daemon.stop().success());
    world.set("[reconcile]\npage_targets = 10\npause_ms = 300\nfull_cron = \"* * * * * *\"");
    let daemon = world.daemon();
    eventually("a full run is active", || async { is_amidst(&world).await }).await;
    ordered(&world, &["pause", "reconcile"]);
    let stopped = "SELECT COUNT(*) FROM job_run WHERE mode = 'full' AND outcome = 'stopped'";
    eventually("the run stops", || async { world.count(stopped).await == 1 }).await;
    daemon.logged("job-deferred").await;
    let refused = world.tallyd(&["reconcile", "--changed"]);
    assert_eq!(refused.status.code(), Some(75));
    assert!(stderr(&refused).contains("(run `tallyd resume reconcile` to resume)"), "{}", stderr(&refused));
    assert_eq!(world.count("SELECT COUNT(*) FROM job_run WHERE finished_at IS NULL").await, 0);
    let began = Instant::now();
    ordered(&world, &["resume", "reconcile"]);
    let resumed = "SELECT COUNT(*) FROM job_run WHERE mode = 'full' AND outcome = 'done' AND report NOT LIKE '%\"resumed_run\":null%'";
    eventually("the run is resumed and ends", || async { world.count(resumed).await > 0 }).await;
    assert!(
        began.elapsed() < Duration::from_secs(25),
        "after a pause, the run must resume without the delay that follows a failure: {:?}",
        began.elapsed()
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_running_reconcile_obeys_a_throttle_and_its_end() {
    let (world, _daemon, _) = settled("throttled", 60, "").await;
    ordered(&world, &["admin", "throttle", "reconcile", "--targets-per-second", "20", "--for", "10m"]);
    let began = Instant::now();
    assert_eq!(world.report(&["reconcile"])["checked"], 60);
    assert!(began.elapsed() >= Duration::from_secs(2), "60 targets took {:?}", began.elapsed());

    let said = ordered(&world, &["admin", "throttle", "reconcile", "--targets-per-second", "1"]);
    assert!(said.contains("reconcile is throttled to 1 targets a second until"), "{said}");
    let mut run = world.command().arg("reconcile").stderr(std::process::Stdio::null()).spawn().unwrap();
    eventually("the run is active", || async { is_amidst(&world).await }).await;
    assert_eq!(ordered(&world, &["admin", "throttle", "reconcile", "--off"]), "reconcile is no longer throttled\n");
    let began = Instant::now();
    eventually("the run ends", || async { !is_amidst(&world).await }).await;
    assert!(began.elapsed() < Duration::from_secs(20), "{:?}", began.elapsed());
    assert!(run.wait().unwrap().success());
    // If an operator pauses a run that a command has started, the command reports the pause, and the run can be
    // resumed.
    ordered(&world, &["admin", "throttle", "reconcile", "--targets-per-second", "1"]);
    let run = world.command().arg("reconcile").stderr(std::process::Stdio::piped()).spawn().unwrap();
    eventually("the run is active", || async { is_amidst(&world).await }).await;
    ordered(&world, &["pause", "reconcile"]);
    let output = run.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(75), "{}", stderr(&output));
    assert!(stderr(&output).contains("reconcile is paused until"), "{}", stderr(&output));
    for wrong in
        [&["pause", "reconcile", "--for", "8d"][..], &["admin", "throttle", "reconcile"], &["pause", "recount"]]
    {
        assert_eq!(world.tallyd(wrong).status.code(), Some(64), "{wrong:?}");
    }
}
