//! If a click is counted in Redis but can't be published, the client undoes it in Redis.

use redis::AsyncCommands;
use tallyd_base::config::ServerUrl;
use tallyd_core::event::LikeEvent;
use tallyd_core::model::UserId;

use crate::common::clicker::held_like;
use crate::common::scripts::{ApiServer, Clicked, LikeError, OnBoard, TakenBack};
use crate::common::{Model, World, as_api, target};

const BOARD: &str = "[[board]]\nname = \"likes\"\nperiod = \"total\"\n";
const LIKES: OnBoard<'static> = OnBoard { board: "likes", member: b"42" };

/// Returns the target's score on the board.
async fn points(world: &World) -> Option<f64> {
    world.redis().await.zscore(world.cache.keys.board("likes", "total"), "42").await.unwrap()
}

/// Makes a client that can't reach RabbitMQ.
fn mute(world: &World) -> ApiServer {
    let mut config = world.api.clone();
    config.amqp.url = ServerUrl::from("amqp://nobody@127.0.0.1:1/%2f");
    ApiServer::new(&config)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_like_that_can_not_be_published_is_taken_back_with_its_boards() {
    let world = World::new("unpublished", &as_api(BOARD)).await;
    world.publisher().await;
    let (client, mute) = (world.api_server(), mute(&world));
    client.count(target(42), UserId(1), true, &[LIKES]).await.unwrap();
    let mut redis = world.redis().await;
    let key = world.cache.keys.counters("video", world.cache.keys.bucket(target(42)));
    for _ in 0..2 {
        assert_eq!(taken_back(mute.like(target(42), UserId(7), &[LIKES]).await), TakenBack::Yes);
        assert_eq!(redis.hget::<_, _, i64>(&key, "42").await.unwrap(), 1);
        assert_eq!(points(&world).await, Some(1.0));
    }
}

fn taken_back(clicked: Result<Clicked, LikeError>) -> TakenBack {
    match clicked {
        Err(LikeError::NotPublished { taken_back, .. }) => taken_back,
        other => panic!("{other:?}"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_click_that_its_double_click_has_published_stays_counted() {
    let world = World::new("unpublished_double", &as_api(BOARD)).await;
    let (publisher, _daemon) = (world.publisher().await, world.consuming().await);
    let (client, mute) = (world.api_server(), mute(&world));
    let (proxy, first) = held_like(&world, &[LIKES]).await;
    let Clicked::Same { at, .. } = client.like(target(42), UserId(7), &[LIKES]).await.unwrap() else { panic!() };
    proxy.fail();
    assert_eq!(taken_back(first.await.unwrap()), TakenBack::Overtaken, "the double click is published");
    assert_eq!(taken_back(mute.like(target(42), UserId(7), &[LIKES]).await), TakenBack::Overtaken, "for long");
    let mut model = Model::default();
    model.apply(&LikeEvent { target: target(42), user: UserId(7), at, liked: true });
    world.drained(&publisher).await;
    world.assert_equals(&model).await;
    assert_eq!(client.liked(UserId(7), &[target(42)]).await.unwrap(), [true]);
    assert_eq!(points(&world).await, Some(1.0));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_double_click_is_taken_back_once_when_both_publishers_fail() {
    let world = World::new("unpublished_both", &as_api(BOARD)).await;
    world.publisher().await;
    let (client, mute) = (world.api_server(), mute(&world));
    let (proxy, first) = held_like(&world, &[LIKES]).await;
    let second = mute.like(target(42), UserId(7), &[LIKES]).await;
    assert_eq!(taken_back(second), TakenBack::Overtaken, "the first event can still be published");
    assert_eq!(points(&world).await, Some(1.0));
    proxy.fail();
    assert_eq!(taken_back(first.await.unwrap()), TakenBack::Yes);
    assert_eq!(client.liked(UserId(7), &[target(42)]).await.unwrap(), [false]);
    world.assert_redis_equals(&Model::default()).await;
    assert_eq!(points(&world).await, None);

    // Three clicks can't be published. The client undoes the like only when the last of the three clicks fails.
    let (proxy, first) = held_like(&world, &[LIKES]).await;
    let (other, second) = held_like(&world, &[LIKES]).await;
    proxy.fail();
    assert_eq!(taken_back(first.await.unwrap()), TakenBack::Overtaken);
    assert_eq!(taken_back(mute.like(target(42), UserId(7), &[LIKES]).await), TakenBack::Overtaken);
    other.fail();
    assert_eq!(taken_back(second.await.unwrap()), TakenBack::Yes);
    world.assert_redis_equals(&Model::default()).await;
    assert_eq!(points(&world).await, None);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_click_that_mysql_knew_already_is_never_taken_back() {
    let world = World::new("unpublished_known", &as_api(BOARD)).await;
    let (publisher, _daemon) = (world.publisher().await, world.consuming().await);
    let (client, mute) = (world.api_server(), mute(&world));
    let like = client.like(target(42), UserId(7), &[LIKES]).await.unwrap().counted().unwrap();
    world.drained(&publisher).await;
    let mut redis = world.redis().await;
    let () = redis.del(&world.cache.keys.recent("video", world.cache.keys.bucket(target(42)))).await.unwrap();
    for _ in 0..3 {
        assert_eq!(taken_back(mute.like(target(42), UserId(7), &[LIKES]).await), TakenBack::Overtaken);
    }
    let mut model = Model::default();
    model.apply(&like.event);
    world.assert_equals(&model).await;
    assert_eq!(points(&world).await, Some(1.0));
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_newer_click_has_overtaken_is_left_to_it() {
    let world = World::new("unpublished_newer", &as_api("")).await;
    world.publisher().await;
    let (client, mute) = (world.api_server(), mute(&world));
    let LikeError::NotPublished { counted, taken_back, .. } = mute.like(target(42), UserId(7), &[]).await.unwrap_err()
    else {
        panic!("the click did not count");
    };
    assert_eq!(taken_back, TakenBack::Yes);
    assert!(!client.take_back(&counted, &[]).await.unwrap(), "the click was undone once");
    let Clicked::Counted(like) = client.like(target(42), UserId(7), &[]).await.unwrap() else { panic!() };
    client.unlike(target(42), UserId(7), &[]).await.unwrap().counted().unwrap();
    assert!(!client.take_back(&like, &[]).await.unwrap());
    let mut redis = world.redis().await;
    let key = world.cache.keys.counters("video", world.cache.keys.bucket(target(42)));
    assert_eq!(
        redis.hget::<_, _, Option<i64>>(&key, "42").await.unwrap(),
        None,
        "the like and the unlike must cancel each other"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_like_whose_answer_was_lost_reaches_mysql_when_it_is_called_again() {
    let world = World::new("unpublished_again", &as_api("")).await;
    let (publisher, _daemon) = (world.publisher().await, world.consuming().await);
    let client = world.api_server();
    // An API server crashed after it had counted a click and before it published the event.
    let [recent, _] = world.cache.keys.recent("video", world.cache.keys.bucket(target(42)));
    let lost = client.count(target(42), UserId(7), true, &[]).await.unwrap();
    let mut redis = world.redis().await;
    let () = redis.hset(&recent, "42:7", format!("{}+", lost.event.at.0)).await.unwrap();
    assert!(matches!(client.like(target(42), UserId(7), &[]).await.unwrap(), Clicked::Same { .. }));
    world.drained(&publisher).await;
    let mut model = Model::default();
    model.apply(&lost.event);
    world.assert_equals(&model).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unlike_that_mysql_does_not_expect_yet_is_not_lost() {
    let world = World::new("unpublished_behind", &as_api("")).await;
    let publisher = world.publisher().await;
    let client = world.api_server();
    // No daemon runs, so this like is not in MySQL, and Redis forgets the user's click.
    let like = client.like(target(42), UserId(7), &[]).await.unwrap().counted().unwrap();
    let mut redis = world.redis().await;
    let () = redis.del(&world.cache.keys.recent("video", world.cache.keys.bucket(target(42)))).await.unwrap();
    assert!(matches!(client.unlike(target(42), UserId(7), &[]).await.unwrap(), Clicked::Same { .. }));
    let _daemon = world.daemon();
    world.drained(&publisher).await;
    assert_eq!(world.count("SELECT COUNT(*) FROM like_record WHERE is_del = 1").await, 1);
    assert_eq!(client.liked(UserId(7), &[like.event.target]).await.unwrap(), [false]);
}
