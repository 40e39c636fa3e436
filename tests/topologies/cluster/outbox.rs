//! Tests counters that only the daemon changes, on several masters of a Redis Cluster.

use tallyd_core::event::encode_count;
use tallyd_core::model::{CounterKey, Metric, TargetId, UserId};
use tallyd_redis::keys::KindNames;

use super::common::{World, eventually, target};
use super::nodes::{MASTERS, Nodes};

const VIEW: Metric = Metric(3);
const TARGETS: u64 = 60;

/// Makes `count` views, for one target after another.
fn views(from: u64, count: u64) -> Vec<(UserId, Vec<u8>)> {
    let view = |number: u64| {
        let id = TargetId(1 + number % TARGETS);
        (
            UserId(number),
            encode_count(id, ("video", "view"), 1, tallyd::runtime::clock::now(), &format!("view-{number}"), None),
        )
    };
    (from..from + count).map(view).collect()
}

async fn in_redis(world: &World) -> Vec<i64> {
    let numbers: Vec<CounterKey> = (1..=TARGETS).map(|id| (target(id), VIEW)).collect();
    let samples = world.cache.sample(&KindNames::new(&world.config.kinds), &numbers).await.unwrap();
    samples.into_iter().map(|sample| sample.unwrap().value).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn what_the_daemon_counts_is_added_once_though_masters_sleep() {
    let nodes = Nodes::start().await;
    let world =
        World::new("cluster_outbox", &nodes.settings("timeout_ms = 300\n[metrics]\nlike = 1\nview = 3\n")).await;
    let daemon = world.daemon();
    daemon.logged("\"consuming\"").await;
    let publisher = world.publisher().await;
    let mut sent = 0;
    for place in 0..MASTERS {
        let (mut other, mut sleep) = (nodes.connect(place).await, redis::cmd("DEBUG"));
        sleep.arg("SLEEP").arg(2);
        let asleep = tokio::spawn(async move { sleep.query_async::<()>(&mut other).await });
        world.publish(&publisher, &views(sent, 3 * TARGETS)).await;
        sent += 3 * TARGETS;
        // The daemon writes to MySQL even while a node of Redis is frozen.
        world.drained(&publisher).await;
        asleep.await.unwrap().unwrap();
    }
    let expected = vec![i64::try_from(sent / TARGETS).unwrap(); usize::try_from(TARGETS).unwrap()];
    eventually("all views are added", || async {
        let rest = "SELECT COUNT(*) FROM partition_owner AS p JOIN outbox_state AS s USING (`partition`) \
                    WHERE p.outbox = s.applied";
        world.count(rest).await == 1
    })
    .await;
    assert_eq!(in_redis(&world).await, expected);
    assert!(daemon.stop().success());
    world.close().await;
}
