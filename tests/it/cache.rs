//! Runs the Lua scripts on a real Redis. The scripts must add each change once, and must reject invalid or unknown
//! data.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test ends at its first failure")]

use std::time::Duration;

use crate::common;
use common::proxy::Proxy;
use common::{World, as_api, redis_likes, target};
use tallyd_base::config::Redis;
use tallyd_core::model::{Kind, Metric, Micros, UserId};
use tallyd_core::outbox::OutboxOffsets;
use tallyd_redis::Cache;
use tallyd_redis::keys::KindNames;
use tallyd_redis::layout::Loaded;
use tallyd_redis::repairs::{Repair, Repaired};

const LIKE: Metric = Metric(1);

/// Marks the lost buckets of videos, to show that the run `run` loads them. Returns the ids of the marked buckets.
async fn begin_load(world: &World, run: u64) -> Vec<u32> {
    let lost =
        world.cache.begin_load(("video", Kind(1)), &[LIKE], run, 0, 1_000, &OutboxOffsets::default()).await.unwrap();
    lost.buckets().map(|(bucket, _)| bucket).collect()
}

/// Begins to load the buckets into Redis, but does not end the load. During the load, counts two likes of target 1.
async fn liked_twice(world: &World) -> Loaded {
    let client = world.api_server();
    begin_load(world, 7).await;
    for user in 1..=2 {
        client.count(target(1), UserId(user), true, &[]).await.unwrap();
    }
    let names = KindNames::new(&world.config.kinds);
    world.cache.sample(&names, &[(target(1), LIKE)]).await.unwrap()[0].clone().unwrap().loaded
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_bucket_holds_when_its_loading_begins_comes_with_its_mark() {
    let world = World::new("held", &as_api("")).await;
    let client = world.api_server();
    for user in 1..=2 {
        client.count(target(1), UserId(user), true, &[]).await.unwrap();
    }
    let lost =
        world.cache.begin_load(("video", Kind(1)), &[LIKE], 7, 0, 1_000, &OutboxOffsets::default()).await.unwrap();
    assert_eq!(lost.values, [((target(1), LIKE), 2)].into());
    let later = client.count(target(1), UserId(3), true, &[]).await.unwrap();
    let bucket = world.cache.keys.bucket(target(1));
    let (_, cut) = lost.buckets().find(|(marked, _)| *marked == bucket).unwrap();
    assert!(cut < later.event.at, "an event after the start of the load must be newer than the load's cut-off time");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_repair_that_comes_twice_or_late_is_added_once() {
    let world = World::new("repair_once", "").await;
    let (cache, names) = (&world.cache, KindNames::new(&world.config.kinds));
    begin_load(&world, 7).await;
    let sample = cache.sample(&names, &[(target(1), LIKE)]).await.unwrap()[0].clone().unwrap();
    assert_eq!((sample.value, sample.loaded), (0, Loaded::Loading { generation: 7, pass: 0 }));
    let repair = [Repair {
        number: (target(1), LIKE),
        delta: 5,
        below_zero: false,
        not_set_since: None,
        loaded: sample.loaded,
        until: Micros::MAX,
    }];
    assert_eq!(cache.repair(&names, 71, &repair).await.unwrap(), [((target(1), LIKE), Repaired::Done)]);
    // The repair of pass 71 arrives again, and then a repair of pass 72 with the same measurement. The bucket has
    // changed since this measurement.
    for pass in [71, 72] {
        assert_eq!(cache.repair(&names, pass, &repair).await.unwrap(), [((target(1), LIKE), Repaired::Stale)]);
    }
    let after = cache.sample(&names, &[(target(1), LIKE)]).await.unwrap()[0].clone().unwrap();
    assert_eq!((after.value, after.loaded), (5, Loaded::Loading { generation: 7, pass: 71 }));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_repair_takes_no_number_below_zero_that_may_not_go_there() {
    let world = World::new("below_zero", &as_api("")).await;
    let (cache, names) = (&world.cache, KindNames::new(&world.config.kinds));
    let loaded = liked_twice(&world).await;
    // Another target of the same bucket can be repaired.
    let bucket = world.cache.keys.bucket(target(1));
    let other = (2..).map(target).find(|other| world.cache.keys.bucket(*other) == bucket).unwrap();
    let repair = |target, delta, below_zero| Repair {
        number: (target, LIKE),
        delta,
        below_zero,
        not_set_since: None,
        loaded,
        until: Micros::MAX,
    };
    let done = cache.repair(&names, 71, &[repair(target(1), -3, false), repair(other, -4, true)]).await.unwrap();
    assert_eq!(done, [((target(1), LIKE), Repaired::BelowZero), ((other, LIKE), Repaired::Done)]);
    let samples = cache.sample(&names, &[(target(1), LIKE), (other, LIKE)]).await.unwrap();
    assert_eq!(samples.into_iter().map(|sample| sample.unwrap().value).collect::<Vec<_>>(), [2, -4]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_bucket_that_was_flushed_while_it_was_loaded_stays_unknown() {
    let world = World::new("flushed_load", "").await;
    let all = 0..world.cache.keys.buckets();
    let buckets: Vec<u32> = all.clone().collect();
    assert_eq!(begin_load(&world, 7).await.len(), buckets.len());
    let mut redis = world.redis().await;
    let _: i64 = redis::cmd("UNLINK").arg(world.cache.keys.counters("video", 3)).query_async(&mut redis).await.unwrap();
    assert_eq!(world.cache.end_load("video", 7, buckets.iter().copied()).await.unwrap(), all.len() as u64 - 1);
    assert_eq!(world.cache.unloaded("video", all.into_iter()).await.unwrap().lost, 1);
    assert_eq!(begin_load(&world, 8).await, [3], "loaded buckets must not change");
    assert_eq!(
        world.cache.end_load("video", 7, buckets.iter().copied()).await.unwrap(),
        0,
        "another run is loading the bucket now"
    );
    assert_eq!(world.cache.end_load("video", 8, buckets.iter().copied()).await.unwrap(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_like_counts_in_the_packed_layout_and_leaves_nothing_at_zero() {
    let world = World::new("packed", &as_api("[metrics]\nlike = 2\ncomment = 1\n")).await;
    let client = world.api_server();
    let key = world.cache.keys.counters("video", world.cache.keys.bucket(target(42)));
    let mut redis = world.redis().await;
    let _: i64 = redis::cmd("HSET").arg(&key).arg("42").arg("3").query_async(&mut redis).await.unwrap();
    let first = client.count(target(42), UserId(1), true, &[]).await.unwrap();
    let second = client.count(target(42), UserId(2), true, &[]).await.unwrap();
    assert_eq!((first.count, second.count), (None, None), "the bucket is not loaded");
    assert!(first.event.at < second.event.at, "Redis' clock must advance");
    let field = || async {
        let mut redis = world.redis().await;
        let value: Option<String> = redis::cmd("HGET").arg(&key).arg("42").query_async(&mut redis).await.unwrap();
        value
    };
    assert_eq!(field().await.as_deref(), Some("3,2"));
    for user in 1..=2 {
        client.count(target(42), UserId(user), false, &[]).await.unwrap();
    }
    assert_eq!(field().await.as_deref(), Some("3"), "trailing zeros are left out");
    let _: i64 = redis::cmd("HSET").arg(&key).arg("42").arg("0,1").query_async(&mut redis).await.unwrap();
    client.count(target(42), UserId(1), false, &[]).await.unwrap();
    assert_eq!(field().await, None, "a target whose counts are all zero has no field");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_field_that_is_no_list_of_numbers_is_left_alone() {
    let world = World::new("no_list", &as_api("[metrics]\nlike = 1\nview = 2\n")).await;
    let (client, names) = (world.api_server(), KindNames::new(&world.config.kinds));
    begin_load(&world, 7).await;
    world.publisher().await;
    let event = client.like(target(42), UserId(9), &[]).await.unwrap().counted().unwrap();
    let key = world.cache.keys.counters("video", world.cache.keys.bucket(target(42)));
    let mut redis = world.redis().await;
    for (pass, text) in ["12,,4", "x,5,7", "1,5,", "1e3,2", ""].into_iter().enumerate() {
        let _: i64 = redis::cmd("HSET").arg(&key).arg("42").arg(text).query_async(&mut redis).await.unwrap();
        client.count(target(42), UserId(1), true, &[]).await.unwrap_err();
        client.take_back(&event, &[]).await.unwrap_err();
        let state: String = redis::cmd("HGET").arg(&key).arg("_").query_async(&mut redis).await.unwrap();
        let loaded = Loaded::parse(&state).unwrap();
        let repair = Repair {
            number: (target(42), LIKE),
            delta: -1,
            below_zero: true,
            not_set_since: None,
            loaded,
            until: Micros::MAX,
        };
        let done = world.cache.repair(&names, 71 + pass as u64, &[repair]).await.unwrap();
        assert_eq!(done, [((target(42), LIKE), Repaired::Stale)], "{text}");
        let after: String = redis::cmd("HGET").arg(&key).arg("42").query_async(&mut redis).await.unwrap();
        assert_eq!(after, text);
    }
    // If Redis rejects the undo of a like, Redis does not remember this undo. So the client can repeat the undo.
    let _: i64 = redis::cmd("HSET").arg(&key).arg("42").arg("12,3").query_async(&mut redis).await.unwrap();
    assert!(client.take_back(&event, &[]).await.unwrap());
    let after: String = redis::cmd("HGET").arg(&key).arg("42").query_async(&mut redis).await.unwrap();
    assert_eq!(after, "11,3");
}

#[tokio::test(flavor = "multi_thread")]
async fn scripts_that_the_server_has_forgotten_are_sent_again() {
    let world = World::new("noscript", &as_api("")).await;
    let client = world.api_server();
    let mut redis = world.redis().await;
    for expected in 1..=3 {
        let _: () = redis::cmd("SCRIPT").arg("FLUSH").query_async(&mut redis).await.unwrap();
        client.count(target(1), UserId(expected), true, &[]).await.unwrap();
        assert_eq!(world.redis_counters().await[&target(1)], i64::try_from(expected).unwrap());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_connection_that_was_cut_is_replaced_by_the_next_call() {
    let world = World::new("redis_cut", "").await;
    let (proxy, url) = Proxy::before(world.config.redis.url.expose()).await;
    let cache =
        Cache::new(&Redis { url: url.as_str().into(), ..world.config.redis.clone() }, &world.config.metrics).unwrap();
    cache.ping().await.unwrap();
    proxy.cut();
    assert!(cache.ping().await.is_err(), "a ping must notice the closed connection");
    cache.ping().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn what_redis_says_of_itself_is_read() {
    let world = World::new("info", "").await;
    assert!(world.cache.eviction_policies().await.unwrap().contains("noeviction"));
    let name = world.cache.data_set().await.unwrap();
    let ids: Vec<usize> = name.split(' ').map(str::len).collect();
    assert_eq!(ids, [40, 40], "{name}");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_readers_find_missing_is_noted_once_for_each_bucket() {
    let world = World::new("missing", &as_api("[kinds]\nvideo = 1\npost = 2")).await;
    let client = world.api_server();
    let names = KindNames::new(&world.config.kinds);
    let buckets: Vec<u32> = (0..world.cache.keys.buckets()).filter(|bucket| *bucket != 3).collect();
    begin_load(&world, 7).await;
    assert_eq!(world.cache.end_load("video", 7, buckets.iter().copied()).await.unwrap(), buckets.len() as u64);
    let (known, lost): (Vec<_>, Vec<_>) =
        (1..200).map(target).partition(|target| world.cache.keys.bucket(*target) != 3);
    assert!(redis_likes(&client, &lost).await.iter().all(Option::is_none), "bucket 3 is being loaded");
    assert_eq!(
        world.cache.take_missing(&names, 10).await.unwrap(),
        [],
        "a bucket that is being loaded is not reported"
    );
    let _: i64 = redis::cmd("UNLINK")
        .arg(world.cache.keys.counters("video", 3))
        .query_async(&mut world.redis().await)
        .await
        .unwrap();
    assert_eq!(client.count(known[0], UserId(1), true, &[]).await.unwrap().count, Some(1));
    assert_eq!(client.count(lost[0], UserId(1), true, &[]).await.unwrap().count, None);
    let numbers = redis_likes(&client, &[known.as_slice(), &lost].concat()).await;
    assert_eq!(numbers[..2], [Some(1), Some(0)]);
    assert!(numbers[known.len()..].iter().all(Option::is_none), "every count of a lost bucket must be unknown");
    assert_eq!(world.cache.take_missing(&names, 10).await.unwrap(), [(Kind(1), 3)]);
    // Invalid bucket names are dropped.
    let mut redis = world.redis().await;
    for junk in ["video:zz", "film:13", "video:3", "video:20", "video:h13", "junk", "post:1f"] {
        let _: i64 =
            redis::cmd("SADD").arg(world.cache.keys.missing()).arg(junk).query_async(&mut redis).await.unwrap();
    }
    assert_eq!(world.cache.take_missing(&names, 10).await.unwrap(), [(Kind(2), 15)]);
    assert_eq!(world.cache.take_missing(&names, 10).await.unwrap(), []);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_number_that_was_set_since_the_sample_is_not_repaired() {
    let world = World::new("repair_set", &as_api("")).await;
    let (cache, names) = (&world.cache, KindNames::new(&world.config.kinds));
    let mut loaded = liked_twice(&world).await;
    let mut redis = world.redis().await;
    let key = world.cache.keys.counters("video", world.cache.keys.bucket(target(1)));
    let now = cache.now().await.unwrap();
    let (minute, hour) = (Duration::from_secs(60), Duration::from_secs(3_600));
    // A set whose time is more than five minutes ahead of the clock was made before the clock was put back. If the
    // set's time is at most five minutes ahead, the scripts accept this time. Then lua/count.lua gives the next set a
    // later time.
    for (pass, set_at, result) in [
        (71, now, Repaired::Stale),
        (72, now.before(hour), Repaired::Done),
        (73, now.after(hour), Repaired::Done),
        (74, now.after(minute), Repaired::Stale),
    ] {
        let _: i64 = redis::cmd("HSET").arg(&key).arg("_s").arg(set_at.0).query_async(&mut redis).await.unwrap();
        let repair = Repair {
            number: (target(1), LIKE),
            delta: 5,
            below_zero: false,
            not_set_since: Some(now),
            loaded,
            until: Micros::MAX,
        };
        assert_eq!(cache.repair(&names, pass, &[repair]).await.unwrap(), [((target(1), LIKE), result)]);
        loaded = cache.sample(&names, &[(target(1), LIKE)]).await.unwrap()[0].clone().unwrap().loaded;
    }
    assert_eq!(cache.sample(&names, &[(target(1), LIKE)]).await.unwrap()[0].clone().unwrap().value, 12);
}
