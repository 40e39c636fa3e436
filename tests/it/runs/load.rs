//! Redis loses its data, and a run loads Redis again while events are queued.

use std::process::Stdio;
use std::time::{Duration, Instant};

use tallyd_core::model::UserId;

use super::common::{as_api, event_of, lose, target};
use super::settled;

#[tokio::test(flavor = "multi_thread")]
async fn a_load_waits_for_its_fence_longer_than_other_runs_do() {
    let (world, daemon, mut model) = settled("patient_load", 20, &as_api("[reconcile]\nfence_max = \"2s\"")).await;
    assert!(daemon.stop().success());
    lose(&world).await;
    // No daemon runs now. So nothing writes this like to MySQL until the test starts the daemon again.
    let client = world.api_server();
    model.apply(&event_of(client.like(target(3), UserId(9), &[]).await.unwrap()));
    let mut run =
        world.command().args(["reconcile", "--changed"]).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let began = Instant::now();
    while began.elapsed() < Duration::from_secs(5) {
        assert_eq!(run.try_wait().unwrap(), None, "the run must wait for its fence message");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let daemon = world.daemon();
    assert!(run.wait().unwrap().success());
    world.redis_ends_as(&model, daemon).await;
}
