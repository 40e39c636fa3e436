//! Redis or MySQL is unreachable, loses its connections, or answers too late.

use super::common::private::Private;
use super::common::proxy::Proxy;
use super::common::{World, eventually};
use super::{Counts, METRICS, assert_exact};
#[cfg(feature = "fault-points")]
use {
    tallyd_core::event::encode_count,
    tallyd_core::model::{TargetId, UserId},
};

#[tokio::test(flavor = "multi_thread")]
async fn calls_that_time_out_and_run_late_add_nothing_twice() {
    let world = World::new("outbox_late", &format!("[redis]\ntimeout_ms = 200\n{METRICS}")).await;
    let (redis, url) = Proxy::before(world.config.redis.url.expose()).await;
    let daemon = world.consuming_with(&[("TALLYD__REDIS__URL", &url)]).await;
    let publisher = world.publisher().await;
    let mut counts = Counts::of(30);
    for round in 0..4 {
        world.publish(&publisher, &counts.some(100)).await;
        // In every second round, delayed calls reach Redis after the daemon has repeated these calls. In the other
        // rounds, Redis runs a call but its answer is lost.
        if round % 2 == 0 {
            redis.hold()
        } else {
            redis.mute()
        }
        world.publish(&publisher, &counts.some(100)).await;
        // The daemon writes to MySQL even while Redis does not answer.
        world.drained(&publisher).await;
        let failed = |log: &str| log.matches("outage-begun").count() > round;
        eventually("a call times out", || async { failed(&daemon.log()) }).await;
        world.publish(&publisher, &counts.some(100)).await;
        if round % 2 == 0 {
            redis.release()
        } else {
            redis.cut()
        }
        let over = |log: &str| log.matches("outage-over").count() > round;
        eventually("Redis answers again", || async { over(&daemon.log()) }).await;
    }
    assert_exact(&world, &publisher, &counts).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn connections_that_are_cut_again_and_again_lose_and_double_nothing() {
    let world = World::new("outbox_cut", &format!("[consumer]\nbatch_events_max = 50\n{METRICS}")).await;
    let (redis, redis_url) = Proxy::before(world.config.redis.url.expose()).await;
    let (mysql, mysql_url) = Proxy::before(world.config.mysql.url.expose()).await;
    let _daemon = world.consuming_with(&[("TALLYD__REDIS__URL", &redis_url), ("TALLYD__MYSQL__URL", &mysql_url)]).await;
    let publisher = world.publisher().await;
    let mut counts = Counts::of(30);
    for round in 0..30 {
        world.publish(&publisher, &counts.some(60)).await;
        if round % 3 == 0 { mysql.cut() } else { redis.cut() }
    }
    assert_exact(&world, &publisher, &counts).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_redis_that_is_frozen_gets_everything_once_when_it_goes_on() {
    let redis = Private::start(&[]).await;
    let settings = format!("[redis]\nurl = \"{}\"\ntimeout_ms = 200\n{METRICS}", redis.url());
    let world = World::new("outbox_redis_frozen", &settings).await;
    let (daemon, publisher) = (world.consuming().await, world.publisher().await);
    let mut counts = Counts::of(30);
    for round in 0..3 {
        redis.signal("STOP");
        world.consumed(&publisher, &counts.some(100)).await;
        let failed = |log: &str| log.matches("outage-begun").count() > round;
        eventually("a call times out", || async { failed(&daemon.log()) }).await;
        redis.signal("CONT");
        let over = |log: &str| log.matches("outage-over").count() > round;
        eventually("Redis answers again", || async { over(&daemon.log()) }).await;
    }
    assert_exact(&world, &publisher, &counts).await;
}

/// Limits the server's memory. The server refuses all writes with the limit 1, and no write with 0.
async fn limit_memory(redis: &Private, bytes: &str) {
    let limit = redis::cmd("CONFIG").arg("SET").arg("maxmemory").arg(bytes).to_owned();
    let () = limit.query_async(&mut redis.connect().await).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_redis_whose_memory_is_full_gets_everything_once_when_it_has_room() {
    let redis = Private::start(&[]).await;
    let settings = format!("[redis]\nurl = \"{}\"\n{METRICS}", redis.url());
    let world = World::new("outbox_full", &settings).await;
    let (daemon, publisher) = (world.consuming().await, world.publisher().await);
    let mut counts = Counts::of(30);
    world.publish(&publisher, &counts.some(100)).await;
    assert_exact(&world, &publisher, &counts).await;
    limit_memory(&redis, "1").await;
    world.publish(&publisher, &counts.some(100)).await;
    daemon.logged("outage-begun").await;
    world.consumed(&publisher, &counts.some(100)).await;
    limit_memory(&redis, "0").await;
    assert_exact(&world, &publisher, &counts).await;
}

#[cfg(feature = "fault-points")]
#[tokio::test(flavor = "multi_thread")]
async fn a_board_gets_rows_that_it_could_not_take_at_first() {
    let redis = Private::start(&[]).await;
    let board = "[metrics]\nlike = 1\nview = 3\n[[rule]]\nmetric = \"view\"\nboard = \"seen\"\n\
        [[board]]\nname = \"seen\"\nperiod = \"total\"\nscore = [\"view\"]\n";
    let world = World::new("outbox_board", &format!("[redis]\nurl = \"{}\"\n{board}", redis.url())).await;
    let daemon = world.consuming_with(&[("TALLYD_PAUSE_POINT", "outbox:amidst")]).await;
    let publisher = world.publisher().await;
    let view = encode_count(TargetId(1), ("video", "view"), 1, tallyd_base::runtime::clock::now(), "a view", None);
    world.publish(&publisher, &[(UserId(1), view)]).await;
    eventually("the counter has the view", || async { daemon.is_stopped() }).await;
    limit_memory(&redis, "1").await;
    daemon.signal("CONT");
    daemon.logged("adding the outbox to Redis failed").await;
    limit_memory(&redis, "0").await;
    world.counted(&publisher).await;
    let score = redis::cmd("ZSCORE").arg(world.cache.keys.board("seen", "total")).arg(1).to_owned();
    let score: Option<i64> = score.query_async(&mut redis.connect().await).await.unwrap();
    assert_eq!(score, Some(1));
}
