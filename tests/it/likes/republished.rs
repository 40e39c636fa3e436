//! If the client can't publish a `count` event, it publishes the event again later. Then Redis and MySQL have the same
//! count, even if the broker also has the first event.

use std::time::Duration;

use redis::AsyncCommands;
use tallyd_base::config::ServerUrl;
use tallyd_core::event::encode_set;
use tallyd_core::model::{Metric, TargetId, UserId};
use tallyd_redis::keys::SET_AT;

use super::counted::{BALANCE, LAYOUTS, RULES, SHARE, VIEW, held, loaded, mute, settings, stored};
use crate::common::proxy::Proxy;
use crate::common::scripts::{ApiServer, Changed, CountError, Counting, TakenBack};
use crate::common::size::some_of;
use crate::common::{World, eventually, target};

/// Returns the unpublished event of the error, and whether the client undid the count.
fn unpublished(counting: Result<Counting, CountError>) -> (Changed, TakenBack) {
    match counting {
        Err(CountError::NotPublished { changed, taken_back, .. }) => (*changed, taken_back),
        other => panic!("{other:?}"),
    }
}

async fn both(world: &World, metric: Metric) -> (i64, i64) {
    (held(world, &world.cache, target(42), metric).await, stored(world, metric).await)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_count_that_is_republished_counts_once_in_redis_and_in_mysql() {
    let (world, _daemon) = loaded("republished", RULES).await;
    let publisher = world.broker.connect_publisher("test").await.unwrap();
    let (client, mute) = (world.api_server(), mute(&world));
    let (changed, taken_back) = unpublished(mute.add(target(42), VIEW, 5, "a").await);
    assert_eq!((taken_back, both(&world, VIEW).await), (TakenBack::Yes, (0, 0)));
    let (changed, taken_back) = unpublished(mute.republish(&changed, taken_back).await);
    assert_eq!(
        (taken_back, both(&world, VIEW).await),
        (TakenBack::Yes, (0, 0)),
        "the second attempt must also be undone"
    );
    let again = client.republish(&changed, taken_back).await.unwrap().counted().unwrap();
    assert_eq!((again.at, again.count), (changed.at, Some(5)), "the client must publish the same event");
    world.drained(&publisher).await;
    assert_eq!(both(&world, VIEW).await, (5, 5));

    // The broker gets the event, but its confirm is lost.
    let (proxy, url) = Proxy::before(world.api.amqp.url.expose()).await;
    let mut config = world.api.clone();
    config.amqp.url = ServerUrl::from(url.as_str());
    let deaf = ApiServer::new(&config);
    deaf.add(target(42), VIEW, 1, "b").await.unwrap();
    proxy.mute();
    let add = tokio::spawn(async move { deaf.add(target(42), VIEW, 10, "c").await });
    eventually("the event arrives", || async { stored(&world, VIEW).await == 16 }).await;
    proxy.fail();
    let (changed, taken_back) = unpublished(add.await.unwrap());
    assert_eq!((taken_back, both(&world, VIEW).await), (TakenBack::Yes, (6, 16)));
    client.republish(&changed, taken_back).await.unwrap().counted().unwrap();
    world.drained(&publisher).await;
    assert_eq!(both(&world, VIEW).await, (16, 16));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_count_from_before_a_set_is_republished_and_changes_nothing() {
    let (world, _daemon) = loaded("republished_set", RULES).await;
    let publisher = world.broker.connect_publisher("test").await.unwrap();
    let (client, mute) = (world.api_server(), mute(&world));
    let (changed, taken_back) = unpublished(mute.add(target(42), BALANCE, 5, "a").await);
    client.set(target(42), BALANCE, 100).await.unwrap();
    client.republish(&changed, taken_back).await.unwrap().counted().unwrap();
    world.drained(&publisher).await;
    assert_eq!(both(&world, BALANCE).await, (100, 100));
    // If a set event was not published, the client does not undo the change in Redis. The client only publishes the set
    // event again.
    let (changed, taken_back) = unpublished(mute.set(target(42), BALANCE, 7).await);
    assert_eq!((taken_back, both(&world, BALANCE).await), (TakenBack::Unknown, (7, 100)));
    client.republish(&changed, taken_back).await.unwrap().counted().unwrap();
    world.drained(&publisher).await;
    assert_eq!(both(&world, BALANCE).await, (7, 7));
    // If the daemon counts the metric, the client has nothing to undo and only publishes the event again.
    let (changed, taken_back) = unpublished(mute.add(target(42), SHARE, 3, "b").await);
    client.republish(&changed, taken_back).await.unwrap().counted().unwrap();
    world.drained(&publisher).await;
    eventually("the daemon counts the share", || async { both(&world, SHARE).await == (3, 3) }).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn counts_and_sets_after_the_clock_went_back_are_newer_than_a_set() {
    for layout in some_of(&LAYOUTS) {
        let (world, daemon) = loaded(&format!("set_ahead_{layout}"), &settings(layout)).await;
        let publisher = world.broker.connect_publisher("test").await.unwrap();
        let client = world.api_server();
        let set = client.set(target(42), BALANCE, 100).await.unwrap().counted().unwrap();
        // The test changes the time of the set event to one minute in the future. A set event gets such a time if
        // Redis' clock is put back later.
        let place = world.cache.keys.place("video", target(42), BALANCE);
        let bucket = place.bucket.unwrap_or(place.key);
        let minute = set.at.after(Duration::from_secs(60));
        let () = world.redis().await.hset(&bucket, SET_AT, minute.0).await.unwrap();
        let body = encode_set(TargetId(42), ("video", "balance"), 100, minute);
        world.publish(&publisher, &[(UserId(42), body)]).await;
        client.add(target(42), BALANCE, 5, "a").await.unwrap().counted().unwrap();
        world.drained(&publisher).await;
        assert_eq!(both(&world, BALANCE).await, (105, 105), "{layout}");
        client.set(target(42), BALANCE, 50).await.unwrap();
        client.add(target(42), BALANCE, 1, "b").await.unwrap();
        world.drained(&publisher).await;
        assert_eq!(both(&world, BALANCE).await, (51, 51), "{layout}");
        // The daemon rejects events that are hours ahead. So if the time of a set event is hours ahead, Redis must not
        // give this time to a later count event.
        let hour = tallyd_base::runtime::clock::now().after(Duration::from_secs(3_600));
        let () = world.redis().await.hset(&bucket, SET_AT, hour.0).await.unwrap();
        let changed = client.add(target(42), BALANCE, 1, "c").await.unwrap().counted().unwrap();
        assert!(changed.at < hour, "{layout}");
        assert!(daemon.stop().success());
    }
}
