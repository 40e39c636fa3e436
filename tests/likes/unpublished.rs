//! A click that counts and can't be published is taken back.

use redis::AsyncCommands;
use tallyd::client::{Clicked, Client, ClientError, OnBoard, TakenBack};
use tallyd::config::ServerUrl;
use tallyd::model::UserId;

use crate::common::{World, target};

/// A client whose broker is away.
fn mute(world: &World) -> Client {
    let mut config = world.config.clone();
    config.amqp.url = ServerUrl::from("amqp://nobody@127.0.0.1:1/%2f");
    Client::new(&config).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_like_that_can_not_be_published_is_taken_back_with_its_boards() {
    let world = World::new("unpublished", "[[board]]\nname = \"likes\"\nperiod = \"total\"\n").await;
    world.publisher().await;
    let (client, mute) = (Client::new(&world.config).unwrap(), mute(&world));
    let on = [OnBoard { board: "likes", member: b"42" }];
    client.count(target(42), UserId(1), true, &on).await.unwrap();
    let (mut redis, board) = (world.redis().await, world.cache.keys.board("likes", "total"));
    let key = world.cache.keys.counters("video", world.cache.keys.bucket(target(42)));
    for _ in 0..2 {
        let error = mute.like(target(42), UserId(7), &on).await.unwrap_err();
        assert!(matches!(error, ClientError::NotPublished { taken_back: TakenBack::Yes, .. }), "{error:?}");
        assert_eq!(redis.hget::<_, _, i64>(&key, "42").await.unwrap(), 1);
        assert_eq!(redis.zscore::<_, _, f64>(&board, "42").await.unwrap(), 1.0);
    }
    world.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_newer_click_has_overtaken_is_left_to_it() {
    let world = World::new("unpublished_newer", "").await;
    world.publisher().await;
    let (client, mute) = (Client::new(&world.config).unwrap(), mute(&world));
    let ClientError::NotPublished { counted, taken_back, .. } =
        mute.like(target(42), UserId(7), &[]).await.unwrap_err()
    else {
        panic!("it was not counted");
    };
    assert_eq!(taken_back, TakenBack::Yes);
    assert!(!client.take_back(&counted, &[]).await.unwrap(), "it was taken back once");
    let Clicked::Counted(like) = client.like(target(42), UserId(7), &[]).await.unwrap() else { panic!() };
    client.unlike(target(42), UserId(7), &[]).await.unwrap().counted().unwrap();
    assert!(!client.take_back(&like, &[]).await.unwrap());
    let mut redis = world.redis().await;
    let key = world.cache.keys.counters("video", world.cache.keys.bucket(target(42)));
    assert_eq!(redis.hget::<_, _, Option<i64>>(&key, "42").await.unwrap(), None, "a like and an unlike");
    world.close().await;
}
