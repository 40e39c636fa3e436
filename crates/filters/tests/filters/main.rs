//! If a Bloom filter says that a user does not like a target, this "no" is always right. A "no" must stay right despite
//! concurrent builds, killed runs, lost data and concurrent clicks.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test ends at its first failure")]

mod asked;
mod by_daemon;
mod dropped;
mod faults;
mod kept;
mod trusted;

use redis::{AsyncCommands, Script};
use sqlx::AssertSqlSafe;
use tallyd_base::config::{Config, ServerUrl};
use tallyd_base::jobs::run::RunOptions;
use tallyd_base::jobs::runner::Ran;
use tallyd_base::runtime::progress::ProgressSink;
use tallyd_base::servers::Servers;
use tallyd_core::event::LikeEvent;
use tallyd_core::model::{Micros, Target, UserId};
use tallyd_filters::Filters;
use tallyd_filters::report::Report;
use tallyd_redis::bloom::Shape;
use tallyd_redis::filters::FilterState;
use tallyd_redis::keys::KindNames;
use tokio_util::sync::CancellationToken;

use common::World;
use common::scripts::{ApiServer, RECENT_KEEP};

use tallyd_testkit as common;

/// With these settings, each target with 20 or more likes has a filter. The test runs the filters' job, and the daemon
/// does not.
const BY_HAND: &str = "[filter]\nlikes_min = 20\nasked = true\ncron = \"\"\n";

type Redis = redis::aio::MultiplexedConnection;

/// Runs the job once.
async fn run(world: &World) -> Report {
    // On the heap: the future is so large that a test with several runs would overflow its stack.
    Box::pin(run_with(&world.config)).await
}

async fn run_with(config: &Config) -> Report {
    let servers = Servers::new(config).unwrap();
    let (filters, options) = (Filters::new(config), RunOptions::default());
    match tallyd_base::jobs::run::once(
        &servers,
        config,
        &filters,
        options,
        ProgressSink::Log,
        &CancellationToken::new(),
    )
    .await
    .unwrap()
    {
        Ran::Ended(report) => report,
        Ran::Held { owner, .. } => panic!("{owner} holds the lock"),
    }
}

/// Adds rows to MySQL, as if these users had liked the target long ago.
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

/// Returns true if the target has a filter and this user is neither in the filter nor noted beside it. Ignores the
/// recent clicks that Redis remembers.
async fn says_no(world: &World, redis: &mut Redis, target: Target, user: u64) -> bool {
    let [filter, config, added] = keys(world, target);
    loop {
        let shape: (Option<u64>, Option<u32>) = redis.hmget(&config, &["size", "hashIterations"]).await.unwrap();
        let epoch: Option<u64> = redis.hget(world.cache.keys.filter_epoch(), "epoch").await.unwrap();
        let (Some(size), Some(iterations)) = shape else { return false };
        let script = Script::new(include_str!("../../../../lua/filter_has.lua"));
        let mut call = script.key(&filter);
        call.key(&config).key(&added).arg(user).arg(epoch).arg(size);
        for bit in (Shape { size, iterations }).bits(UserId(user)) {
            call.arg(bit);
        }
        // If the script returns no integer, a run has replaced the filter, and this function tries again.
        if let redis::Value::Int(answer) = call.invoke_async::<redis::Value>(redis).await.unwrap() {
            return answer == 0;
        }
    }
}

/// Fails if the filter gives a "no" for one of these users. Also fails if there is no filter, because then the check
/// would be meaningless.
async fn assert_no_false_no(world: &World, target: Target, users: impl IntoIterator<Item = u64>) {
    assert!(refused(world, target).await > 900, "the target has no filter");
    assert_nobody_refused(world, target, users).await;
}

/// Fails if the filter gives a "no" for one of these users. Does not fail if there is no filter.
async fn assert_nobody_refused(world: &World, target: Target, users: impl IntoIterator<Item = u64>) {
    let mut redis = world.redis().await;
    for user in users {
        assert!(!says_no(world, &mut redis, target, user).await, "wrong answer for {target:?}, user {user}");
    }
}

/// Takes a thousand users who never liked the target, and returns for how many of them the filter gives a "no".
async fn refused(world: &World, target: Target) -> usize {
    let mut redis = world.redis().await;
    let mut refused = 0;
    for user in 5_000_000..5_001_000 {
        refused += usize::from(says_no(world, &mut redis, target, user).await);
    }
    refused
}

/// Makes a client that can't reach MySQL.
fn alone(world: &World) -> ApiServer {
    let mut config = world.api.clone();
    config.mysql.url = ServerUrl::from("mysql://nobody@127.0.0.1:1/none");
    ApiServer::new(&config)
}

/// Clicks as the Python client does: calls like.lua with the filter's keys, but without bits. The caller must be sure
/// that the click changes something.
async fn like_by_keys(world: &World, target: Target, user: u64, liked: bool) -> LikeEvent {
    remembered_by_keys(world, target, user, liked, RECENT_KEEP).await
}

/// Does the same as [`like_by_keys`], and makes Redis remember the click for `keep` seconds.
async fn remembered_by_keys(world: &World, target: Target, user: u64, liked: bool, keep: u64) -> LikeEvent {
    let (keys, bucket) = (&world.cache.keys, world.cache.keys.bucket(target));
    let script = Script::new(include_str!("../../../../lua/like.lua"));
    let counters = keys.counters("video", bucket);
    let mut call = script.key(&counters);
    let words = if liked { ["like", "0-"] } else { ["unlike", "0+"] };
    for key in keys.recent("video", bucket).iter().chain([&counters]).chain(&keys.filter("video", target)) {
        call.key(key);
    }
    call.arg(target.id.0).arg(1).arg(words[0]).arg(user).arg(keep).arg(words[1]);
    let answer: (i64, i64, Option<i64>) = call.invoke_async(&mut world.redis().await).await.unwrap();
    assert_eq!(answer.0, 1, "it counts");
    LikeEvent { target, user: UserId(user), at: Micros(answer.1), liked }
}
