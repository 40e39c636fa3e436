//! A fence message passes through the queues of all maps in use, even if the configuration of its sender lacks a map.

use tallyd_core::event::encode_count;
use tallyd_core::model::TargetId;

use super::{Site, event, now_ms, settings};
use crate::common::{eventually, stderr};

/// With these settings API servers count views, so a reconcile needs a fence message.
fn with_views(settings: &str) -> String {
    format!("{settings}[[rule]]\nmetric = \"view\"\nwriter = \"api\"\n[reconcile]\nfence_max = \"5s\"\n")
}

#[tokio::test(flavor = "multi_thread")]
async fn a_fence_waits_for_a_map_that_its_configuration_lacks() {
    let mut site = Site::new("map_fence", "ms").await;
    // This map converts only likes. API servers count views with tallyd's scripts, and these scripts do not see views
    // that come through a map.
    let with_map: String = settings(&site.exchange, "ms")
        .lines()
        .filter(|line| !["metric = { c", "delta", "event_id"].iter().any(|it| line.starts_with(it)))
        .map(|line| line.replace(", VIEW = \"count\"", "") + "\n")
        .collect();
    let (with_map, without) = (with_views(&with_map), with_views(with_map.split("[[map]]").next().unwrap()));
    site.world.set(&with_map);
    let daemon = site.daemon().await;
    let view = encode_count(TargetId(1), ("video", "view"), 1, tallyd_base::runtime::clock::now(), "a", None);
    site.publisher.publish(&site.world.broker.exchange(), "1", &view).await.unwrap();
    eventually("the view is written", || async { site.world.count("SELECT COUNT(*) FROM counter").await == 1 }).await;
    // This run loads Redis now. Otherwise a later run in this test would have to load Redis, and would wait forever for
    // its own fence message.
    let output = site.world.tallyd(&["reconcile", "--full"]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    assert!(daemon.stop().success());
    site.publish(&event("LIKE", 42, 7, now_ms())).await;
    // The map's queue has no consumer, and the new configuration has no such map.
    site.world.set(&without);
    let output = site.world.tallyd(&["reconcile", "--full"]);
    let said = format!("{} has 1 messages and no consumer", site.queue());
    assert!(output.status.code() == Some(75) && stderr(&output).contains(&said), "{}", stderr(&output));
    // The daemon's configuration has the map, but the command's configuration does not.
    site.world.set(&with_map);
    let daemon = site.world.daemon();
    daemon.logged("this daemon now writes map site").await;
    site.world.set(&without);
    let output = site.world.tallyd(&["reconcile", "--full"]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let passed = "SELECT COUNT(*) FROM partition_fence WHERE `partition` IN (0, 60007)";
    assert_eq!(site.world.count(passed).await, 2, "the fence must pass both queues");
    assert!(daemon.stop().success());
    site.close().await;
}
