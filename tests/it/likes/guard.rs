//! If a user repeats a click, it is counted once, even on several API servers and from concurrent calls.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use redis::AsyncCommands;
use tallyd_base::config;
use tallyd_client::ClickLimits;
use tallyd_core::model::{Micros, Target, UserId};
use tokio::sync::Semaphore;

use crate::common::scripts::{ApiServer, Clicked, OnBoard, RECENT_KEEP};
use crate::common::{Dice, Model, World, as_api, eventually, target};

/// Starts a test environment, and waits until the daemon has loaded all buckets and has no work left.
async fn loaded(name: &str, settings: &str) -> (World, crate::common::Daemon) {
    let world = World::new(name, &as_api(settings)).await;
    let daemon = world.consuming().await;
    assert!(world.tallyd(&["reconcile"]).status.success());
    (world, daemon)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_click_that_changes_nothing_is_not_counted_and_not_published() {
    let (world, daemon) = loaded("guard_same", "[[board]]\nname = \"likes\"\nperiod = \"total\"\n").await;
    let publisher = world.broker.connect_publisher("test").await.unwrap();
    let client = world.api_server();
    let (user, on) = (UserId(7), [OnBoard { board: "likes", member: b"42" }]);
    let first = client.like(target(42), user, &on).await.unwrap().counted().unwrap();
    assert_eq!((first.count, first.boards_failed), (Some(1), 0));
    assert!(matches!(client.like(target(42), user, &on).await.unwrap(), Clicked::Same { count: Some(1), .. }));
    let second = client.unlike(target(42), user, &on).await.unwrap().counted().unwrap();
    assert!(second.event.at > first.event.at);
    assert!(matches!(client.unlike(target(42), user, &on).await.unwrap(), Clicked::Same { count: Some(0), .. }));
    let mut redis = world.redis().await;
    let board: u64 = redis.zcard(world.cache.keys.board("likes", "total")).await.unwrap();
    assert_eq!(board, 0);
    world.drained(&publisher).await;
    assert!(daemon.stop().success());
    let mut model = Model::default();
    model.apply(&first.event);
    model.apply(&second.event);
    world.assert_equals(&model).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_redis_has_forgotten_is_asked_from_mysql() {
    let (world, _daemon) = loaded("guard_mysql", "").await;
    let publisher = world.broker.connect_publisher("test").await.unwrap();
    let client = world.api_server();
    client.like(target(42), UserId(7), &[]).await.unwrap().counted().unwrap();
    world.drained(&publisher).await;
    let mut redis = world.redis().await;
    let recent = world.cache.keys.recent("video", world.cache.keys.bucket(target(42)));
    let () = redis.del(&recent).await.unwrap();
    assert!(matches!(client.like(target(42), UserId(7), &[]).await.unwrap(), Clicked::Same { count: Some(1), .. }));
    assert!(redis.hexists::<_, _, bool>(&recent[0], "42:7").await.unwrap(), "Redis must remember the click");
    assert_eq!(client.unlike(target(42), UserId(7), &[]).await.unwrap().counted().unwrap().count, Some(0));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_thousand_tasks_that_click_on_ten_targets_are_counted_as_they_are_in_the_end() {
    let (world, _daemon) = loaded("guard_crowd", "").await;
    let publisher = world.broker.connect_publisher("test").await.unwrap();
    let client = Arc::new(world.api_server());
    let mut tasks = tokio::task::JoinSet::new();
    // At most 100 calls run at the same time. With more calls, MySQL could answer after the client's timeout, and the
    // client would count clicks without a check.
    let at_once = Arc::new(Semaphore::new(100));
    for task in 0..1_000_u64 {
        let (client, at_once) = (Arc::clone(&client), Arc::clone(&at_once));
        tasks.spawn(async move {
            let mut dice = Dice::of_run(task + 1);
            let mut events = Vec::new();
            for _ in 0..5 {
                // 50 users, and 20 concurrent tasks for each user.
                let (target, user) = (target(1 + dice.below(10)), UserId(1 + task % 50));
                let _turn = at_once.acquire().await.unwrap();
                let clicked = match dice.percent(60) {
                    true => client.like(target, user, &[]).await,
                    false => client.unlike(target, user, &[]).await,
                };
                events.extend(clicked.unwrap().counted().map(|counted| counted.event));
            }
            events
        });
    }
    let mut events = Vec::new();
    while let Some(done) = tasks.join_next().await {
        events.extend(done.unwrap());
    }
    // For each user and target, likes and unlikes must alternate. If they do not, a click was counted twice.
    let mut pairs: HashMap<(Target, UserId), Vec<(Micros, bool)>> = HashMap::new();
    let mut model = Model::default();
    for event in &events {
        pairs.entry((event.target, event.user)).or_default().push((event.at, event.liked));
        model.apply(event);
    }
    for clicks in pairs.values_mut() {
        clicks.sort_unstable();
        assert!(clicks.iter().enumerate().all(|(turn, (_, liked))| *liked == (turn % 2 == 0)), "{clicks:?}");
        assert!(clicks.windows(2).all(|pair| pair[0].0 < pair[1].0), "{clicks:?}");
    }
    world.drained(&publisher).await;
    // MySQL also has rows of users who unliked a target that they had never liked.
    let likes = world.count("SELECT COUNT(*) FROM like_record WHERE is_del = 0").await;
    assert_eq!(likes, model.rows.values().filter(|(_, is_del)| !is_del).count() as i64);
    world.assert_redis_equals(&model).await;
    let report = world.report(&["reconcile"]);
    assert_eq!(report["drifted"], 0, "{report}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_click_is_remembered_for_its_time_and_forgotten_after_that() {
    const KEEP: i64 = RECENT_KEEP as i64;
    let world = World::new("guard_turns", &as_api("")).await;
    world.publisher().await;
    let client = world.api_server();
    let bucket = world.cache.keys.bucket(target(42));
    let [recent, former] = world.cache.keys.recent("video", bucket);
    let mut redis = world.redis().await;
    // Makes the hash of recent clicks this many seconds older. At the next click Redis renames a hash of that age to
    // `former`, and starts a new one.
    let mut older = async |seconds: i64| {
        let _: i64 = redis.hincr(&recent, "_", -seconds).await.unwrap();
        client.like(target(42), UserId(8), &[]).await.unwrap();
        client.unlike(target(42), UserId(8), &[]).await.unwrap();
        let is_recent: bool = redis.hexists(&recent, "42:7").await.unwrap();
        let is_former: bool = redis.hexists(&former, "42:7").await.unwrap();
        (is_recent, is_former)
    };
    client.like(target(42), UserId(7), &[]).await.unwrap().counted().unwrap();
    assert_eq!(older(KEEP / 2).await, (true, false), "half of the time");
    assert_eq!(older(KEEP / 2).await, (false, true), "the whole time");
    let again = client.like(target(42), UserId(7), &[]).await.unwrap();
    assert!(matches!(again, Clicked::Same { .. }), "{again:?}");
    assert_eq!(older(KEEP / 2).await, (false, true), "half of the time again");
    assert_eq!(older(KEEP / 2).await, (false, false), "twice the time");
    let lives: i64 = world.redis().await.ttl(&recent).await.unwrap();
    assert!((2 * KEEP..=3 * KEEP).contains(&lives), "{lives}");
}

#[tokio::test(flavor = "multi_thread")]
async fn clicks_are_forgotten_in_time_after_the_clock_went_back() {
    let world = World::new("guard_turned_back", &as_api("")).await;
    world.publisher().await;
    let client = world.api_server();
    let [recent, former] = world.cache.keys.recent("video", world.cache.keys.bucket(target(42)));
    let mut redis = world.redis().await;
    let first = client.like(target(42), UserId(7), &[]).await.unwrap().counted().unwrap();
    // The hash contains its start time. The test moves this start time a day ahead, as if Redis' clock had been wrong
    // when the hash began.
    let () = redis.hset(&recent, "_", first.event.at.0 / 1_000_000 + 86_400).await.unwrap();
    client.like(target(42), UserId(8), &[]).await.unwrap().counted().unwrap();
    assert!(
        redis.hexists::<_, _, bool>(&former, "42:7").await.unwrap(),
        "after the click, Redis must have rotated the hashes"
    );
    let began: i64 = redis.hget(&recent, "_").await.unwrap();
    assert!(began < first.event.at.0 / 1_000_000 + 3_600, "{began}");
}

#[tokio::test(flavor = "multi_thread")]
async fn at_never_goes_back_for_a_user_and_a_target() {
    let world = World::new("guard_clock", &as_api("")).await;
    world.publisher().await;
    let client = world.api_server();
    let first = client.like(target(42), UserId(7), &[]).await.unwrap().counted().unwrap();
    // The test changes the time of the click as if the server's clock had been an hour ahead.
    let ahead = first.event.at.0 + 3_600_000_000;
    let [recent, _] = world.cache.keys.recent("video", world.cache.keys.bucket(target(42)));
    let mut redis = world.redis().await;
    let () = redis.hset(&recent, "42:7", format!("{ahead}+")).await.unwrap();
    let second = client.unlike(target(42), UserId(7), &[]).await.unwrap().counted().unwrap();
    assert_eq!(second.event.at.0, ahead + 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_click_wins_against_a_row_that_redis_clock_is_behind() {
    let (world, _daemon) = loaded("guard_behind", "").await;
    let publisher = world.broker.connect_publisher("test").await.unwrap();
    let client = world.api_server();
    // These rows come from a server whose clock was two minutes ahead. Users 7 and 8 like the target, and user 9 no
    // longer likes it.
    let ahead = "UTC_TIMESTAMP(6) + INTERVAL 2 MINUTE";
    let rows = format!(
        "INSERT INTO like_record VALUES (1, 42, 7, 0, {ahead}), (1, 42, 8, 0, {ahead}), (1, 42, 9, 1, {ahead})"
    );
    let counter = "INSERT INTO counter (kind, target_id, metric, slot, value, update_at) VALUES (1, 42, 1, 0, 2, UTC_TIMESTAMP(6))";
    for sql in [rows.as_str(), counter] {
        sqlx::query(sqlx::AssertSqlSafe(sql)).execute(&world.pool).await.unwrap();
    }
    assert!(world.tallyd(&["reconcile", "--full"]).status.success());
    assert_eq!(client.unlike(target(42), UserId(7), &[]).await.unwrap().counted().unwrap().count, Some(1));
    assert_eq!(client.like(target(42), UserId(9), &[]).await.unwrap().counted().unwrap().count, Some(2));
    // Nothing is counted. The client also publishes an event that is newer than the row.
    let Clicked::Same { at, .. } = client.like(target(42), UserId(8), &[]).await.unwrap() else { panic!("counted") };
    assert!(at.0 > tallyd_base::runtime::clock::now().0 + 60_000_000, "{at}");
    world.drained(&publisher).await;
    let likers = "SELECT COUNT(*) FROM like_record WHERE target_id = 42 AND is_del = 0 AND user_id IN (8, 9)";
    assert_eq!((world.count(likers).await, world.counters().await[&target(42)]), (2, 2));
}

#[tokio::test(flavor = "multi_thread")]
async fn without_mysql_a_click_counts_all_the_same() {
    let world = World::new("guard_away", &as_api("")).await;
    world.publisher().await;
    let mut settings = world.api.clone();
    settings.mysql.url = config::ServerUrl::from("mysql://nobody@127.0.0.1:1/none");
    let client = ApiServer::new(&settings);
    assert_eq!(client.like(target(42), UserId(7), &[]).await.unwrap().counted().unwrap().count, None);
    assert!(matches!(client.like(target(42), UserId(7), &[]).await.unwrap(), Clicked::Same { .. }));
}

#[tokio::test(flavor = "multi_thread")]
async fn who_clicks_too_often_is_told_how_long_to_wait() {
    let world = World::new("guard_limit", &as_api("")).await;
    world.publisher().await;
    let limits = ClickLimits { rate_likes_max: 3, rate_window: Duration::from_secs(5) };
    let client = ApiServer::limited(&world.api, limits);
    for id in 1..=3 {
        assert!(client.like(target(id), UserId(7), &[]).await.unwrap().counted().is_some());
    }
    let limited = client.like(target(4), UserId(7), &[]).await.unwrap();
    assert!(matches!(limited, Clicked::Limited { wait } if wait.as_millis() <= 5_000), "{limited:?}");
    assert!(
        client.like(target(4), UserId(8), &[]).await.unwrap().counted().is_some(),
        "other users must not be limited"
    );
    let again = async || client.like(target(4), UserId(7), &[]).await.unwrap().counted().is_some();
    eventually("the window ends", again).await;
}
