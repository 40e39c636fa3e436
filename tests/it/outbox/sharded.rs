//! One address that leads to several shards, as managed services have it. Here a node of a Cluster has all slots, and a
//! proxy says that the node belongs to no Cluster. The node refuses a script if its keys are in several slots.

use super::common::private::Private;
use super::common::proxy::Proxy;
use super::common::{World, eventually, stdout};
use super::{Counts, METRICS, assert_exact};

#[tokio::test(flavor = "multi_thread")]
async fn shards_behind_one_address_get_one_bucket_with_each_script() {
    let node = Private::start(&["--cluster-enabled", "yes"]).await;
    let mut slots = redis::cmd("CLUSTER");
    let () = slots.arg("ADDSLOTSRANGE").arg(0).arg(16_383).query_async(&mut node.connect().await).await.unwrap();
    eventually("the node serves its slots", || async {
        redis::cmd("EXISTS").arg("a").query_async::<i64>(&mut node.connect().await).await.is_ok()
    })
    .await;
    let (proxy, url) = Proxy::before(&node.url()).await;
    proxy.replace(b"cluster_enabled:1", b"cluster_enabled:0");
    let mut world = World::new("outbox_sharded", &format!("[redis]\nurl = \"{url}\"\n{METRICS}")).await;
    let publisher = world.publisher().await;
    let mut counts = Counts::of(100);
    world.publish(&publisher, &counts.some(500)).await;
    let daemon = world.daemon();
    assert_exact(&world, &publisher, &counts).await;
    let check = world.tallyd(&["config", "check"]);
    assert!(stdout(&check).contains("several shards are behind one address"), "{}", stdout(&check));
    assert_eq!(check.status.code(), Some(0));
    assert!(daemon.stop().success());
    // The node ends with the test, and needs no clean-up.
    world.config.redis.cluster = true;
    world.close().await;
}
