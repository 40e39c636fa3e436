//! The daemon is killed between any two steps, and other daemons take over.

use sqlx::AssertSqlSafe;

use super::common::{World, stderr};
use super::{Counts, METRICS, assert_exact};

/// The fault points that the daemon reaches with a batch, in order.
const POINTS: [&str; 5] =
    ["consumer:before-commit", "consumer:after-commit", "outbox:adding", "outbox:amidst", "outbox:added"];

/// Crashes a daemon at each fault point, and later another daemon at some of these points. Almost every target is in a
/// separate bucket, so the daemon needs several pipelines to add one batch to Redis.
async fn killed_everywhere(name: &str, settings: &str) {
    let world = World::new(name, &format!("[redis]\nbucket_bits = 12\n{settings}\n{METRICS}")).await;
    let publisher = world.publisher().await;
    let mut counts = Counts::of(1_500);
    for point in POINTS.into_iter().chain(["outbox:added", "outbox:amidst", "consumer:after-commit"]) {
        world.publish(&publisher, &counts.each()).await;
        let crashed = world.command().env("TALLYD_FAULT_POINT", point).output().unwrap();
        assert!(stderr(&crashed).contains("fault-point"), "{}", stderr(&crashed));
    }
    let _daemon = world.daemon();
    assert_exact(&world, &publisher, &counts).await;
}

#[tokio::test]
async fn a_daemon_that_dies_at_any_step_adds_each_count_once() {
    killed_everywhere("outbox_packed", "").await;
}

#[tokio::test]
async fn a_daemon_that_dies_at_any_step_adds_each_count_once_in_hashes_of_targets() {
    killed_everywhere("outbox_entity", "layout = \"entity\"").await;
}

#[tokio::test]
async fn a_daemon_that_dies_at_any_step_adds_each_count_once_in_keys_of_numbers() {
    killed_everywhere("outbox_string", "layout = \"string\"").await;
}

#[tokio::test]
async fn daemons_that_take_over_from_each_other_add_each_count_once() {
    let settings = format!("[amqp]\npartitions = 3\n[consumer]\nbatch_events_max = 50\n{METRICS}");
    let world = World::new("outbox_two", &settings).await;
    let mut daemon = world.consuming().await;
    let publisher = world.publisher().await;
    let mut counts = Counts::of(30);
    for _ in 0..5 {
        world.publish(&publisher, &counts.some(400)).await;
        let next = world.daemon();
        next.logged("\"started\"").await;
        daemon.kill();
        daemon = next;
    }
    assert_exact(&world, &publisher, &counts).await;
}

#[tokio::test]
async fn a_daemon_that_was_frozen_with_rows_in_hand_adds_nothing_twice() {
    let world = World::new("outbox_frozen", METRICS).await;
    let publisher = world.publisher().await;
    let mut counts = Counts::of(30);
    let frozen = world.consuming_with(&[("TALLYD_PAUSE_POINT", "outbox:adding")]).await;
    world.publish(&publisher, &counts.some(100)).await;
    // The frozen daemon has read the first rows of the outbox. Another daemon adds these rows and the later rows to
    // Redis.
    super::eventually("a row is written", || async { world.count("SELECT COUNT(*) FROM outbox").await > 0 }).await;
    let _daemon = world.daemon();
    world.publish(&publisher, &counts.some(100)).await;
    let added = "SELECT CAST(COALESCE(MAX(applied), 0) AS SIGNED) FROM outbox_state";
    super::eventually("another daemon adds all rows", || async { world.count(added).await > 0 }).await;
    frozen.signal("CONT");
    assert_exact(&world, &publisher, &counts).await;
    assert!(frozen.stop().success());
    assert_exact(&world, &publisher, &counts).await;
}

/// The test saves and restores these tables, as a restore of MySQL does. The marks in Redis refer to rows of these
/// tables.
const TABLES: [&str; 3] = ["outbox", "outbox_state", "partition_owner"];

/// MySQL is restored to an older state. If `lives` is true, a daemon runs during the restore.
async fn restored(name: &str, lives: bool) {
    let world = World::new(name, &format!("[consumer]\nbatch_events_max = 20\n{METRICS}")).await;
    let (daemon, publisher) = (world.consuming().await, world.publisher().await);
    let mut counts = Counts::of(30);
    world.publish(&publisher, &counts.some(100)).await;
    world.counted(&publisher).await;
    let execute = async |sql: String| {
        sqlx::raw_sql(AssertSqlSafe(sql)).execute(&world.pool).await.unwrap();
    };
    for table in TABLES {
        execute(format!("CREATE TABLE saved_{table} AS SELECT * FROM {table}")).await;
    }
    world.publish(&publisher, &counts.some(400)).await;
    world.counted(&publisher).await;
    let back = TABLES.map(|table| format!("DELETE FROM {table}; INSERT INTO {table} SELECT * FROM saved_{table};"));
    let back = format!("BEGIN; {} COMMIT", back.concat());
    let daemon = if lives {
        execute(back).await;
        daemon
    } else {
        assert!(daemon.stop().success());
        execute(back).await;
        world.daemon()
    };
    // There are few buckets, so each batch adds to buckets that already have a mark.
    for _ in 0..5 {
        world.publish(&publisher, &counts.some(20)).await;
        assert_exact(&world, &publisher, &counts).await;
    }
    daemon.logged("mysql-went-back").await;
}

#[tokio::test]
async fn counts_reach_redis_after_mysql_was_restored() {
    restored("outbox_restored", false).await;
}

#[tokio::test]
async fn counts_reach_redis_after_mysql_went_back_under_a_daemon() {
    restored("outbox_failover", true).await;
}
