//! A fence goes through the queues of all maps in use, whatever its sender's configuration has.

use tallyd_core::event::encode_count;
use tallyd_core::model::TargetId;

use super::{Site, event, now_ms, settings};
use crate::common::{eventually, stderr};

/// API servers count views, so a reconcile needs a fence.
fn with_views(settings: &str) -> String {
    format!("{settings}[[rule]]\nmetric = \"view\"\nwriter = \"api\"\n[reconcile]\nfence_max = \"5s\"\n")
}

#[tokio::test(flavor = "multi_thread")]
async fn a_fence_waits_for_a_map_that_its_configuration_lacks() {
    let mut site = Site::new("map_fence", "ms").await;
    // A map of likes only. tallyd's scripts do not count those views.
    let with_map: String = settings(&site.exchange, "ms")
        .lines()
        .filter(|line| !["metric = { c", "delta", "event_id"].iter().any(|it| line.starts_with(it)))
        .map(|line| line.replace(", VIEW = \"count\"", "") + "\n")
        .collect();
    let (with_map, without) = (with_views(&with_map), with_views(with_map.split("[[map]]").next().unwrap()));
    site.world.set(&with_map);
    let daemon = site.world.daemon();
    eventually("the queue is bound", || async { daemon.log().matches("\"consuming\"").count() == 2 }).await;
    let view = encode_count(TargetId(1), ("video", "view"), 1, tallyd::runtime::clock::now(), "a", None);
    site.publisher.publish(&site.world.broker.exchange(), "1", &view).await.unwrap();
    eventually("the view is written", || async { site.world.count("SELECT COUNT(*) FROM counter").await == 1 }).await;
    // A run that loads Redis would wait for its fence forever.
    let output = site.world.tallyd(&["reconcile", "--full"]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    assert!(daemon.stop().success());
    site.publish(&event("LIKE", 42, 7, now_ms())).await;
    // The queue has no consumer, and this configuration does not know it.
    site.world.set(&without);
    let output = site.world.tallyd(&["reconcile", "--full"]);
    let said = format!("{} has 1 messages and no consumer", site.queue());
    assert!(output.status.code() == Some(75) && stderr(&output).contains(&said), "{}", stderr(&output));
    // A daemon with the map, and a command without it.
    site.world.set(&with_map);
    let daemon = site.world.daemon();
    daemon.logged("this daemon now writes map site").await;
    site.world.set(&without);
    let output = site.world.tallyd(&["reconcile", "--full"]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let passed = "SELECT COUNT(*) FROM partition_fence WHERE `partition` IN (0, 60007)";
    assert_eq!(site.world.count(passed).await, 2, "through both queues");
    assert!(daemon.stop().success());
    site.close().await;
}
