//! One address that leads to several shards, as managed services have it. Here a node of a Cluster has all slots, and a
//! proxy says that the node belongs to no Cluster. The node refuses a script if its keys are in several slots.

use super::common::private::Private;
use super::common::proxy::Proxy;
use super::common::{World, eventually, stderr, stdout};
use super::{Counts, METRICS, assert_exact};

async fn sharded() -> (Private, Proxy, String) {
    let node = Private::start(&["--cluster-enabled", "yes"]).await;
    let mut slots = redis::cmd("CLUSTER");
    let () = slots.arg("ADDSLOTSRANGE").arg(0).arg(16_383).query_async(&mut node.connect().await).await.unwrap();
    eventually("the node serves its slots", || async {
        redis::cmd("EXISTS").arg("a").query_async::<i64>(&mut node.connect().await).await.is_ok()
    })
    .await;
    let (proxy, url) = Proxy::before(&node.url()).await;
    proxy.replace(b"cluster_enabled:1", b"cluster_enabled:0");
    (node, proxy, url)
}

fn assert_checks(world: &World, code: i32, said: &str) {
    let check = world.tallyd(&["config", "check"]);
    let text = stdout(&check) + &stderr(&check);
    assert!(text.contains(said), "{text}");
    assert_eq!(check.status.code(), Some(code), "{text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn shards_behind_one_address_get_one_bucket_with_each_script() {
    let (_node, _proxy, url) = sharded().await;
    let world = World::new("outbox_sharded", &format!("[redis]\nurl = \"{url}\"\n{METRICS}")).await;
    let publisher = world.publisher().await;
    let mut counts = Counts::of(100);
    world.publish(&publisher, &counts.some(500)).await;
    let _daemon = world.daemon();
    assert_exact(&world, &publisher, &counts).await;
    assert_eq!(world.tallyd(&["reconcile"]).status.code(), Some(0));
    assert_checks(&world, 0, "ok       redis-scripts         several shards are behind one address");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_layout_with_many_keys_is_refused_where_shards_share_an_address() {
    let (_node, proxy, url) = sharded().await;
    // Alibaba Cloud has its own text.
    let text = b"-CROSSSLOT Keys in request don't hash to the same slot";
    proxy.replace(text, b"-ERR eval/evalsha command keys    must be in same slot");
    let settings = format!("[redis]\nurl = \"{url}\"\nlayout = \"entity\"\n");
    let world = World::new("plain_sharded", &settings).await;
    assert_checks(&world, 78, "which is only possible with the layout packed");
}
