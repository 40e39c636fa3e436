//! The daemon continues on healthy nodes while another node fails or joins.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tallyd_core::model::{Target, UserId};
use tallyd_redis::keys::KindNames;

use super::common::{World, as_api, target};
use super::moving::begin_to_move_to;
use super::nodes::{MASTERS, Nodes};

/// The value of `[redis] timeout_ms` in these tests.
const TIMEOUT: Duration = Duration::from_secs(2);

const SETTINGS: &str = "timeout_ms = 2000\n";

/// Returns the key of a target's counter.
fn key(world: &World, target: Target) -> String {
    world.cache.keys.counters("video", world.cache.keys.bucket(target))
}

/// Checks the targets from `id` upwards. Returns the first target whose counter is on this node.
async fn target_on(nodes: &Nodes, world: &World, place: usize, id: u64) -> Target {
    for id in id.. {
        if nodes.place_of(&key(world, target(id))).await == place {
            return target(id);
        }
    }
    unreachable!()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_frozen_master_delays_no_command_for_the_others() {
    let nodes = Nodes::start().await;
    let world = World::new("cluster_frozen", &as_api(&nodes.settings(SETTINGS))).await;
    let client = Arc::new(nodes.api_server(&world));
    let mut targets = Vec::new();
    for place in 0..MASTERS {
        targets.push(target_on(&nodes, &world, place, 1).await);
        client.count(targets[place], UserId(1), true, &[]).await.unwrap();
    }
    let moved = target_on(&nodes, &world, 0, 5_000).await;
    let (slot, to) = (nodes.slot_of(&key(&world, moved)).await.to_string(), nodes.id(2).await);
    nodes.signal(1, "STOP");
    let frozen = tokio::spawn({
        let (client, target) = (Arc::clone(&client), targets[1]);
        async move { client.count(target, UserId(2), true, &[]).await }
    });
    // The test moves a hash slot between the other nodes. So Redis redirects a command, and the client reads again
    // which node has which slot.
    for place in [2, 0] {
        nodes.cluster(place, &["SETSLOT", &slot, "NODE", &to]).await;
    }
    let others = [moved, targets[0], targets[2]];
    let began = Instant::now();
    let mut slowest = Duration::ZERO;
    for user in (3..).take_while(|_| began.elapsed() < 2 * TIMEOUT) {
        for target in others {
            let at = Instant::now();
            client.count(target, UserId(user), true, &[]).await.unwrap();
            slowest = slowest.max(at.elapsed());
        }
    }
    assert!(slowest < TIMEOUT / 2, "{slowest:?}");
    assert!(frozen.await.unwrap().is_err());
    nodes.signal(1, "CONT");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_like_follows_its_slot_to_a_node_that_had_none() {
    let mut nodes = Nodes::start().await;
    let world = World::new("cluster_grows", &as_api(&nodes.settings(SETTINGS))).await;
    let (client, target) = (nodes.api_server(&world), target_on(&nodes, &world, 0, 1).await);
    client.count(target, UserId(1), true, &[]).await.unwrap();
    let place = nodes.add().await;
    nodes.meet(place).await;
    nodes.is_whole().await;
    let slot = begin_to_move_to(&nodes, &key(&world, target), 0, place).await;
    let keys: Vec<String> = redis::from_redis_value(nodes.cluster(0, &["GETKEYSINSLOT", &slot, "100"]).await).unwrap();
    for key in keys {
        nodes.migrate(0, place, &key).await;
    }
    let asked = nodes.errors(0, "ASK").await;
    client.count(target, UserId(2), true, &[]).await.unwrap();
    assert!(nodes.errors(0, "ASK").await > asked);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dead_master_fails_every_question_to_all_masters() {
    let mut nodes = Nodes::start().await;
    let world = World::new("cluster_partly", &nodes.settings(SETTINGS)).await;
    let (cache, names) = (&world.cache, KindNames::new(&world.config.kinds));
    let target = target_on(&nodes, &world, 1, 1).await;
    cache.ping().await.unwrap();
    nodes.kill(1);
    for _ in 0..5 {
        // When the client reads again which node has which slot, the answer can lack the dead node.
        assert!(cache.read(&names, &[tallyd_core::model::Metric(1)], &[target]).await.is_err());
        assert!(cache.ping().await.is_err() && cache.now().await.is_err() && cache.data_set().await.is_err());
    }
}
