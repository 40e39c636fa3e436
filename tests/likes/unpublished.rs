//! A click that counts and can't be published is taken back.

use redis::AsyncCommands;
use tallyd::client::{Clicked, Client, ClientError, OnBoard, TakenBack};
use tallyd::config::ServerUrl;
use tallyd::model::UserId;

use crate::common::{Model, World, assert_redis_equals, target};

/// A client whose broker is away.
fn mute(world: &World) -> Client {
    let mut config = world.api.clone();
    config.amqp.url = ServerUrl::from("amqp://nobody@127.0.0.1:1/%2f");
    Client::new(&config).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_like_that_can_not_be_published_is_taken_back_with_its_boards() {
    let world = World::new("unpublished", "[[board]]\nname = \"likes\"\nperiod = \"total\"\n").await;
    world.publisher().await;
    let (client, mute) = (Client::new(&world.api).unwrap(), mute(&world));
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
    let (client, mute) = (Client::new(&world.api).unwrap(), mute(&world));
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

#[tokio::test(flavor = "multi_thread")]
async fn a_like_whose_answer_was_lost_reaches_mysql_when_it_is_called_again() {
    let world = World::new("unpublished_again", "").await;
    let publisher = world.publisher().await;
    let daemon = world.daemon();
    daemon.logged("\"consuming\"").await;
    let client = Client::new(&world.api).unwrap();
    // An API server that died between counting and publishing.
    let [recent, _] = world.cache.keys.recent("video", world.cache.keys.bucket(target(42)));
    let lost = client.count(target(42), UserId(7), true, &[]).await.unwrap();
    let mut redis = world.redis().await;
    let () = redis.hset(&recent, "42:7", format!("{}+", lost.event.at.0)).await.unwrap();
    assert!(matches!(client.like(target(42), UserId(7), &[]).await.unwrap(), Clicked::Same { .. }));
    world.drained(&publisher).await;
    let mut model = Model::default();
    model.apply(&lost.event);
    world.assert_equals(&model).await;
    assert_redis_equals(&world, &model).await;
    assert!(daemon.stop().success());
    world.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unlike_that_mysql_does_not_expect_yet_is_not_lost() {
    let world = World::new("unpublished_behind", "").await;
    let publisher = world.publisher().await;
    let client = Client::new(&world.api).unwrap();
    // Nobody writes to MySQL, and Redis has forgotten the like.
    let like = client.like(target(42), UserId(7), &[]).await.unwrap().counted().unwrap();
    let mut redis = world.redis().await;
    let () = redis.del(&world.cache.keys.recent("video", world.cache.keys.bucket(target(42)))).await.unwrap();
    assert!(matches!(client.unlike(target(42), UserId(7), &[]).await.unwrap(), Clicked::Same { .. }));
    let daemon = world.daemon();
    world.drained(&publisher).await;
    assert_eq!(world.count("SELECT COUNT(*) FROM like_record WHERE is_del = 1").await, 1);
    assert_eq!(client.liked(UserId(7), &[like.event.target]).await.unwrap(), [false]);
    assert!(daemon.stop().success());
    world.close().await;
}
