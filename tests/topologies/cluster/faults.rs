//! Masters of a Redis Cluster fail, and answers arrive too late.

use std::sync::Arc;

use tallyd_core::chain::Chain;
use tallyd_core::model::{Target, UserId};
use tallyd_redis::Cache;

use super::Stage;
use super::common::proxy::Proxy;
use super::common::{Model, World, as_api, eventually, target};
use super::nodes::{MASTERS, Nodes};
use crate::common::scripts::LikeError;

/// Returns for each node the targets whose counters the node has.
async fn targets_by_node(nodes: &Nodes, world: &World, count: u64) -> Vec<Vec<Target>> {
    let mut by_node = vec![Vec::new(); MASTERS];
    for id in 1..=count {
        let key = world.cache.keys.counters("video", world.cache.keys.bucket(target(id)));
        by_node[nodes.place_of(&key).await].push(target(id));
    }
    by_node
}

#[tokio::test(flavor = "multi_thread")]
async fn a_master_that_comes_back_empty_is_loaded_again_and_the_others_are_left_alone() {
    let watched = [("TALLYD__RECONCILE__WATCH_EVERY", "1s")];
    let mut stage = Stage::new("cluster_lost", &as_api(""), &watched).await;
    let mut model = Model::default();
    let by_node = targets_by_node(&stage.nodes, &stage.world, 100).await;
    let likes: Vec<_> = by_node.concat().into_iter().map(|target| (target, UserId(1), true)).collect();
    stage.like(&likes, &mut model).await;
    stage.world.drained(&stage.publisher).await;
    stage.daemon.logged("consuming").await;
    let data_set = stage.world.cache.data_set().await.unwrap();
    let before = stage.nodes.counters(&stage.world).await;

    stage.nodes.kill(1);
    let away = stage.client.like(by_node[1][0], UserId(2), &[]).await;
    assert!(matches!(away, Err(LikeError::NotCounted(_))), "{away:?}");
    let alive: Vec<_> =
        [&by_node[0][..], &by_node[2]].concat().into_iter().map(|target| (target, UserId(3), true)).collect();
    stage.like(&alive, &mut model).await;
    assert!(stage.world.cache.ping().await.is_err(), "one master is unreachable");
    stage.daemon.logged("checking Redis for lost buckets failed").await;

    stage.nodes.start_again(1).await;
    stage.daemon.logged("redis-lost").await;
    stage.daemon.logged("redis-loaded").await;
    eventually("no bucket is missing", || async {
        stage.world.cache.unloaded("video", 0..stage.world.cache.keys.buckets()).await.unwrap().lost == 0
    })
    .await;
    assert_ne!(stage.world.cache.data_set().await.unwrap(), data_set);
    let after = stage.nodes.counters(&stage.world).await;
    assert_eq!(
        (&after[0].1, &after[2].1),
        (&before[0].1, &before[2].1),
        "the load marks of buckets on the other nodes must not change"
    );
    assert_eq!(after[1].0, before[1].0);
    assert_ne!(after[1].1, before[1].1);
    stage.like(&[(by_node[1][0], UserId(2), true)], &mut model).await;
    stage.close(&model).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_like_that_was_not_answered_in_time_is_never_sent_again() {
    let nodes = Nodes::start().await;
    let world = World::new("cluster_late", &as_api(&nodes.settings("timeout_ms = 300\n"))).await;
    let client = nodes.api_server(&world);
    let by_node = targets_by_node(&nodes, &world, 20).await;
    for (place, targets) in by_node.iter().enumerate() {
        client.count(targets[0], UserId(1), true, &[]).await.unwrap();
        let (mut other, mut sleep) = (nodes.connect(place).await, redis::cmd("DEBUG"));
        sleep.arg("SLEEP").arg(2);
        let asleep = tokio::spawn(async move { sleep.query_async::<()>(&mut other).await });
        eventually("the node is frozen", || async { client.read(targets).await.is_err() }).await;
        let late = client.count(targets[0], UserId(2), true, &[]).await;
        assert!(late.is_err(), "{late:?}");
        asleep.await.unwrap().unwrap();
        eventually("the node answers", || async { client.read(targets).await.is_ok() }).await;
        client.count(targets[0], UserId(3), true, &[]).await.unwrap();
        let number = nodes.counters(&world).await[place].0[&targets[0]];
        // When the node resumed, Redis either ran the late call or rejected it as too late.
        assert!((2..=3).contains(&number), "{number}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_like_whose_answer_was_lost_on_the_way_is_never_sent_again() {
    let nodes = Nodes::start().await;
    let (proxy, _) = Proxy::before(&nodes.url(1)).await;
    nodes.announce(1, proxy.address.port()).await;
    let world = World::new("cluster_cut", &as_api(&nodes.settings(""))).await;
    let (client, by_node) = (Arc::new(nodes.api_server(&world)), targets_by_node(&nodes, &world, 20).await);
    let target = by_node[1][0];
    client.count(target, UserId(1), true, &[]).await.unwrap();
    proxy.mute();
    let liked = tokio::spawn({
        let client = Arc::clone(&client);
        async move { client.count(target, UserId(2), true, &[]).await }
    });
    let number = || async { nodes.counters(&world).await[1].0[&target] };
    eventually("the like is counted", || async { number().await == 2 }).await;
    proxy.cut();
    assert!(liked.await.unwrap().is_err());
    client.count(target, UserId(3), true, &[]).await.unwrap();
    assert_eq!(number().await, 3);
}

#[tokio::test(flavor = "multi_thread")]
async fn any_seed_will_do() {
    let mut nodes = Nodes::start().await;
    let world = World::new("cluster_seeds", &as_api(&nodes.settings(""))).await;
    let by_node = targets_by_node(&nodes, &world, 20).await;
    nodes.kill(0);
    let cache = Cache::new(&world.config.redis, &world.config.metrics).unwrap();
    assert!(cache.ping().await.is_err());
    let client = nodes.api_server(&world);
    for targets in &by_node[1..] {
        client.count(targets[0], UserId(1), true, &[]).await.unwrap();
    }
    nodes.kill(1);
    let error = nodes.api_server(&world).count(by_node[2][0], UserId(2), true, &[]).await.unwrap_err();
    let error = Chain(&error).to_string();
    assert!(error.contains("refused"), "{error}");
    assert_eq!(world.tallyd(&["config", "check"]).status.code(), Some(75));
}
