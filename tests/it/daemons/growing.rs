//! The number of partitions grows while users click and reconcile runs compare counters. Daemons with the old number
//! and daemons with the new number run at the same time.

use tallyd_core::event::LikeEvent;
use tallyd_core::model::UserId;
use tallyd_rabbitmq::Broker;

use crate::common::site::{Site, all_held};
use crate::common::{World, body, drift, eventually, stderr, target};

fn settings(partitions: u16) -> String {
    format!("[amqp]\npartitions = {partitions}\n[reconcile]\nfull_cron = \"* * * * * *\"\n")
}

/// Changes the number of partitions in the configuration.
fn set(world: &mut World, partitions: u16) {
    world.set(&settings(partitions));
    world.broker = Broker::new(&world.config.amqp).unwrap();
}

/// Checks that every event goes to exactly one queue. While this check runs, no daemon can run.
async fn assert_bound_once(world: &World) {
    let publisher = world.broker.connect_publisher("test").await.unwrap();
    let queued = async || {
        let mut sum = 0;
        for partition in 0..world.broker.partitions() {
            sum += world.unconsumed(&world.broker.queue(partition)).await;
        }
        sum
    };
    let before = queued().await;
    let like = |user| LikeEvent {
        target: target(9_999),
        user: UserId(user),
        at: tallyd_base::runtime::clock::now(),
        liked: true,
    };
    let bodies: Vec<_> = (1..=300).map(|user| body(&like(user))).collect();
    world.publish(&publisher, &bodies).await;
    // Each call of `queued` leaves a fence in each queue.
    let fences = u32::from(world.broker.partitions());
    assert_eq!(queued().await, before + fences + 300, "each like must be queued once");
}

#[tokio::test(flavor = "multi_thread")]
async fn partitions_grow_from_1_to_4_to_16_under_load_and_every_repair_is_right() {
    let mut world = World::new("growing", &settings(1)).await.hurried();
    world.publisher().await;
    assert_eq!(world.tallyd(&["reconcile"]).status.code(), Some(0));
    let mut daemons = vec![world.daemon(), world.daemon()];
    let site = Site::open(&world);
    site.clicked(200).await;
    let mut repairs = 0;
    for (former, partitions) in [(1_u16, 4), (4, 16)] {
        set(&mut world, partitions);
        let former = [("TALLYD__AMQP__PARTITIONS", former.to_string())];
        let former = former.each_ref().map(|(name, value)| (*name, value.as_str()));
        let new = world.daemon();
        all_held(&world).await;

        // A daemon that restarts with the old number of partitions changes nothing, and leaves the jobs to the other
        // daemons.
        daemons.remove(0).kill();
        let old = world.daemon_with(&former);
        old.logged("\"partitions-behind\"").await;
        let refused = world.command().envs(former).args(["reconcile", "--full"]).output().unwrap();
        assert_eq!(refused.status.code(), Some(78), "{}", stderr(&refused));
        let said = format!("but {partitions} partitions are in use");
        assert!(stderr(&refused).contains(&said), "{}", stderr(&refused));
        let checked = world.command().envs(former).args(["config", "check"]).output().unwrap();
        assert!(stderr(&checked).contains("error    mysql-partitions"), "{}", stderr(&checked));
        assert_eq!(checked.status.code(), Some(78), "{}", stderr(&checked));

        drift(&world, target(1), 2).await;
        drift(&world, target(350), -1).await;
        repairs += 2;
        eventually("both drifts are repaired", || async {
            world.count("SELECT COUNT(*) FROM repair WHERE outcome = 'done'").await == repairs
        })
        .await;
        site.clicked(200).await;
        assert!(old.stop().success());
        assert!(daemons.remove(0).stop().success());
        daemons.extend([new, world.daemon()]);
        site.clicked(200).await;
    }
    site.end(&world).await;
    let added: Vec<(u64, i64)> =
        sqlx::query_as("SELECT target_id, added FROM repair WHERE outcome = 'done' ORDER BY target_id")
            .fetch_all(&world.pool)
            .await
            .unwrap();
    assert_eq!(added, [(1, -2), (1, -2), (350, 1), (350, 1)], "only the two drifts are repaired");
    for daemon in daemons {
        assert!(daemon.stop().success());
    }
    // At the end, the test starts a daemon with one partition, as at the beginning. This daemon must change nothing.
    let fewer = world.consuming_with(&[("TALLYD__AMQP__PARTITIONS", "1")]).await;
    assert!(fewer.stop().success());
    assert_bound_once(&world).await;
}
