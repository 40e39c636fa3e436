//! Tests the counters that API servers change in Redis, in all layouts. Also tests the counters that only the daemon
//! changes. For these counters, API servers only publish events.

use std::sync::Arc;

use redis::AsyncCommands;
use tallyd_base::config::ServerUrl;
use tallyd_client::{Change, NUMBER_MAX, Source};
use tallyd_core::model::{Kind, Metric, Target, TargetId};
use tallyd_redis::Cache;

use crate::common::scripts::{ApiServer, CountError, Counting, TakenBack};
use crate::common::size::some_of;
use crate::common::{Daemon, Dice, World, target};

pub const VIEW: Metric = Metric(2);
pub const BALANCE: Metric = Metric(3);
pub const SHARE: Metric = Metric(4);

pub const RULES: &str = "[metrics]\nlike = 1\nview = 2\nbalance = 3\nshare = 4\n\
                     [[rule]]\nmetric = \"view\"\nwriter = \"api\"\nsettable = true\n\
                     [[rule]]\nmetric = \"balance\"\nwriter = \"api\"\nbelow_zero = true\nsettable = true\n";

pub const LAYOUTS: [&str; 3] = ["packed", "entity", "string"];

pub fn settings(layout: &str) -> String {
    format!("{RULES}[redis]\nlayout = \"{layout}\"\n")
}

/// Starts a test environment with a daemon, and waits until all buckets are loaded.
pub async fn loaded(name: &str, settings: &str) -> (World, Daemon) {
    let world = World::new(name, settings).await;
    let daemon = world.consuming().await;
    world.succeeds(&["reconcile"]).await;
    (world, daemon)
}

/// Makes a client that can't reach RabbitMQ.
pub fn mute(world: &World) -> ApiServer {
    let mut config = world.api.clone();
    config.amqp.url = ServerUrl::from("amqp://nobody@127.0.0.1:1/%2f");
    ApiServer::new(&config)
}

/// Reads the metric's count from the target's key in the layout of `cache`.
pub async fn held(world: &World, cache: &Cache, target: Target, metric: Metric) -> i64 {
    let place = cache.keys.place("video", target, metric);
    let mut redis = world.redis().await;
    match place.part.strip_prefix("entity:") {
        Some(field) => redis.hget::<_, _, Option<i64>>(place.key, field).await.unwrap().unwrap_or(0),
        None if place.part == "string" => redis.get::<_, Option<i64>>(place.key).await.unwrap().unwrap_or(0),
        None => {
            let field: Option<String> = redis.hget(place.key, target.id.0).await.unwrap();
            let field = field.unwrap_or_default();
            assert!(!field.ends_with(",0") && field != "0", "the field must not end with zeros: {field}");
            field.split(',').nth(usize::from(metric.0) - 1).map_or(0, |number| number.parse().unwrap())
        }
    }
}

pub async fn stored(world: &World, metric: Metric) -> i64 {
    let sql = "SELECT CAST(COALESCE(SUM(value), 0) AS SIGNED) FROM counter WHERE target_id = 42 AND metric = ?";
    sqlx::query_scalar(sql).bind(metric.0).fetch_one(&world.pool).await.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_number_that_api_servers_count_is_in_redis_at_once_and_in_mysql_with_its_event() {
    for layout in some_of(&LAYOUTS) {
        let (world, daemon) = loaded(&format!("counted_{layout}"), &settings(layout)).await;
        let publisher = world.broker.connect_publisher("test").await.unwrap();
        let client = world.api_server();
        let before = tallyd_base::runtime::clock::now().before(std::time::Duration::from_secs(60));
        for (delta, count) in [(5, 5), (-2, 3), (1 << 31, (1 << 31) + 3)] {
            let id = format!("event{delta}");
            let changed = client.add(target(42), VIEW, delta, &id).await.unwrap().counted().unwrap();
            assert_eq!((changed.count, changed.change), (Some(count), Change::Add { delta, event_id: id }));
            assert!(changed.at > before, "Redis' clock");
            assert_eq!(held(&world, &world.cache, target(42), VIEW).await, count, "{layout}");
        }
        let lower = client.add(target(42), BALANCE, -7, "a").await.unwrap().counted().unwrap();
        assert_eq!(lower.count, Some(-7));
        client.republish(&lower, TakenBack::Unknown).await.unwrap();
        let numbers = client.read(&[target(42)]).await.unwrap();
        let of = |metric| numbers[0].get(metric).map(|number| (number.value, number.source)).unwrap();
        assert_eq!((of(VIEW), of(BALANCE)), (((1 << 31) + 3, Source::Redis), (-7, Source::Redis)));
        assert_eq!((of(Metric(1)), of(SHARE)), ((0, Source::Redis), (0, Source::Redis)));
        world.drained(&publisher).await;
        assert_eq!(
            (stored(&world, VIEW).await, stored(&world, BALANCE).await),
            ((1 << 31) + 3, -7),
            "each change must count once"
        );
        assert_eq!(world.count("SELECT COUNT(*) FROM dead_letter").await, 0);
        assert!(daemon.stop().success());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_number_is_set_whatever_it_was() {
    for layout in some_of(&LAYOUTS) {
        let world = World::new(&format!("counted_set_{layout}"), &settings(layout)).await;
        world.publisher().await;
        let client = world.api_server();
        client.add(target(42), BALANCE, 3, "a").await.unwrap();
        for value in [NUMBER_MAX, 0, -NUMBER_MAX, 17] {
            // The test sets the counter to zero first. A single step of more than 2^53 would not be exact.
            client.reset(target(42), BALANCE).await.unwrap().counted().unwrap();
            assert_eq!(held(&world, &world.cache, target(42), BALANCE).await, 0, "{layout}");
            let changed = client.set(target(42), BALANCE, value).await.unwrap().counted().unwrap();
            assert_eq!(changed.count, None, "the bucket is not loaded");
            assert_eq!(held(&world, &world.cache, target(42), BALANCE).await, value, "{layout}");
        }
        assert_eq!(held(&world, &world.cache, target(42), VIEW).await, 0, "the target's other counter must not change");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_would_go_below_zero_changes_nothing_and_is_not_published() {
    for layout in some_of(&LAYOUTS) {
        let (world, daemon) = loaded(&format!("counted_below_{layout}"), &settings(layout)).await;
        let publisher = world.broker.connect_publisher("test").await.unwrap();
        let client = world.api_server();
        client.add(target(42), VIEW, 2, "a").await.unwrap().counted().unwrap();
        let below = client.add(target(42), VIEW, -3, "b").await.unwrap();
        assert_eq!(below, Counting::BelowZero { count: 2 });
        assert_eq!(held(&world, &world.cache, target(42), VIEW).await, 2);
        assert_eq!(client.add(target(42), VIEW, -2, "c").await.unwrap().counted().unwrap().count, Some(0));
        world.drained(&publisher).await;
        assert_eq!(stored(&world, VIEW).await, 0);
        assert_eq!(world.count("SELECT COUNT(*) FROM applied_event").await, 2, "the first change was not published");
        // Redis has lost the bucket, so it does not know the counter. In this case it accepts the change, although the
        // counter could become negative.
        crate::common::lose(&world).await;
        let bucket = world.cache.keys.counters("video", world.cache.keys.bucket(target(42)));
        let () = world.redis().await.del(bucket).await.unwrap();
        let blind = client.add(target(42), VIEW, -1, "d").await.unwrap().counted().unwrap();
        assert_eq!(blind.count, None);
        assert_eq!(held(&world, &world.cache, target(42), VIEW).await, -1);
        assert!(daemon.stop().success());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_count_that_can_not_be_published_is_taken_back_in_both_layouts() {
    for (layout, also) in [("packed", "string"), ("entity", "packed"), ("string", "entity")] {
        let settings = format!("{}[redis.also]\nlayout = \"{also}\"\nbucket_bits = 5\n", settings(layout));
        let settings = settings.replace("[redis]\n", "[redis]\nbucket_bits = 4\n");
        let world = World::new(&format!("counted_mute_{layout}"), &settings).await;
        world.publisher().await;
        let (client, mute) = (world.api_server(), mute(&world));
        let second = world.cache.also(&world.config.redis, &world.config.metrics).unwrap().unwrap();
        let both = async || {
            let first = held(&world, &world.cache, target(42), BALANCE).await;
            (first, held(&world, &second, target(42), BALANCE).await)
        };
        client.add(target(42), BALANCE, 4, "a").await.unwrap();
        assert_eq!(both().await, (4, 4));
        let failed = mute.add(target(42), BALANCE, -9, "b").await.unwrap_err();
        let CountError::NotPublished { changed, taken_back, .. } = failed else { panic!("{failed:?}") };
        assert_eq!((taken_back, both().await), (TakenBack::Yes, (4, 4)), "{layout}");
        let failed = mute.set(target(42), BALANCE, 100).await.unwrap_err();
        assert!(matches!(failed, CountError::NotPublished { taken_back: TakenBack::Unknown, .. }), "{failed:?}");
        assert_eq!(both().await, (100, 100), "the client must not undo a set event, because a newer one may exist");
        client.set(target(42), BALANCE, 6).await.unwrap();
        assert_eq!(both().await, (6, 6));
        // The error contains the event that was not published. This event is older than the set, so it changes nothing
        // when it is published again.
        assert_eq!(changed.change, Change::Add { delta: -9, event_id: "b".to_owned() });
        client.republish(&changed, taken_back).await.unwrap();
        assert_eq!(both().await, (6, 6));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_the_daemon_counts_is_only_published() {
    let world = World::new("counted_daemon", RULES).await;
    let publisher = world.publisher().await;
    let (client, mute) = (world.api_server(), mute(&world));
    let changed = client.add(target(42), SHARE, 3, "a").await.unwrap().counted().unwrap();
    assert_eq!(changed.count, None);
    let failed = mute.add(target(42), SHARE, 3, "b").await.unwrap_err();
    assert!(matches!(failed, CountError::NotPublished { taken_back: TakenBack::Yes, .. }), "{failed:?}");
    assert_eq!(held(&world, &world.cache, target(42), SHARE).await, 0);
    let _daemon = world.daemon();
    world.drained(&publisher).await;
    assert_eq!(stored(&world, SHARE).await, 3);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_tallyd_would_refuse_is_not_counted() {
    let world = World::new("counted_refused", RULES).await;
    let client = world.api_server();
    let no_kind = Target { kind: Kind(9), id: TargetId(1) };
    let long = "x".repeat(65);
    for (failed, why) in [
        (client.add(target(0), VIEW, 1, "a").await, "the target's id is 0"),
        (client.add(no_kind, VIEW, 1, "a").await, "the site card has no kind with the code 9"),
        (client.add(target(1), Metric(1), 1, "a").await, "likes are counted only by `like` and `unlike`"),
        (client.add(target(1), Metric(9), 1, "a").await, "the site card has no metric with the code 9"),
        (client.add(target(1), VIEW, (1 << 31) + 1, "a").await, "delta is 2147483649"),
        (client.add(target(1), VIEW, 1, "").await, "event_id has 0 characters"),
        (client.add(target(1), VIEW, 1, &long).await, "event_id has 65 characters"),
        (client.set(target(1), SHARE, 1).await, "no [[rule]] says that share is settable"),
        (client.set(target(1), VIEW, -1).await, "no [[rule]] says below_zero"),
        (client.set(target(1), BALANCE, NUMBER_MAX + 1).await, "must be below 2^53"),
    ] {
        let Err(CountError::NotCounted(error)) = failed else { panic!("{why}: {failed:?}") };
        assert!(error.to_string().contains(why), "{error}");
    }
    let mut redis = world.redis().await;
    let keys: Vec<String> = redis.keys(format!("{}:*", world.name)).await.unwrap();
    assert_eq!(keys, Vec::<String>::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_no_number_or_would_not_be_exact_is_left_as_it_is() {
    for layout in some_of(&LAYOUTS) {
        let world = World::new(&format!("counted_junk_{layout}"), &settings(layout)).await;
        world.publisher().await;
        let client = world.api_server();
        client.set(target(42), BALANCE, NUMBER_MAX).await.unwrap();
        let failed = client.add(target(42), BALANCE, 1, "a").await.unwrap_err();
        assert!(format!("{:#}", anyhow::Error::from(failed)).contains("no longer be exact"), "{layout}");
        assert_eq!(held(&world, &world.cache, target(42), BALANCE).await, NUMBER_MAX);
        let place = world.cache.keys.place("video", target(7), VIEW);
        let mut redis = world.redis().await;
        for junk in ["x", "1,,2", "1,2,x", "1.5"] {
            let () = match place.part.strip_prefix("entity:") {
                Some(field) => redis.hset(&place.key, field, junk).await.unwrap(),
                None if place.part == "string" => redis.set(&place.key, junk).await.unwrap(),
                None => redis.hset(&place.key, 7, junk).await.unwrap(),
            };
            let failed = client.add(target(7), VIEW, 1, "a").await.unwrap_err();
            assert!(format!("{:#}", anyhow::Error::from(failed)).contains("holds no number"), "{layout} {junk}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn many_tasks_that_count_up_and_down_end_as_their_answers_say_and_are_never_below_zero() {
    for layout in some_of(&LAYOUTS) {
        let (world, daemon) = loaded(&format!("counted_crowd_{layout}"), &settings(layout)).await;
        let publisher = world.broker.connect_publisher("test").await.unwrap();
        let client = Arc::new(world.api_server());
        let mut tasks = tokio::task::JoinSet::new();
        for task in 0..20_u64 {
            let client = Arc::clone(&client);
            tasks.spawn(async move {
                let (mut dice, mut sum) = (Dice::of_run(task + 1), 0);
                for number in 0..30 {
                    let delta = dice.below(7).cast_signed() - 3;
                    match client.add(target(42), VIEW, delta, &format!("{task}-{number}")).await.unwrap() {
                        Counting::Counted(changed) => {
                            assert!(changed.count.unwrap() >= 0, "{changed:?}");
                            sum += delta;
                        }
                        Counting::BelowZero { count } => assert!(count + delta < 0),
                    }
                }
                sum
            });
        }
        let mut sum = 0;
        while let Some(counted) = tasks.join_next().await {
            sum += counted.unwrap();
        }
        world.drained(&publisher).await;
        assert_eq!((held(&world, &world.cache, target(42), VIEW).await, stored(&world, VIEW).await), (sum, sum));
        assert!(daemon.stop().success());
    }
}
