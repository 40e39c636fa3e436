//! Bloom filters: a "no" is certain, whatever is built, killed, lost and clicked meanwhile.

use std::collections::HashSet;
use std::os::unix::process::ExitStatusExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use redis::{AsyncCommands, Script};
use sqlx::AssertSqlSafe;
use tallyd::app::Servers;
use tallyd::cache::bloom::Shape;
use tallyd::cache::filters::FilterState;
use tallyd::cache::keys::KindNames;
use tallyd::client::{Clicked, Client};
use tallyd::config::{Config, ServerUrl};
use tallyd::event::LikeEvent;
use tallyd::filters::FAULT_POINTS;
use tallyd::filters::report::Report;
use tallyd::job::Ran;
use tallyd::model::{Micros, Target, UserId};
use tokio_util::sync::CancellationToken;

use crate::common::{Daemon, Dice, World, body, eventually, target};

/// Filters from twenty likes on, looked after when the test says so.
const BY_HAND: &str = "[filter]\nlikes_min = 20\ncron = \"\"\n";

type Redis = redis::aio::MultiplexedConnection;

/// One run of the job.
async fn run(world: &World) -> Report {
    run_with(&world.config).await
}

async fn run_with(config: &Config) -> Report {
    let servers = Servers::new(config).unwrap();
    match servers.filters(config, &CancellationToken::new()).await.unwrap() {
        Ran::Ended(report) => report,
        Ran::Held { owner, .. } => panic!("{owner} holds the lock"),
    }
}

/// Rows as if these users had liked the target long ago.
async fn seed(world: &World, target: Target, users: std::ops::RangeInclusive<u64>) {
    let rows: Vec<String> =
        users.clone().map(|user| format!("(1, {}, {user}, 0, UTC_TIMESTAMP(6))", target.id)).collect();
    let rows = rows.join(", ");
    let likes = format!("INSERT INTO like_record (kind, target_id, user_id, is_del, update_at) VALUES {rows}");
    let counter = format!(
        "INSERT INTO counter (kind, target_id, metric, slot, value, update_at) VALUES (1, {}, 1, 0, {}, UTC_TIMESTAMP(6)) \
         ON DUPLICATE KEY UPDATE value = value + VALUES(value), update_at = VALUES(update_at)",
        target.id,
        users.count()
    );
    for sql in [likes, counter] {
        sqlx::query(AssertSqlSafe(sql)).execute(&world.pool).await.unwrap();
    }
}

async fn unlike_all(world: &World, target: Target, users: std::ops::RangeInclusive<u64>) {
    let (id, first, last) = (target.id, users.start(), users.end());
    let likes =
        format!("UPDATE like_record SET is_del = 1 WHERE target_id = {id} AND user_id BETWEEN {first} AND {last}");
    let counter = format!(
        "UPDATE counter SET update_at = UTC_TIMESTAMP(6), \
         value = (SELECT COUNT(*) FROM like_record WHERE target_id = {id} AND is_del = 0) WHERE target_id = {id}"
    );
    for sql in [likes, counter] {
        sqlx::query(AssertSqlSafe(sql)).execute(&world.pool).await.unwrap();
    }
}

async fn state(world: &World, target: Target) -> Option<FilterState> {
    let names = KindNames::new(&world.config.kinds);
    world.cache.filter_states(&names, &[target]).await.unwrap().pop().unwrap()
}

fn keys(world: &World, target: Target) -> [String; 3] {
    world.cache.keys.filter("video", target)
}

/// Whether the target's filter, or what is noted beside it, says that the user does not like it. Whatever is remembered of clicks is left out.
async fn says_no(world: &World, redis: &mut Redis, target: Target, user: u64) -> bool {
    let [filter, config, added] = keys(world, target);
    loop {
        let shape: (Option<u64>, Option<u32>) = redis.hmget(&config, &["size", "hashIterations"]).await.unwrap();
        let (Some(size), Some(iterations)) = shape else { return false };
        let script = Script::new(include_str!("../../lua/filter_has.lua"));
        let mut call = script.key(&filter);
        call.key(&config).key(&added).arg(user).arg(size);
        for bit in (Shape { size, iterations }).bits(UserId(user)) {
            call.arg(bit);
        }
        // Otherwise another one has taken its place meanwhile.
        if let redis::Value::Int(answer) = call.invoke_async::<redis::Value>(redis).await.unwrap() {
            return answer == 0;
        }
    }
}

async fn assert_no_false_no(world: &World, target: Target, users: impl IntoIterator<Item = u64>) {
    let mut redis = world.redis().await;
    for user in users {
        assert!(!says_no(world, &mut redis, target, user).await, "a false no: {target:?}, user {user}");
    }
}

/// How many of a thousand users who never liked the target are told so.
async fn refused(world: &World, target: Target) -> usize {
    let mut redis = world.redis().await;
    let mut refused = 0;
    for user in 5_000_000..5_001_000 {
        refused += usize::from(says_no(world, &mut redis, target, user).await);
    }
    refused
}

/// A client whose MySQL is away.
fn alone(world: &World) -> Client {
    let mut config = world.config.clone();
    config.mysql.url = ServerUrl::from("mysql://nobody@127.0.0.1:1/none");
    Client::new(&config).unwrap()
}

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
    // Redisson's optimalNumOfBits(600, 1e-5) and optimalNumOfHashFunctions of that.
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
    assert_eq!((report.built, report.folded, report.dropped), (0, 0, 0), "it is right as it is");
    world.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_first_like_on_a_target_with_a_filter_asks_mysql_nothing() {
    let world = World::new("filters_alone", BY_HAND).await;
    world.publisher().await;
    seed(&world, target(42), 1..=30).await;
    run(&world).await;
    let client = alone(&world);
    // With MySQL away an unlike that nobody knows anything of would count.
    assert!(matches!(client.unlike(target(43), UserId(1_000), &[]).await.unwrap(), Clicked::Counted(_)));
    assert!(matches!(client.unlike(target(42), UserId(1_000), &[]).await.unwrap(), Clicked::Same { .. }));
    client.like(target(42), UserId(1_001), &[]).await.unwrap().counted().unwrap();
    let mut redis = world.redis().await;
    let () = redis.del(&world.cache.keys.recent("video", world.cache.keys.bucket(target(42)))).await.unwrap();
    assert_no_false_no(&world, target(42), (1..=30).chain([1_001])).await;
    let [_, _, added] = keys(&world, target(42));
    assert!(!redis.exists::<_, bool>(added).await.unwrap(), "the bits were sent along");
    // A page: what the filter is sure of is not asked, either. Of who may like it MySQL is asked.
    assert_eq!(client.liked(UserId(2_000), &[target(42)]).await.unwrap(), [false]);
    assert!(client.liked(UserId(7), &[target(42)]).await.is_err());
    let client = Client::new(&world.config).unwrap();
    for _ in 0..2 {
        assert_eq!(client.liked(UserId(7), &[target(42), target(43)]).await.unwrap(), [true, false]);
        assert_eq!(client.liked(UserId(2_000), &[target(43), target(42)]).await.unwrap(), [false, false]);
    }
    assert!(matches!(client.like(target(42), UserId(7), &[]).await.unwrap(), Clicked::Same { .. }));
    world.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn likes_of_producers_that_compute_no_bits_are_put_into_the_filter() {
    let world = World::new("filters_fold", BY_HAND).await;
    world.publisher().await;
    seed(&world, target(42), 1..=30).await;
    run(&world).await;
    for user in 1_001..=1_250 {
        like_by_keys(&world, target(42), user, true).await;
    }
    // Of one that was taken back nobody knows anything, and a user that was counted without being asked about is noted, too.
    Client::new(&world.config).unwrap().count(target(42), UserId(1_251), true, &[]).await.unwrap();
    assert_eq!(state(&world, target(42)).await.unwrap().waiting, 251);
    assert_no_false_no(&world, target(42), 1_001..=1_251).await;
    sqlx::query("UPDATE counter SET update_at = UTC_TIMESTAMP(6), value = 281").execute(&world.pool).await.unwrap();
    seed(&world, target(43), 1..=2).await;
    let state_before = state(&world, target(42)).await.unwrap();
    assert_eq!((state_before.inserted, state_before.expected), (281, 60));
    // It has outgrown its size by that, and is built anew; what was noted stays noted until it is in the bits.
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
    world.close().await;
}

/// A click by like.lua with the keys of the filter and without bits, as from Python. The caller knows that it changes what the user likes.
async fn like_by_keys(world: &World, target: Target, user: u64, liked: bool) -> LikeEvent {
    let (keys, bucket) = (&world.cache.keys, world.cache.keys.bucket(target));
    let script = Script::new(include_str!("../../lua/like.lua"));
    let counters = keys.counters("video", bucket);
    let mut call = script.key(&counters);
    let words = if liked { ["like", "unlike"] } else { ["unlike", "like"] };
    for key in keys.recent("video", bucket).iter().chain([&counters]).chain(&keys.filter("video", target)) {
        call.key(key);
    }
    call.arg(target.id.0).arg(1).arg(words[0]).arg(user).arg(4).arg(words[1]).arg("").arg("");
    let answer: (i64, i64, Option<i64>) = call.invoke_async(&mut world.redis().await).await.unwrap();
    assert_eq!(answer.0, 1, "it counts");
    LikeEvent { target, user: UserId(user), at: Micros(answer.1), liked }
}

/// What tasks that click share.
struct Load {
    world: World,
    client: Client,
    publisher: tallyd::broker::Publisher,
    over: AtomicBool,
}

/// Likes and unlikes for these users alone until it is over, and asks the filters all the time.
async fn click(load: Arc<Load>, users: std::ops::Range<u64>, sends_bits: bool) -> u64 {
    let (world, mut redis) = (&load.world, load.world.redis().await);
    let (mut dice, mut liked, mut asked) = (Dice::new(users.start), HashSet::new(), 0);
    while !load.over.load(Ordering::Relaxed) {
        let pair = (target(1 + dice.below(3)), users.start + dice.below(users.end - users.start));
        // More likes than unlikes: seven of ten users like each target.
        let wants = dice.percent(70);
        if wants != liked.contains(&pair) {
            match sends_bits {
                true if wants => drop(load.client.like(pair.0, UserId(pair.1), &[]).await.unwrap()),
                true => drop(load.client.unlike(pair.0, UserId(pair.1), &[]).await.unwrap()),
                false => {
                    let event = like_by_keys(world, pair.0, pair.1, wants).await;
                    let (user, body) = body(&event);
                    load.publisher.publish(&world.broker.exchange(), &user.to_string(), &body).await.unwrap();
                }
            }
            if wants {
                liked.insert(pair)
            } else {
                liked.remove(&pair)
            };
        }
        for _ in 0..3 {
            let Some(pair) = liked.iter().nth(dice.below(liked.len().max(1) as u64) as usize) else { continue };
            assert!(!says_no(world, &mut redis, pair.0, pair.1).await, "a false no: {pair:?}");
            asked += 1;
        }
    }
    asked
}

#[tokio::test(flavor = "multi_thread")]
async fn filters_are_built_under_load_again_and_again_without_a_false_no_ever() {
    let settings = "[filter]\nlikes_min = 20\ncron = \"\"\n[client]\nrecent_keep = \"4s\"\n";
    let world = World::new("filters_load", settings).await;
    let daemon = world.daemon();
    daemon.logged("\"consuming\"").await;
    assert!(world.tallyd(&["reconcile"]).status.success());
    let publisher = world.broker.connect_publisher("test").await.unwrap();
    let client = Client::new(&world.config).unwrap();
    let load = Arc::new(Load { world, client, publisher, over: AtomicBool::new(false) });
    let mut tasks = tokio::task::JoinSet::new();
    for task in 0..12_u64 {
        tasks.spawn(click(Arc::clone(&load), task * 100 + 1..task * 100 + 100, task % 3 != 0));
    }
    let world = &load.world;
    let other = Config {
        filter: tallyd::config::Filter { false_positive: 1e-3, ..world.config.filter.clone() },
        ..world.config.clone()
    };
    let (began, mut built, mut folded, mut builds) = (Instant::now(), 0, 0, 0);
    let mut redis = world.redis().await;
    while began.elapsed() < Duration::from_secs(25) || builds < 12 {
        // Another rate is another shape; then, of the same shape, one that looks stale; then whatever there is to do.
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
    load.over.store(true, Ordering::Relaxed);
    let mut asked = 0;
    while let Some(done) = tasks.join_next().await {
        asked += done.unwrap();
    }
    assert!(built >= 9 && folded > 100 && asked > 1_000, "{built} built, {folded} folded, {asked} asked");
    world.drained(&load.publisher).await;
    let rows = world.counters().await;
    assert_eq!(world.redis_counters().await, rows.into_iter().filter(|(_, likes)| *likes != 0).collect());
    assert!(daemon.stop().success());
    let Ok(load) = Arc::try_unwrap(load) else { panic!("a task is left") };
    load.world.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_daemon_that_dies_at_any_step_of_a_build_is_made_up_for() {
    for (number, point) in FAULT_POINTS.into_iter().enumerate() {
        let settings = "[filter]\nlikes_min = 20\ncron = \"* * * * * *\"\n";
        let world = World::new(&format!("filters_dies_{number}"), settings).await;
        let client = Client::new(&world.config).unwrap();
        world.publisher().await;
        seed(&world, target(42), 1..=30).await;
        let mut daemon = world.daemon_with(&[("TALLYD_FAULT_POINT", point)]);
        assert_eq!(daemon.wait().signal(), Some(6), "{point}");
        // As long as nobody has finished it, likes go on.
        client.like(target(42), UserId(1_000), &[]).await.unwrap().counted().unwrap();
        assert_no_false_no(&world, target(42), (1..=30).chain([1_000])).await;
        sqlx::query("UPDATE job_lock SET lease_until = NOW(6)").execute(&world.pool).await.unwrap();
        let daemon = world.daemon();
        let made_good = async || {
            let state = state(&world, target(42)).await;
            let is_done =
                world.count("SELECT COUNT(*) FROM job_run WHERE job = 'filters' AND outcome = 'done'").await > 0;
            is_done
                && state.is_some_and(|state| state.shape.is_some() && state.building.is_none() && state.waiting == 0)
        };
        eventually(&format!("the filter is made good after {point}"), made_good).await;
        assert_no_false_no(&world, target(42), (1..=30).chain([1_000])).await;
        assert_eq!(refused(&world, target(42)).await, 1_000, "{point}");
        assert!(daemon.stop().success());
        let mut redis = world.redis().await;
        assert!(!redis.exists::<_, bool>(world.cache.keys.next_filter("video", target(42))).await.unwrap(), "{point}");
        world.close().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn filters_that_are_outgrown_or_stale_are_built_anew_and_those_of_few_likes_go() {
    let world = World::new("filters_life", BY_HAND).await;
    let publisher = world.publisher().await;
    let daemon = world.daemon();
    daemon.logged("\"consuming\"").await;
    seed(&world, target(42), 1..=100).await;
    run(&world).await;
    let first = state(&world, target(42)).await.unwrap();
    assert_eq!((first.expected, first.inserted), (200, 100));
    let client = Client::new(&world.config).unwrap();
    // Stale: half of them like it no longer, and the shape stays.
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
    // Outgrown.
    seed(&world, target(42), 2_001..=2_150).await;
    for user in 3_001..=3_101 {
        client.like(target(42), UserId(user), &[]).await.unwrap().counted().unwrap();
    }
    world.drained(&publisher).await;
    let report = run(&world).await;
    assert_eq!((report.built, report.users), (1, 351));
    assert_eq!(state(&world, target(42)).await.unwrap().expected, 702);
    assert_no_false_no(&world, target(42), (1..=100).chain(2_001..=2_150).chain(3_001..=3_101)).await;
    // Few are left.
    unlike_all(&world, target(42), 1..=3_095).await;
    let report = run(&world).await;
    assert_eq!((report.built, report.dropped), (0, 1));
    assert_eq!(state(&world, target(42)).await, None);
    assert!(daemon.stop().success());
    world.close().await;
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
async fn a_flush_in_the_middle_of_a_build_leaves_no_half_of_a_filter() {
    // At once: each waits for the run after the one that failed.
    let points = ["filters:begun", "filters:fenced", "filters:written"];
    futures_util::future::join_all(points.map(flushed_at)).await;
}

async fn flushed_at(point: &str) {
    let settings = "[filter]\nlikes_min = 20\ncron = \"* * * * * *\"\n";
    let world = World::new(&format!("filters_flush_{}", &point[8..]), settings).await;
    world.publisher().await;
    seed(&world, target(42), 1..=30).await;
    let daemon = world.daemon_with(&[("TALLYD_PAUSE_POINT", point)]);
    is_frozen(&daemon).await;
    let mut redis = world.redis().await;
    let all: Vec<String> = redis.keys(format!("{}:*", world.name)).await.unwrap();
    let () = redis.del(all).await.unwrap();
    // Before its next step somebody likes the target, and nothing is known of a filter.
    let client = Client::new(&world.config).unwrap();
    client.like(target(42), UserId(1_000), &[]).await.unwrap().counted().unwrap();
    daemon.signal("CONT");
    let built = async || {
        assert_no_false_no(&world, target(42), (1..=30).chain([1_000])).await;
        let state = state(&world, target(42)).await;
        let is_done = world.count("SELECT COUNT(*) FROM job_run WHERE job = 'filters' AND outcome = 'done'").await > 0;
        is_done && state.is_some_and(|state| state.shape.is_some() && state.building.is_none())
    };
    eventually(&format!("the filter is built after {point}"), built).await;
    assert_eq!(refused(&world, target(42)).await, 1_000);
    assert!(daemon.stop().success());
    world.close().await;
}

/// Waits until a daemon has come to its pause point.
async fn is_frozen(daemon: &Daemon) {
    let stopped = async || {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", daemon.child.id())).unwrap();
        stat.rsplit_once(')').unwrap().1.trim_start().starts_with('T')
    };
    eventually("the daemon is stopped", stopped).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_run_that_was_frozen_and_wakes_up_after_another_one_changes_no_filter() {
    let points = ["filters:begun", "filters:fenced", "filters:written"];
    futures_util::future::join_all(points.map(overtaken_at)).await;
}

async fn overtaken_at(point: &str) {
    // The broker gives the partition to the other daemon as soon as the frozen one is silent.
    let settings = "[filter]\nlikes_min = 20\ncron = \"* * * * * *\"\n[amqp]\nheartbeat_s = 1\n";
    let world = World::new(&format!("filters_frozen_{}", &point[8..]), settings).await;
    world.publisher().await;
    seed(&world, target(42), 1..=30).await;
    let frozen = world.daemon_with(&[("TALLYD_PAUSE_POINT", point)]);
    is_frozen(&frozen).await;
    sqlx::query("UPDATE job_lock SET lease_until = NOW(6)").execute(&world.pool).await.unwrap();
    let other = world.daemon();
    let built = async || {
        let state = state(&world, target(42)).await;
        state.is_some_and(|state| state.shape.is_some() && state.building.is_none())
    };
    eventually(&format!("another one builds the filter after {point}"), built).await;
    let client = Client::new(&world.config).unwrap();
    for user in 1_000..1_030 {
        client.like(target(42), UserId(user), &[]).await.unwrap().counted().unwrap();
    }
    frozen.signal("CONT");
    let over = "SELECT COUNT(*) FROM job_run WHERE finished_at IS NOT NULL AND outcome = 'failed' \
                AND run = (SELECT MIN(run) FROM job_run)";
    eventually("the frozen run finds that it is overtaken", async || world.count(over).await == 1).await;
    assert!(frozen.stop().success());
    assert_no_false_no(&world, target(42), (1..=30).chain(1_000..1_030)).await;
    // It is full.
    assert!(refused(&world, target(42)).await > 990, "{point}");
    assert!(other.stop().success());
    world.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_filter_of_which_redis_has_lost_something_says_nothing_and_is_built_anew() {
    let world = World::new("filters_lost", BY_HAND).await;
    world.publisher().await;
    seed(&world, target(42), 1..=30).await;
    let [filter, config, added] = keys(&world, target(42));
    let mut redis = world.redis().await;
    for lost in ["the bits", "the noted", "the config", "the last moments"] {
        run(&world).await;
        assert_eq!(refused(&world, target(42)).await, 1_000, "{lost}");
        like_by_keys(&world, target(42), 1_000, true).await;
        let mut dropped = 1;
        match lost {
            "the bits" => redis.del(&filter).await.unwrap(),
            "the noted" => redis.del(&added).await.unwrap(),
            "the config" => {
                dropped = 0;
                redis.del(&config).await.unwrap()
            }
            _ => {
                let sql = "UPDATE job_run SET report = JSON_SET(report, '$.mark.data_set', 1)";
                sqlx::query(sql).execute(&world.pool).await.unwrap();
            }
        }
        if lost != "the last moments" {
            assert_eq!(refused(&world, target(42)).await, 0, "{lost}");
        }
        like_by_keys(&world, target(42), 1_001, true).await;
        sqlx::query("UPDATE counter SET update_at = UTC_TIMESTAMP(6)").execute(&world.pool).await.unwrap();
        let report = run(&world).await;
        assert_eq!((report.dropped, report.built), (dropped, 1), "{lost}");
        // What was counted a moment ago is remembered, if it is not in MySQL yet.
        assert_no_false_no(&world, target(42), (1..=30).chain([1_000, 1_001])).await;
        let recent = world.cache.keys.recent("video", world.cache.keys.bucket(target(42)));
        let () = redis.del(&recent).await.unwrap();
        let () = redis.del(&[&filter, &config, &added]).await.unwrap();
    }
    world.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn without_filters_no_key_of_one_is_made() {
    let world = World::new("filters_off", "").await;
    world.publisher().await;
    seed(&world, target(42), 1..=30).await;
    let daemon = world.daemon();
    daemon.logged("\"consuming\"").await;
    let client = Client::new(&world.config).unwrap();
    client.like(target(42), UserId(1_000), &[]).await.unwrap().counted().unwrap();
    assert_eq!(client.liked(UserId(1_000), &[target(42)]).await.unwrap(), [true]);
    // Nor does a producer that passes the keys make any, or one whose daemon has not built any yet.
    like_by_keys(&world, target(42), 1_001, true).await;
    assert!(daemon.stop().success());
    let mut redis = world.redis().await;
    let found: Vec<String> = redis.keys(format!("{}:filter:*", world.name)).await.unwrap();
    assert_eq!(found, Vec::<String>::new());
    assert_eq!(world.count("SELECT COUNT(*) FROM job_run WHERE job = 'filters'").await, 0);
    world.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_documented_rights_are_enough_for_filters() {
    let world = World::new("filters_rights", BY_HAND).await;
    let consumer = world.daemon();
    consumer.logged("\"consuming\"").await;
    seed(&world, target(42), 1..=30).await;
    let mut redis = world.redis().await;
    let manual = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/docs/operations.md")).unwrap();
    let mut login = Vec::new();
    for account in ["tallyd", "api"] {
        let name = format!("{}_{account}", world.name);
        let mut lines = manual.lines().filter_map(|line| line.strip_prefix(&format!("ACL SETUSER {account} ")));
        let rules = [lines.next().unwrap(), lines.find(|line| line.contains("~filter:*")).unwrap()].join(" ");
        let rules = rules.replace('~', &format!("~{}:", world.name));
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
    let client = Client::new(api).unwrap();
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
    // It looks lost now, is dropped, and one that is noted is folded.
    assert_eq!(run_with(daemon).await.dropped, 1);
    like_by_keys(&world, target(42), 1_002, true).await;
    assert_eq!(run_with(daemon).await.folded, 1);
    assert!(redis.exists::<_, bool>(&filter).await.unwrap());
    assert!(consumer.stop().success());
    for (name, _) in &login {
        let () = redis::cmd("ACL").arg("DELUSER").arg(name).query_async(&mut redis).await.unwrap();
    }
    world.close().await;
}
