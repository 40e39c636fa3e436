//! Servers are killed and restarted while the daemon runs. All tests of this suite share their servers, so only one
//! test runs at a time. The file .config/nextest.toml ensures this order for nextest, and the lock in this file ensures
//! it for plain `cargo test`.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test ends at its first failure")]

use std::sync::Arc;
use std::time::{Duration, Instant};

use common::scripts::ApiServer;
use common::{Dice, Model, World, body, event_of, eventually, redis_likes, servers, target};
use tallyd_core::event::LikeEvent;
use tallyd_core::fence::Depth;
use tallyd_core::model::{Micros, Target, UserId};
use tallyd_rabbitmq::{Broker, Publisher};
use tallyd_testkit as common;
use tokio::sync::{Mutex, MutexGuard};
use tokio_util::sync::CancellationToken;

static ALONE: Mutex<()> = Mutex::const_new(());

/// Makes a world as soon as no other test of this suite runs.
async fn alone(name: &str, settings: &str) -> (MutexGuard<'static, ()>, World, Publisher) {
    let alone = ALONE.lock().await;
    let world = World::new(name, settings).await;
    let publisher = world.publisher().await;
    (alone, world, publisher)
}

/// The number of events of most tests.
const EVENTS: u64 = 5_000;

fn traffic(events: u64, seed: u64) -> (Vec<(UserId, Vec<u8>)>, Model) {
    let mut dice = Dice::of_run(seed);
    let mut model = Model::default();
    let bodies = (0..events)
        .map(|number| {
            let event = LikeEvent {
                target: target(1 + dice.below(200)),
                user: UserId(1 + dice.below(2_000)),
                at: Micros(1_790_000_000_000_000 + number as i64),
                liked: !dice.percent(20),
            };
            model.apply(&event);
            body(&event)
        })
        .collect();
    (bodies, model)
}

/// Publishes all events, even if the broker fails. Publishes each unconfirmed event again.
async fn publish_through(world: &World, bodies: &[(UserId, Vec<u8>)]) {
    // A broker that restarts can lose a confirm. A user waits less long for it than a test.
    let broker = Broker::new(&world.config.amqp).unwrap();
    let exchange = broker.exchange();
    let mut publisher: Option<Publisher> = None;
    for (user, body) in bodies {
        let until = tokio::time::Instant::now() + common::DEADLINE;
        loop {
            assert!(tokio::time::Instant::now() < until, "an event could not be published in time");
            let connected = match publisher.take() {
                Some(connected) => Ok(connected),
                None => broker.connect_publisher("test").await,
            };
            if let Ok(connected) = connected
                && connected.publish(&exchange, &user.to_string(), body).await.is_ok()
            {
                publisher = Some(connected);
                break;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn mysql_killed_five_times_under_load_loses_and_doubles_nothing() {
    let (_alone, world, publisher) = alone("mysql_five_times", "[consumer]\nbatch_events_max = 500").await;
    let (bodies, model) = traffic(4 * EVENTS, 18);
    let daemon = world.daemon();
    for part in bodies.chunks(bodies.len() / 5) {
        world.publish(&publisher, part).await;
        servers::kill("mysql").start();
    }
    world.ends_as(&model, &publisher, daemon).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rabbitmq_killed_under_load_loses_and_doubles_nothing() {
    let (_alone, world, publisher) = alone("rabbitmq_killed", "[consumer]\nbatch_events_max = 500").await;
    let (bodies, model) = traffic(EVENTS, 7);
    let (before, after) = bodies.split_at(bodies.len() - 200);
    world.publish(&publisher, before).await;
    // RabbitMQ 3.10 first confirms that a quorum queue is declared, and only then saves the queue's directory. If
    // RabbitMQ is killed between these two steps, the queue is lost permanently. No command shows whether the directory
    // is saved, so the test waits for a fixed time.
    tokio::time::sleep(Duration::from_secs(3)).await;
    let daemon = world.daemon();
    eventually("some batches are written", || async { world.count("SELECT COUNT(*) FROM like_record").await > 0 })
        .await;
    let killed = servers::kill("rabbitmq");
    let started = tokio::task::spawn_blocking(move || killed.start());
    publish_through(&world, after).await;
    started.await.unwrap();
    let publisher = world.broker.connect_publisher("test").await.unwrap();
    world.ends_as(&model, &publisher, daemon).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn redis_killed_under_load_delays_nothing() {
    let (_alone, world, publisher) = alone("redis_killed", "[consumer]\nbatch_events_max = 500").await;
    let (bodies, model) = traffic(EVENTS, 7);
    let _daemon = world.daemon();
    let (before, after) = bodies.split_at(bodies.len() / 2);
    world.publish(&publisher, before).await;
    let redis = servers::kill("redis");
    let killed = Instant::now();
    world.publish(&publisher, after).await;
    // Redis is unreachable until all events are written.
    world.drained(&publisher).await;
    assert!(killed.elapsed() < Duration::from_secs(20), "{:?}", killed.elapsed());
    world.assert_rows_equal(&model).await;
    redis.start();
    // The server keeps its data in memory alone, so the run loads all counters.
    assert_eq!(world.reconcile("--changed").await["ended"], "done");
    world.outbox_added().await;
    world.assert_redis_equals(&model).await;
}

/// Reads the counters of `targets` in a loop until `stop` is cancelled. These counters are never zero. Returns how many
/// reads got an unknown count.
async fn read_all_the_time(client: Arc<ApiServer>, targets: Vec<Target>, stop: CancellationToken) -> u64 {
    let mut unknown = 0;
    while !stop.is_cancelled() {
        for number in redis_likes(&client, &targets).await {
            assert_ne!(number, Some(0), "a lost count was shown as zero");
            unknown += u64::from(number.is_none());
        }
    }
    unknown
}

#[tokio::test(flavor = "multi_thread")]
async fn flushall_under_load_is_never_shown_as_zero_and_is_rebuilt_exactly() {
    let (_alone, world, publisher) = alone("flushall", "[reconcile]\nwatch_every = \"1s\"").await;
    let client = Arc::new(world.api_server());
    let daemon = world.daemon();
    daemon.logged("redis-loaded").await;
    let mut model = Model::default();
    // User 1's likes stay.
    let targets: Vec<Target> = (1..=50).map(target).collect();
    for target in &targets {
        model.apply(&event_of(client.like(*target, UserId(1), &[]).await.unwrap()));
    }
    world.counted(&publisher).await;
    let stop = CancellationToken::new();
    let reader = tokio::spawn(read_all_the_time(Arc::clone(&client), targets.clone(), stop.clone()));
    let (clicking, clicks) = (stop.clone(), Arc::clone(&client));
    let clicker = tokio::spawn(async move {
        let (mut model, mut dice) = (Model::default(), Dice::of_run(3));
        while !clicking.is_cancelled() {
            let (target, user) = (target(1 + dice.below(50)), UserId(2 + dice.below(1_000_000)));
            model.apply(&event_of(clicks.like(target, user, &[]).await.unwrap()));
        }
        model
    });
    for flush in 1..=3 {
        let () = redis::cmd("FLUSHALL").query_async(&mut world.redis().await).await.unwrap();
        eventually("every count is known again", || async {
            let numbers = redis_likes(&client, &targets).await;
            numbers.iter().all(Option::is_some) && daemon.log().matches("redis-loaded").count() > flush
        })
        .await;
    }
    stop.cancel();
    assert!(reader.await.unwrap() > 0, "some reads must return an unknown count");
    model.rows.extend(clicker.await.unwrap().rows);
    world.drained(&publisher).await;
    // The test repeats the reconcile until a reconcile compares all counters. The first reconcile can fail to do this,
    // because some likes are published late. Also, after a flush of Redis, it can be unknown whether Redis counted a
    // like.
    world.succeeds(&["reconcile"]).await;
    world.assert_equals(&model).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn work_goes_on_within_seconds_of_mysqls_return() {
    let (_alone, world, publisher) = alone("mysql_back", "").await;
    let daemon = world.consuming().await;
    let mysql = servers::kill("mysql");
    let (bodies, model) = traffic(EVENTS, 8);
    world.publish(&publisher, &bodies[..100]).await;
    daemon.logged("outage-begun").await;
    mysql.start();
    let back = Instant::now();
    world.drained(&publisher).await;
    daemon.logged("outage-over").await;
    // The daemon retries once a second. The limit of 20 seconds is generous, because the machine can be slow.
    assert!(back.elapsed() < Duration::from_secs(20), "{:?}", back.elapsed());
    world.publish(&publisher, &bodies[100..]).await;
    world.ends_as(&model, &publisher, daemon).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn messages_are_given_back_when_mysql_stays_away_and_are_written_when_it_returns() {
    let (_alone, world, publisher) = alone("given_back", "[consumer]\ndatabase_away_max = \"1s\"").await;
    let daemon = world.consuming().await;
    let mysql = servers::kill("mysql");
    let (bodies, model) = traffic(EVENTS, 12);
    world.publish(&publisher, &bodies).await;
    eventually("the consumer has returned all messages and waits", || async {
        let returned = Depth::Known { messages: u32::try_from(EVENTS).unwrap(), consumers: 0 };
        publisher.depth(&world.broker.queue(0)).await.unwrap() == returned
    })
    .await;
    mysql.start();
    world.ends_as(&model, &publisher, daemon).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn consuming_goes_on_under_the_brokers_memory_alarm() {
    let (_alone, world, publisher) = alone("alarm", "[consumer]\nbatch_events_max = 200").await;
    let (bodies, model) = traffic(EVENTS, 13);
    world.publish(&publisher, &bodies).await;
    let watermark = "set_vm_memory_high_watermark";
    let alarm = servers::change(&[watermark, "0.0000001"], &[watermark, "0.4"]);
    let _daemon = world.daemon();
    let rows = i64::try_from(model.rows.len()).unwrap();
    eventually("all events are written and acknowledged", || async {
        world.count("SELECT COUNT(*) FROM like_record").await == rows
            && world
                .broker
                .connect_publisher("test")
                .await
                .unwrap()
                .depth(&world.broker.queue(0))
                .await
                .unwrap()
                .messages()
                == Some(0)
    })
    .await;
    // This event has been published before. So a second delivery of this event changes nothing.
    let blocked = tokio::time::timeout(Duration::from_secs(1), world.publish(&publisher, &bodies[..1]));
    assert!(blocked.await.is_err(), "the alarm must block publishers");
    let checked = world.command().args(["config", "check"]).env("TALLYD__AMQP__TIMEOUT_MS", "2000").output().unwrap();
    assert_eq!(checked.status.code(), Some(75));
    let said = String::from_utf8(checked.stderr).unwrap();
    assert!(
        said.contains("error    rabbitmq-permissions  the broker has a memory or disk alarm, and reads nothing"),
        "{said}"
    );
    drop(alarm);
    world.assert_equals(&model).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_broker_that_waits_for_no_ack_any_longer_gets_all_of_them_later() {
    let (_alone, world, publisher) = alone("ack_timeout", "").await;
    let (bodies, model) = traffic(EVENTS, 19);
    // RabbitMQ reads these settings when a channel opens.
    let set = |timeout_ms: u32, tick_ms: u32| {
        format!(
            "application:set_env(rabbit, consumer_timeout, {timeout_ms}), \
             application:set_env(rabbit, channel_tick_interval, {tick_ms})."
        )
    };
    let impatient = servers::change(&["eval", &set(1_000, 500)], &["eval", &set(1_800_000, 60_000)]);
    let daemon = world.consuming().await;
    let mysql = servers::kill("mysql");
    let (first, rest) = bodies.split_at(100);
    world.publish(&publisher, first).await;
    // Versions of RabbitMQ before 4.3 close the channel. Version 4.3 and later versions cancel the consumer.
    let ways = ["delivery acknowledgement on channel", "the broker cancelled the consumer"];
    eventually("the broker times out the delivery", || async { ways.iter().any(|said| daemon.log().contains(said)) })
        .await;
    drop(impatient);
    mysql.start();
    world.publish(&publisher, rest).await;
    world.ends_as(&model, &publisher, daemon).await;
}
