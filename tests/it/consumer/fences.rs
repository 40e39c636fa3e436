//! A fence is a message that passes only after all earlier events are in MySQL. This must hold for any message
//! properties that a publisher sets.

use futures_util::StreamExt;
use lapin::BasicProperties;
use lapin::options::BasicConsumeOptions;
use lapin::types::{AMQPValue, FieldTable};
use tallyd_base::jobs::fence::Fences;
use tallyd_core::event::{LikeEvent, encode_fence};
use tallyd_core::model::UserId;
use tallyd_mysql::Store;
use tallyd_mysql::jobs::{Lock, number_of};
use tallyd_rabbitmq::Publisher;

use super::common::proxy::Proxy;
use super::common::{DEADLINE, Model, World, as_api, body, drift, target};
use super::{prefetch_of, receive_and_die};

/// Publishes one like per user through the exchange, all for the same target. `with` returns the message properties for
/// a user.
async fn publish_likes(
    world: &World,
    users: std::ops::RangeInclusive<u64>,
    with: impl Fn(u64) -> BasicProperties,
) -> Model {
    let link = world.broker.connect("test").await.unwrap();
    link.channel.confirm_select(Default::default()).await.unwrap();
    let (mut model, exchange) = (Model::default(), world.broker.exchange());
    for user in users {
        let event =
            LikeEvent { target: target(1), user: UserId(user), at: tallyd_base::runtime::clock::now(), liked: true };
        let (key, properties, body) = (user.to_string(), with(user), body(&event).1);
        let (exchange, key) = (exchange.as_str().into(), key.as_str().into());
        let sent = link.channel.basic_publish(exchange, key, Default::default(), &body, properties);
        drop(sent.await.unwrap());
        model.apply(&event);
    }
    link.channel.wait_for_confirms().await.unwrap();
    model
}

#[tokio::test(flavor = "multi_thread")]
async fn a_fence_goes_to_its_queue_with_the_lowest_priority() {
    let world = World::new("fence_priority", "").await;
    let publisher = world.publisher().await;
    let link = world.broker.connect("test").await.unwrap();
    let (queue, options) = (world.broker.queue(0), BasicConsumeOptions::default());
    let consume = link.channel.basic_consume(queue.as_str().into(), "test".into(), options, FieldTable::default());
    let mut deliveries = consume.await.unwrap();
    let store = Store::new(&world.config.mysql, 1).unwrap();
    let fences = fences_of(&world, &store, publisher);
    let delivery = tokio::select! {
        passed = fences.pass(number_of(1, 1)) => panic!("the fence passed too early: {passed:?}"),
        delivery = deliveries.next() => delivery.unwrap().unwrap(),
    };
    assert_eq!(
        *delivery.properties.priority(),
        Some(0),
        "a fence message must have the priority 0, because RabbitMQ 4.3 uses 4 by default"
    );
    assert_eq!(delivery.exchange.as_str(), "");
}

fn fences_of<'a>(world: &'a World, store: &'a Store, publisher: Publisher) -> Fences<'a> {
    Fences { job: "reconcile", store, broker: &world.broker, publisher, fence_max: DEADLINE }
}

async fn taken(store: &Store) -> u64 {
    match store.take_job("reconcile", "full", "test").await.unwrap() {
        Lock::Taken(run) => run,
        _ => panic!("the lock is held"),
    }
}

/// A quorum queue appends returned messages to those that were returned before. A: a consumer receives all events and
/// the fence, and dies. B: a consumer receives the first events, and dies. C: the daemon receives the other events, then
/// the fence, and then the first events.
#[tokio::test(flavor = "multi_thread")]
async fn a_fence_that_was_returned_passes_no_event_behind_it() {
    let world = World::new("fence_returned", "[consumer]\nbatch_events_max = 10\nlinger_ms = 0\n").await;
    let publisher = world.publisher().await;
    let store = Store::new(&world.config.mysql, 1).unwrap();
    let number = number_of(taken(&store).await, 1);
    let model = publish_likes(&world, 1..=400, |_| BasicProperties::default()).await;
    publisher.publish_behind(&world.broker.queue(0), &encode_fence(number)).await.unwrap();
    receive_and_die(&world, 401).await;
    receive_and_die(&world, 200).await;
    let (mysql, url) = Proxy::before(world.config.mysql.url.expose()).await;
    mysql.delay(5..10);
    let _daemon = world.daemon_with(&[("TALLYD__MYSQL__URL", &url)]);
    let fences = fences_of(&world, &store, publisher);
    fences.pass(number).await.unwrap();
    world.assert_equals(&model).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_sends_its_fence_again_to_the_next_consumer() {
    let world = World::new("fence_again", "").await;
    let publisher = world.publisher().await;
    let store = Store::new(&world.config.mysql, 1).unwrap();
    let number = number_of(taken(&store).await, 1);
    let fences = fences_of(&world, &store, publisher);
    let (passed, daemon) = tokio::join!(fences.pass(number), async {
        receive_and_die(&world, 1).await;
        world.daemon()
    });
    passed.unwrap();
    daemon.logged("\"consuming\"").await;
}

/// RabbitMQ 4.3 delivers messages with a higher priority first, and many clients set the priority 0.
#[tokio::test(flavor = "multi_thread")]
async fn a_reconcile_repairs_nothing_while_likes_of_priority_0_wait() {
    let settings = "[consumer]\nbatch_events_max = 1\nlinger_ms = 0\n[amqp]\nprefetch = 2\n[reconcile]\npublish_grace = \"100ms\"\n";
    let world = World::new("priority_0", &as_api(settings)).await;
    let publisher = world.publisher().await;
    assert_eq!(world.tallyd(&["reconcile"]).status.code(), Some(0));
    let (mysql, url) = Proxy::before(world.config.mysql.url.expose()).await;
    let daemon = world.consuming_with(&[("TALLYD__MYSQL__URL", &url)]).await;
    mysql.delay(5..10);
    drift(&world, target(1), 100).await;
    let model = publish_likes(&world, 1..=100, |_| BasicProperties::default().with_priority(0)).await;
    let report = world.report(&["reconcile", "--full"]);
    assert_eq!((&report["ended"], &report["repaired"]), (&"done".into(), &0.into()), "{report}");
    mysql.clear();
    world.ends_as(&model, &publisher, daemon).await;
}

/// RabbitMQ sets the header `x-delivery-count` when it redelivers a message. If a first delivery has this header, the
/// publisher has set it.
#[tokio::test(flavor = "multi_thread")]
async fn returns_that_a_publisher_claims_slow_nothing_down() {
    let world = World::new("claimed", "[amqp]\nprefetch = 100\n[consumer]\nbatch_events_max = 50\n").await;
    let publisher = world.publisher().await;
    let claim = |user: u64| {
        let mut headers = FieldTable::default();
        headers.insert("x-delivery-count".into(), AMQPValue::LongLongInt(1_000));
        if user % 100 == 7 { BasicProperties::default().with_headers(headers) } else { BasicProperties::default() }
    };
    let model = publish_likes(&world, 1..=10_000, claim).await;
    let daemon = world.daemon();
    world.drained(&publisher).await;
    world.assert_equals(&model).await;
    let prefetches: Vec<u64> = daemon.log().lines().filter_map(prefetch_of).collect();
    assert_eq!(prefetches, [1, 100], "the second session must receive all messages");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_fence_that_comes_through_an_exchange_passes_nothing() {
    let world = World::new("forged", "").await;
    let (publisher, _daemon) = (world.publisher().await, world.daemon());
    let store = Store::new(&world.config.mysql, 1).unwrap();
    let run = taken(&store).await;
    publisher.publish(&world.broker.exchange(), "1", &encode_fence(number_of(run, 1))).await.unwrap();
    world.drained(&publisher).await;
    let fences = fences_of(&world, &store, publisher);
    let errors: Vec<String> = sqlx::query_scalar("SELECT error FROM dead_letter").fetch_all(&world.pool).await.unwrap();
    assert!(matches!(&errors[..], [error] if error.contains("only tallyd sends fences")), "{errors:?}");
    // The forged fence did not pass, so a fence with the same number can still pass.
    fences.pass(number_of(run, 1)).await.unwrap();
    assert_eq!(world.count("SELECT CAST(fence AS SIGNED) FROM partition_fence").await, number_of(run, 1).cast_signed());
}
