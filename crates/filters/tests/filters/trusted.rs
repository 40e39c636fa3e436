//! In these cases a Bloom filter must not be trusted, because its "no" could be wrong.

use redis::AsyncCommands;
use tallyd_core::model::UserId;

use super::{BY_HAND, alone, assert_no_false_no, keys, refused, run, seed};
use crate::common::scripts::Clicked;
use crate::common::{World, as_api, eventually, stderr, target};

#[tokio::test(flavor = "multi_thread")]
async fn a_like_that_counts_nothing_is_in_the_filter_all_the_same() {
    let world = World::new("filters_same", &as_api(BY_HAND)).await;
    let daemon = world.daemon();
    daemon.logged("\"consuming\"").await;
    let publisher = world.publisher().await;
    seed(&world, target(42), 1..=30).await;
    let client = world.api_server();
    // According to MySQL, the user no longer likes the target. But the client undoes the unlike in Redis, because the
    // broker did not confirm it.
    let unlike = client.unlike(target(42), UserId(7), &[]).await.unwrap().counted().unwrap();
    world.drained(&publisher).await;
    assert_eq!(run(&world).await.built, 1);
    assert!(client.take_back(&unlike, &[]).await.unwrap());
    let same = client.like(target(42), UserId(7), &[]).await.unwrap();
    assert!(matches!(same, Clicked::Same { .. }), "{same:?}");
    world.drained(&publisher).await;
    let recent = world.cache.keys.recent("video", world.cache.keys.bucket(target(42)));
    let () = world.redis().await.del(&recent).await.unwrap();
    assert_no_false_no(&world, target(42), 1..=30).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_filter_that_more_like_than_were_put_into_it_is_taken_away_at_once() {
    let world = World::new("filters_lacking", BY_HAND).await;
    world.publisher().await;
    seed(&world, target(42), 1..=30).await;
    run(&world).await;
    assert_eq!(refused(&world, target(42)).await, 1_000);
    // An import, or a producer that doesn't pass the filter's keys, writes likes in the same way.
    seed(&world, target(42), 1_001..=1_030).await;
    let report = run(&world).await;
    assert_eq!((report.dropped, report.built), (1, 1));
    assert_no_false_no(&world, target(42), (1..=30).chain(1_001..=1_030)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn no_filter_of_another_epoch_is_believed_by_any_reader() {
    let world = World::new("filters_epoch", &as_api(BY_HAND)).await;
    world.publisher().await;
    seed(&world, target(42), 1..=30).await;
    run(&world).await;
    let never = UserId(2_000);
    let client = alone(&world);
    // In the first call the client reads the filter's shape, and asks the filter again. MySQL is unreachable.
    for _ in 0..2 {
        assert_eq!(client.liked(never, &[target(42)]).await.unwrap(), [false]);
    }
    let mut redis = world.redis().await;
    let epoch = world.cache.keys.filter_epoch();
    let ttl: i64 = redis.ttl(&epoch).await.unwrap();
    assert!((1..=3_600).contains(&ttl), "{ttl}");
    // Before the first pass, the test changes the filters' epoch in Redis. After a failover, this is the state of a
    // target that the run has not reached yet. Before the second pass, the test deletes the epoch. The epoch is also
    // missing after an hour without a run.
    let () = redis.hset(&epoch, "epoch", 1_000).await.unwrap();
    for _ in 0..2 {
        assert_eq!(refused(&world, target(42)).await, 0);
        // The client asks MySQL, which is unreachable. So a read fails, and a click counts without a check.
        let asks = || async { client.liked(never, &[target(42)]).await.is_err() };
        eventually("the filter is not trusted", asks).await;
        let unlike = client.unlike(target(42), never, &[]).await.unwrap();
        assert!(unlike.counted().is_some(), "a trusted filter shows that the click changes nothing");
        let recent = world.cache.keys.recent("video", world.cache.keys.bucket(target(42)));
        let () = redis.del(&recent).await.unwrap();
        let () = redis.del(&epoch).await.unwrap();
    }
    let report = run(&world).await;
    assert_eq!((report.dropped, report.built), (0, 0), "the run must write the epoch again");
    assert_eq!(refused(&world, target(42)).await, 1_000);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_run_has_built_stays_when_it_ends_too_early_or_lasts_long() {
    let world = World::new("filters_long", BY_HAND).await;
    world.publisher().await;
    seed(&world, target(42), 1..=30).await;
    assert_eq!(run(&world).await.built, 1);
    let execute = async |sql: &'static str| sqlx::query(sql).execute(&world.pool).await.unwrap();
    // The last run started two hours ago, sent its last heartbeat just now, and was then killed.
    execute(
        "UPDATE job_run SET started_at = started_at - INTERVAL 2 HOUR, finished_at = NULL, outcome = NULL, report = NULL, \
         heartbeat_at = NOW(6)",
    )
    .await;
    let report = run(&world).await;
    assert_eq!(
        (report.dropped, report.built, report.looked_at),
        (0, 0, 1),
        "the run checks all targets again and trusts the filter"
    );
    // No run was active during the last two hours.
    execute("UPDATE job_run SET started_at = started_at - INTERVAL 2 HOUR, finished_at = NULL, heartbeat_at = NULL")
        .await;
    let report = run(&world).await;
    assert_eq!((report.dropped, report.built), (1, 1));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_mark_from_the_future_has_all_targets_looked_at() {
    let world = World::new("filters_future", BY_HAND).await;
    world.publisher().await;
    seed(&world, target(42), 1..=30).await;
    assert_eq!(run(&world).await.built, 1);
    // This checkpoint is a day ahead, as after a run with a wrong clock of Redis.
    let ahead = "UPDATE job_run SET checkpoint = JSON_SET(checkpoint, '$.until', \
                 CAST(JSON_VALUE(checkpoint, '$.until') AS SIGNED) + 86400000000) WHERE job = 'filters'";
    assert_eq!(sqlx::query(ahead).execute(&world.pool).await.unwrap().rows_affected(), 1);
    seed(&world, target(43), 1..=30).await;
    assert_eq!(run(&world).await.built, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn filters_that_were_switched_off_or_shall_be_built_anew_are_not_trusted() {
    let mut world = World::new("filters_off_on", BY_HAND).await;
    let publisher = world.publisher().await;
    seed(&world, target(42), 1..=30).await;
    run(&world).await;
    let asked = world.tallyd(&["admin", "filters", "rebuild"]);
    assert!(asked.status.success(), "{}", stderr(&asked));
    let report = run(&world).await;
    assert_eq!((report.dropped, report.built), (1, 1));

    world.set("");
    let refused = world.tallyd(&["admin", "filters", "rebuild"]);
    assert!(stderr(&refused).contains("likes_min is 0"), "{}", stderr(&refused));
    let daemon = world.daemon();
    let forgotten = "SELECT COUNT(*) FROM job_run WHERE job = 'filters' AND checkpoint IS NOT NULL";
    eventually("a daemon without filters deletes the runs' checkpoints", || async {
        world.count(forgotten).await == 0
    })
    .await;
    // If the daemon stopped earlier, the runs' fences would stay in the queue and count as unknown messages.
    world.drained(&publisher).await;
    assert!(daemon.stop().success());
    world.set(BY_HAND);
    let report = run(&world).await;
    assert_eq!((report.dropped, report.built), (1, 1));
}

#[tokio::test(flavor = "multi_thread")]
async fn likes_that_are_counted_blindly_are_noted() {
    let world = World::new("filters_blind", &as_api(BY_HAND)).await;
    let daemon = world.daemon();
    daemon.logged("\"consuming\"").await;
    let publisher = world.publisher().await;
    seed(&world, target(42), 1..=30).await;
    run(&world).await;
    let client = world.api_server();
    for user in 100..110 {
        let counted = client.count(target(42), UserId(user), true, &[]).await.unwrap();
        client.publish_counted(&counted).await.unwrap();
    }
    // If the target has no filter, Redis' note about a user expires.
    client.count(target(43), UserId(1), true, &[]).await.unwrap();
    let left: i64 =
        redis::cmd("TTL").arg(&keys(&world, target(43))[2]).query_async(&mut world.redis().await).await.unwrap();
    assert!((1..=7 * 86_400).contains(&left), "{left}");
    world.drained(&publisher).await;
    assert_no_false_no(&world, target(42), (1..=30).chain(100..110)).await;
    run(&world).await;
    assert_no_false_no(&world, target(42), (1..=30).chain(100..110)).await;
}
