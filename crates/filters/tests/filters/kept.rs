//! Bloom filters are built, kept up to date, read and removed.

use crate::common::{Dice, World, as_api, body, event_of, eventually, target};
use redis::AsyncCommands;
use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use tallyd_base::config::{Config, ServerUrl};
use tallyd_core::event::LikeEvent;
use tallyd_core::model::{Target, UserId};
use tallyd_redis::bloom::Shape;

use super::{
    BY_HAND, alone, assert_no_false_no, keys, like_by_keys, refused, remembered_by_keys, run, run_with, says_no, seed,
    state, unlike_all,
};
use crate::common::scripts::{ApiServer, Clicked};

#[tokio::test(flavor = "multi_thread")]
async fn a_filter_is_what_redisson_reads() {
    let world = World::new("filters_bits", BY_HAND).await;
    world.publisher().await;
    seed(&world, target(42), 1..=300).await;
    seed(&world, target(43), 1..=19).await;
    let report = run(&world).await;
    assert_eq!((report.looked_at, report.built, report.users, report.left), (2, 1, 300, 0));
    let [filter, config, added] = keys(&world, target(42));
    let mut redis = world.redis().await;
    let fields = ["size", "hashIterations", "expectedInsertions", "falseProbability", "inserted", "building"];
    let fields: Vec<Option<String>> = redis.hmget(&config, &fields).await.unwrap();
    // The first value is the result of Redisson's optimalNumOfBits(600, 1e-5). The second value is the result of
    // Redisson's optimalNumOfHashFunctions for this number of bits.
    let expected = ["14377", "17", "600", "1.0E-5", "300"].map(|field| Some(field.to_owned()));
    assert_eq!(fields[..5], expected);
    assert_eq!(fields[5], None);
    let (bytes, ttl): (usize, i64) = (redis.strlen(&filter).await.unwrap(), redis.ttl(&filter).await.unwrap());
    assert_eq!((bytes, ttl), (14_377_usize.div_ceil(8), -1));
    let shape = Shape::of(600, 1e-5);
    let mut bits = HashSet::new();
    for user in 1..=300 {
        for bit in shape.bits(UserId(user)) {
            assert!(redis.getbit::<_, bool>(&filter, bit as usize).await.unwrap(), "bit {bit} of user {user}");
            bits.insert(bit);
        }
    }
    let set: usize = redis.bitcount(&filter).await.unwrap();
    assert_eq!(set, bits.len(), "and no other");
    assert_eq!(refused(&world, target(42)).await, 1_000);
    assert!(!redis.exists::<_, bool>(&[added, world.cache.keys.next_filter("video", target(42))]).await.unwrap());
    assert_eq!(state(&world, target(43)).await, None, "one like is missing");
    let report = run(&world).await;
    assert_eq!((report.built, report.folded, report.dropped), (0, 0, 0), "an up-to-date filter must not change");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_first_like_on_a_target_with_a_filter_asks_mysql_nothing() {
    let world = World::new("filters_alone", &as_api(BY_HAND)).await;
    world.publisher().await;
    seed(&world, target(42), 1..=30).await;
    run(&world).await;
    let client = alone(&world);
    // This client can't reach MySQL. If the target has no filter, the client counts an unlike without a check.
    assert!(matches!(client.unlike(target(43), UserId(1_000), &[]).await.unwrap(), Clicked::Counted(_)));
    assert!(matches!(client.unlike(target(42), UserId(1_000), &[]).await.unwrap(), Clicked::Same { .. }));
    client.like(target(42), UserId(1_001), &[]).await.unwrap().counted().unwrap();
    let mut redis = world.redis().await;
    let () = redis.del(&world.cache.keys.recent("video", world.cache.keys.bucket(target(42)))).await.unwrap();
    assert_no_false_no(&world, target(42), (1..=30).chain([1_001])).await;
    let [_, _, added] = keys(&world, target(42));
    assert!(!redis.exists::<_, bool>(added).await.unwrap(), "the bits must be sent");
    // If the filter says that a user does not like the target, a read does not ask MySQL. For all other users, a read
    // must ask MySQL.
    assert_eq!(client.liked(UserId(2_000), &[target(42)]).await.unwrap(), [false]);
    assert!(client.liked(UserId(7), &[target(42)]).await.is_err());
    let client = world.api_server();
    for _ in 0..2 {
        assert_eq!(client.liked(UserId(7), &[target(42), target(43)]).await.unwrap(), [true, false]);
        assert_eq!(client.liked(UserId(2_000), &[target(43), target(42)]).await.unwrap(), [false, false]);
    }
    assert!(matches!(client.like(target(42), UserId(7), &[]).await.unwrap(), Clicked::Same { .. }));
}

#[tokio::test(flavor = "multi_thread")]
async fn likes_of_producers_that_compute_no_bits_are_put_into_the_filter() {
    let world = World::new("filters_fold", &as_api(BY_HAND)).await;
    world.publisher().await;
    seed(&world, target(42), 1..=30).await;
    run(&world).await;
    for user in 1_001..=1_250 {
        like_by_keys(&world, target(42), user, true).await;
    }
    // If a click is counted without a check, Redis also notes the user beside the filter.
    world.api_server().count(target(42), UserId(1_251), true, &[]).await.unwrap();
    assert_eq!(state(&world, target(42)).await.unwrap().waiting, 251);
    assert_no_false_no(&world, target(42), 1_001..=1_251).await;
    sqlx::query("UPDATE counter SET update_at = UTC_TIMESTAMP(6), value = 281").execute(&world.pool).await.unwrap();
    seed(&world, target(43), 1..=2).await;
    let state_before = state(&world, target(42)).await.unwrap();
    assert_eq!((state_before.inserted, state_before.expected), (281, 60));
    // The filter has too many users for its size, so the run rebuilds it. The notes about users stay until the filter
    // includes these users.
    let report = run(&world).await;
    assert_eq!((report.built, report.folded, report.left), (1, 251, 0));
    assert_eq!(state(&world, target(42)).await.unwrap().expected, 562);
    assert_no_false_no(&world, target(42), (1..=30).chain(1_001..=1_251)).await;
    assert_eq!(state(&world, target(42)).await.unwrap().waiting, 0);
    like_by_keys(&world, target(42), 1_252, true).await;
    let report = run(&world).await;
    assert_eq!((report.built, report.folded), (0, 1));
    assert_no_false_no(&world, target(42), 1_001..=1_252).await;
    assert_eq!(refused(&world, target(42)).await, 1_000);
}

/// The program that counts the likes of a task. If the task itself counts them, it passes the filter's bits or its keys.
#[derive(Clone, Copy, PartialEq)]
enum Counts {
    Daemon,
    WithBits,
    ByKeys,
}

/// The state that is shared by all tasks that act as users.
struct Load {
    world: World,
    client: ApiServer,
    publisher: tallyd_rabbitmq::Publisher,
    over: AtomicBool,
}

impl Load {
    async fn click(&self, target: Target, user: u64, liked: bool, counts: Counts) -> LikeEvent {
        if counts == Counts::ByKeys {
            let event = remembered_by_keys(&self.world, target, user, liked, KEEP).await;
            let (user, body) = body(&event);
            self.publisher.publish(&self.world.broker.exchange(), &user.to_string(), &body).await.unwrap();
            return event;
        }
        let clicked = match liked {
            true => self.client.like(target, UserId(user), &[]).await,
            false => self.client.unlike(target, UserId(user), &[]).await,
        };
        event_of(clicked.unwrap())
    }

    /// Waits until the daemon has committed the event, and has added its row of the outbox to Redis.
    async fn is_added(&self, event: &LikeEvent) {
        eventually("the like is committed", || async {
            let sql = "SELECT COUNT(*) FROM like_record WHERE target_id = ? AND user_id = ? \
                       AND TIMESTAMPDIFF(MICROSECOND, '1970-01-01', update_at) >= ?";
            let row = sqlx::query_scalar::<_, i64>(sql).bind(event.target.id.0).bind(event.user.0).bind(event.at.0);
            row.fetch_one(&self.world.pool).await.unwrap() == 1
        })
        .await;
        self.world.outbox_added().await;
    }
}

/// Sends likes and unlikes of `users` until the test ends, and also reads the filters. No other task uses the same
/// users.
async fn click(load: Arc<Load>, users: std::ops::Range<u64>, counts: Counts) -> u64 {
    let (world, mut redis) = (&load.world, load.world.redis().await);
    let (mut dice, mut liked, mut asked) = (Dice::of_run(users.start), HashSet::new(), 0);
    // A filter can lack these likes, because the daemon has not added them yet.
    let mut new: Vec<LikeEvent> = Vec::new();
    while !load.over.load(Ordering::Relaxed) {
        let pair = (target(1 + dice.below(3)), users.start + dice.below(users.end - users.start));
        let is = |event: &LikeEvent| (event.target, event.user.0) == pair;
        // In the end, about seven of ten users like each target.
        let wants = dice.percent(70);
        if wants != (liked.contains(&pair) || new.iter().any(is)) {
            let event = load.click(pair.0, pair.1, wants, counts).await;
            if wants {
                new.push(event);
            } else {
                liked.remove(&pair);
                new.retain(|event| !is(event));
            }
        }
        if counts == Counts::Daemon && new.len() >= 20 {
            load.is_added(new.last().unwrap()).await;
        }
        if counts != Counts::Daemon || new.len() >= 20 {
            liked.extend(new.drain(..).map(|event| (event.target, event.user.0)));
        }
        for _ in 0..3 {
            let Some(pair) = liked.iter().nth(dice.below(liked.len().max(1) as u64) as usize) else { continue };
            assert!(!says_no(world, &mut redis, pair.0, pair.1).await, "wrong answer for {pair:?}");
            asked += 1;
        }
    }
    asked
}

const LOADED: &str = "[filter]\nlikes_min = 20\nasked = true\ncron = \"\"\n";

/// Redis forgets clicks during the builds.
const KEEP: u64 = 4;

#[tokio::test(flavor = "multi_thread")]
async fn filters_are_built_under_load_again_and_again_without_a_false_no_ever() {
    built_under_load("filters_load", LOADED, [Counts::Daemon; 3]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn filters_that_api_servers_feed_give_no_false_no_under_load() {
    let counts = [Counts::ByKeys, Counts::WithBits, Counts::WithBits];
    built_under_load("filters_load_api", &as_api(LOADED), counts).await;
}

async fn built_under_load(name: &str, settings: &str, counts: [Counts; 3]) {
    let world = World::new(name, settings).await;
    let daemon = world.daemon();
    daemon.logged("\"consuming\"").await;
    assert!(world.tallyd(&["reconcile"]).status.success());
    let publisher = world.broker.connect_publisher("test").await.unwrap();
    let client = world.api_server().remembering(KEEP);
    let load = Arc::new(Load { world, client, publisher, over: AtomicBool::new(false) });
    let mut tasks = tokio::task::JoinSet::new();
    for task in 0..12_u64 {
        tasks.spawn(click(Arc::clone(&load), task * 100 + 1..task * 100 + 100, counts[task as usize % 3]));
    }
    let (built, folded) = build_again_and_again(&load.world).await;
    load.over.store(true, Ordering::Relaxed);
    let mut asked = 0;
    while let Some(done) = tasks.join_next().await {
        asked += done.unwrap();
    }
    assert!(
        built >= 9 && folded > 100 && asked > 1_000,
        "the runs built {built} filters and added {folded} users to filters, and the clients asked {asked} times"
    );
    let world = &load.world;
    world.drained(&load.publisher).await;
    world.outbox_added().await;
    let rows = world.counters().await;
    assert_eq!(world.redis_counters().await, rows.into_iter().filter(|(_, likes)| *likes != 0).collect());
}

/// Runs the job at least twelve times. Returns how many filters it has built, and how many users it has added to them.
async fn build_again_and_again(world: &World) -> (u64, u64) {
    let other = Config {
        filter: tallyd_base::config::Filter { false_positive: 1e-3, ..world.config.filter.clone() },
        ..world.config.clone()
    };
    let (began, mut built, mut folded, mut builds) = (Instant::now(), 0, 0, 0);
    let mut redis = world.redis().await;
    while began.elapsed() < Duration::from_secs(15) || builds < 12 {
        // Three types of runs repeat in this order. The first run has another error rate, so the filters get another
        // shape. The second run has the normal settings. The third run rebuilds outdated filters with the same shape.
        let report = match builds % 3 {
            0 => run_with(&other).await,
            1 => run(world).await,
            _ => {
                for id in 1..=3 {
                    let _: i64 = redis.hset(&keys(world, target(id))[1], "inserted", 1_000_000).await.unwrap();
                }
                run(world).await
            }
        };
        assert_eq!(report.left, 0, "{report:?}");
        (built, folded, builds) = (built + report.built, folded + report.folded, builds + 1);
        assert!(began.elapsed() < crate::common::DEADLINE);
    }
    (built, folded)
}

#[tokio::test(flavor = "multi_thread")]
async fn filters_that_are_outgrown_or_stale_are_built_anew_and_those_of_few_likes_go() {
    let mut world = World::new("filters_life", &as_api(BY_HAND)).await;
    let publisher = world.publisher().await;
    let daemon = world.daemon();
    daemon.logged("\"consuming\"").await;
    seed(&world, target(42), 1..=100).await;
    run(&world).await;
    let first = state(&world, target(42)).await.unwrap();
    assert_eq!((first.expected, first.inserted), (200, 100));
    let client = world.api_server();
    // The filter is outdated, because many of its users no longer like the target. The shape stays the same.
    for user in 1_001..=1_100 {
        client.like(target(42), UserId(user), &[]).await.unwrap().counted().unwrap();
        client.unlike(target(42), UserId(user), &[]).await.unwrap().counted().unwrap();
    }
    assert!(refused_of(&world, target(42), 1_001..=1_100).await < 5);
    world.drained(&publisher).await;
    let report = run(&world).await;
    assert_eq!((report.built, report.users), (1, 100));
    assert_eq!(state(&world, target(42)).await.unwrap().shape, first.shape);
    assert!(refused_of(&world, target(42), 1_001..=1_100).await > 95);
    // Now the filter has too many users for its size.
    seed(&world, target(42), 2_001..=2_150).await;
    for user in 3_001..=3_101 {
        client.like(target(42), UserId(user), &[]).await.unwrap().counted().unwrap();
    }
    world.drained(&publisher).await;
    let report = run(&world).await;
    assert_eq!((report.built, report.users), (1, 351));
    assert_eq!(state(&world, target(42)).await.unwrap().expected, 702);
    assert_no_false_no(&world, target(42), (1..=100).chain(2_001..=2_150).chain(3_001..=3_101)).await;
    // Now only a few users still like the target.
    unlike_all(&world, target(42), 1..=3_098).await;
    let report = run(&world).await;
    assert_eq!((report.built, report.dropped), (0, 1));
    assert_eq!(state(&world, target(42)).await, None);
    seed(&world, target(43), 1..=30).await;
    assert_eq!(run(&world).await.built, 1);
    world.config.filter.likes_min = 200;
    assert_eq!(run(&world).await.dropped, 1, "a filter for far too few likes must not stay");
}

async fn refused_of(world: &World, target: Target, users: std::ops::RangeInclusive<u64>) -> usize {
    let mut redis = world.redis().await;
    let mut refused = 0;
    for user in users {
        refused += usize::from(says_no(world, &mut redis, target, user).await);
    }
    refused
}

#[tokio::test(flavor = "multi_thread")]
async fn without_filters_no_key_of_one_is_made() {
    let world = World::new("filters_off", &as_api("")).await;
    world.publisher().await;
    seed(&world, target(42), 1..=30).await;
    let daemon = world.daemon();
    daemon.logged("\"consuming\"").await;
    let client = world.api_server();
    client.like(target(42), UserId(1_000), &[]).await.unwrap().counted().unwrap();
    assert_eq!(client.liked(UserId(1_000), &[target(42)]).await.unwrap(), [true]);
    // If a producer passes the filter's keys before the daemon has built the filter, Redis must not create a filter.
    like_by_keys(&world, target(42), 1_001, true).await;
    assert!(daemon.stop().success());
    let mut redis = world.redis().await;
    let found: Vec<String> = redis.keys(format!("{}:filter:*", world.name)).await.unwrap();
    assert_eq!(found, Vec::<String>::new());
    assert_eq!(world.count("SELECT COUNT(*) FROM job_run WHERE job = 'filters'").await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_documented_rights_are_enough_for_filters() {
    let world = World::new("filters_rights", &as_api(BY_HAND)).await;
    let consumer = world.daemon();
    consumer.logged("\"consuming\"").await;
    seed(&world, target(42), 1..=30).await;
    let mut redis = world.redis().await;
    let manual =
        std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/operations/security.md")).unwrap();
    let mut login = Vec::new();
    for account in ["tallyd", "tallyd_api"] {
        let name = format!("{}_{account}", world.name);
        let mut lines = manual.lines().filter_map(|line| line.strip_prefix(&format!("ACL SETUSER {account} ")));
        let rules = [lines.next().unwrap(), lines.find(|line| line.contains("+setbit")).unwrap()].join(" ");
        let rules = rules.replace("~tally:", &format!("~{}:", world.name));
        let password = rules.split(' ').find_map(|rule| rule.strip_prefix('>')).unwrap().to_owned();
        let mut command = redis::cmd("ACL");
        command.arg("SETUSER").arg(&name).arg(rules.split(' ').collect::<Vec<_>>());
        let () = command.query_async(&mut redis).await.unwrap();
        let mut config = world.config.clone();
        let mut url = config.redis.url.parts().unwrap();
        url.set_username(&name).unwrap();
        url.set_password(Some(&password)).unwrap();
        config.redis.url = ServerUrl::from(url.as_str());
        login.push((name, config));
    }
    let [(_, daemon), (_, api)] = &login[..] else { panic!("two accounts") };
    assert_eq!(run_with(daemon).await.built, 1);
    let client = ApiServer::new(api);
    for user in [1_000, 1_001] {
        client.like(target(42), UserId(user), &[]).await.unwrap().counted().unwrap();
        client.unlike(target(42), UserId(user), &[]).await.unwrap().counted().unwrap();
    }
    for _ in 0..2 {
        assert_eq!(client.liked(UserId(2_000), &[target(42)]).await.unwrap(), [false]);
    }
    let api_redis = redis::Client::open(api.redis.url.expose()).unwrap();
    let mut api_redis = api_redis.get_multiplexed_async_connection().await.unwrap();
    let [filter, config, added] = keys(&world, target(42));
    let _: () = redis.hset(&config, "size", 1).await.unwrap();
    let _: () = api_redis.persist(&added).await.unwrap();
    // Redis seems to have lost a part of this filter, so the run drops it and builds it again. The next run adds a
    // noted user to the new filter.
    assert_eq!(run_with(daemon).await.dropped, 1);
    like_by_keys(&world, target(42), 1_002, true).await;
    assert_eq!(run_with(daemon).await.folded, 1);
    assert!(redis.exists::<_, bool>(&filter).await.unwrap());
    assert!(consumer.stop().success());
    for (name, _) in &login {
        let () = redis::cmd("ACL").arg("DELUSER").arg(name).query_async(&mut redis).await.unwrap();
    }
}
