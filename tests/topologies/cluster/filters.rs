//! Tests Bloom filters on a Redis Cluster.

use redis::{Value, cmd};
use tallyd_core::model::{Target, UserId};
use tallyd_redis::Cache;
use tallyd_redis::bloom::Shape;
use tallyd_redis::keys::KindNames;
use tallyd_redis::recent::Seen;

use super::Stage;
use super::common::{Model, World, as_api, eventually, target};
use super::nodes::MASTERS;

async fn shape(world: &World, target: Target) -> Option<Shape> {
    let names = KindNames::new(&world.config.kinds);
    let states = world.cache.filter_states(&names, &[target]).await.ok()?;
    states.into_iter().flatten().next()?.shape
}

#[tokio::test(flavor = "multi_thread")]
async fn a_like_that_counts_while_a_slot_moves_is_noted_beside_the_filter() {
    let filters = "[filter]\nlikes_min = 20\nasked = true\ncron = \"* * * * * *\"\n";
    let stage = Stage::new("cluster_filters", &as_api(filters), &[]).await;
    let (mut model, world, nodes, liked) = (Model::default(), &stage.world, &stage.nodes, target(42));
    let likes: Vec<(Target, UserId, bool)> = (1..=30).map(|user| (liked, UserId(user), true)).collect();
    stage.like(&likes, &mut model).await;
    eventually("the filter is built", || async { shape(world, liked).await.is_some() }).await;

    let (keys, bucket) = (&world.cache.keys, world.cache.keys.bucket(liked));
    let counters = keys.counters("video", bucket);
    let (slot, from) = (nodes.slot_of(&counters).await.to_string(), nodes.place_of(&counters).await);
    let to = (from + 1) % MASTERS;
    let (from_id, to_id) = (nodes.id(from).await, nodes.id(to).await);
    nodes.cluster(to, &["SETSLOT", &slot, "IMPORTING", &from_id]).await;
    nodes.cluster(from, &["SETSLOT", &slot, "MIGRATING", &to_id]).await;
    // After this move, the counter and the filter are on different nodes, so a script can't use both keys.
    nodes.migrate(from, to, &counters).await;
    stage.like(&[(liked, UserId(1_000), true)], &mut model).await;
    let left: Vec<String> =
        redis::from_redis_value(nodes.cluster(from, &["GETKEYSINSLOT", &slot, "1000"]).await).unwrap();
    for key in left {
        nodes.migrate(from, to, &key).await;
    }
    for place in [to, from, (from + 2) % MASTERS] {
        nodes.cluster(place, &["SETSLOT", &slot, "NODE", &to_id]).await;
    }

    // The test deletes Redis' notes of recent clicks, because Redis would use them instead of the filter.
    let [recent, former] = keys.recent("video", bucket);
    nodes.command(cmd("DEL").arg(recent).arg(former)).await;
    let names = KindNames::new(&world.config.kinds);
    let api = nodes.api(world);
    let api = Cache::new(&api.redis, &api.metrics).unwrap();
    // Reads the filter's answer as an API server does. A node must first get the text of the script, so the first
    // answers can be unknown.
    let seen = async |user: u64| {
        let shape = shape(world, liked).await;
        let epoch = api.filter_epoch().await.unwrap();
        api.filtered_likes(&names, UserId(user), &epoch, &[(liked, shape)]).await.unwrap()
    };
    eventually("the filter says no for a new user", async || seen(5_000_000).await == [Seen::Known(false)]).await;
    for user in (1..=30).chain([1_000]) {
        assert_eq!(seen(user).await, [Seen::Unknown(None)], "wrong answer for user {user}");
    }
    let [_, _, added] = keys.filter("video", liked);
    let is_folded = async || nodes.command(cmd("SCARD").arg(&added)).await == Value::Int(0);
    eventually("the daemon adds the user to the filter", is_folded).await;
    assert_eq!(seen(1_000).await, [Seen::Unknown(None)]);
    stage.close(&model).await;
}
