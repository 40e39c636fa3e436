//! During a run that builds Bloom filters, the run is killed or frozen, or Redis loses some or all of its data.

use crate::common::{Daemon, World, as_api, event_of, eventually, target};
use redis::AsyncCommands;
use std::os::unix::process::ExitStatusExt;
use tallyd_core::model::UserId;
use tallyd_filters::FAULT_POINTS;

use super::{BY_HAND, assert_no_false_no, assert_nobody_refused, keys, like_by_keys, refused, run, seed, state};

#[tokio::test(flavor = "multi_thread")]
async fn a_daemon_that_dies_at_any_step_of_a_build_is_made_up_for() {
    for (number, point) in FAULT_POINTS.into_iter().enumerate() {
        let settings = "[filter]\nlikes_min = 20\nasked = true\ncron = \"* * * * * *\"\n";
        let world = World::new(&format!("filters_dies_{number}"), settings).await;
        let client = world.api_server();
        let publisher = world.publisher().await;
        seed(&world, target(42), 1..=30).await;
        let mut daemon = world.daemon_with(&[("TALLYD_FAULT_POINT", point)]);
        assert_eq!(daemon.wait().signal(), Some(6), "{point}");
        // A user likes the target after the crash, before another run finishes the job.
        client.like(target(42), UserId(1_000), &[]).await.unwrap();
        assert_nobody_refused(&world, target(42), 1..=30).await;
        world.end_leases().await;
        let daemon = world.daemon();
        let made_good = async || {
            let state = state(&world, target(42)).await;
            let is_done =
                world.count("SELECT COUNT(*) FROM job_run WHERE job = 'filters' AND outcome = 'done'").await > 0;
            is_done
                && state.is_some_and(|state| state.shape.is_some() && state.building.is_none() && state.waiting == 0)
        };
        eventually(&format!("the filter is completed after {point}"), made_good).await;
        world.drained(&publisher).await;
        world.outbox_added().await;
        assert_no_false_no(&world, target(42), (1..=30).chain([1_000])).await;
        assert_eq!(refused(&world, target(42)).await, 1_000, "{point}");
        assert!(daemon.stop().success());
        let mut redis = world.redis().await;
        assert!(!redis.exists::<_, bool>(world.cache.keys.next_filter("video", target(42))).await.unwrap(), "{point}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_flush_in_the_middle_of_a_build_leaves_no_half_of_a_filter() {
    // The test runs the three cases at the same time, because each case must wait for a second run.
    let points = ["filters:begun", "filters:fenced", "filters:written"];
    futures_util::future::join_all(points.map(flushed_at)).await;
}

async fn flushed_at(point: &str) {
    let settings = "[filter]\nlikes_min = 20\nasked = true\ncron = \"* * * * * *\"\n";
    let world = World::new(&format!("filters_flush_{}", &point[8..]), &as_api(settings)).await;
    world.publisher().await;
    seed(&world, target(42), 1..=30).await;
    let daemon = world.daemon_with(&[("TALLYD_PAUSE_POINT", point)]);
    is_frozen(&daemon).await;
    let mut redis = world.redis().await;
    let all: Vec<String> = redis.keys(format!("{}:*", world.name)).await.unwrap();
    let () = redis.del(all).await.unwrap();
    // Redis has no filter now. A user likes the target before the run continues with its next step.
    let client = world.api_server();
    event_of(client.like(target(42), UserId(1_000), &[]).await.unwrap());
    daemon.signal("CONT");
    let built = async || {
        assert_nobody_refused(&world, target(42), (1..=30).chain([1_000])).await;
        let state = state(&world, target(42)).await;
        let is_done = world.count("SELECT COUNT(*) FROM job_run WHERE job = 'filters' AND outcome = 'done'").await > 0;
        is_done && state.is_some_and(|state| state.shape.is_some() && state.building.is_none())
    };
    eventually(&format!("the filter is built after {point}"), built).await;
    assert_eq!(refused(&world, target(42)).await, 1_000);
}

/// Waits until a daemon has stopped itself at its pause point.
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
    // As soon as the frozen daemon misses heartbeats, the broker gives its partition to the other daemon.
    let settings = "[filter]\nlikes_min = 20\nasked = true\ncron = \"* * * * * *\"\n[amqp]\nheartbeat_s = 1\n";
    let world = World::new(&format!("filters_frozen_{}", &point[8..]), settings).await;
    let publisher = world.publisher().await;
    seed(&world, target(42), 1..=30).await;
    let frozen = world.daemon_with(&[("TALLYD_PAUSE_POINT", point)]);
    is_frozen(&frozen).await;
    world.end_leases().await;
    let _other = world.daemon();
    let built = async || {
        let state = state(&world, target(42)).await;
        state.is_some_and(|state| state.shape.is_some() && state.building.is_none())
    };
    eventually(&format!("another run builds the filter while the first run is frozen at {point}"), built).await;
    let client = world.api_server();
    for user in 1_000..1_030 {
        client.like(target(42), UserId(user), &[]).await.unwrap();
    }
    frozen.signal("CONT");
    let over = "SELECT COUNT(*) FROM job_run WHERE finished_at IS NOT NULL AND run = (SELECT MIN(run) FROM job_run)";
    eventually("the resumed run notices that another run replaced it", async || world.count(over).await == 1).await;
    assert!(frozen.stop().success());
    world.drained(&publisher).await;
    world.outbox_added().await;
    assert_no_false_no(&world, target(42), (1..=30).chain(1_000..1_030)).await;
    // The filter answers "no" for users who never liked the target.
    assert!(refused(&world, target(42)).await > 990, "{point}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_filter_of_which_redis_has_lost_something_says_nothing_and_is_built_anew() {
    let world = World::new("filters_lost", &as_api(BY_HAND)).await;
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
                let sql = "UPDATE job_run SET checkpoint = JSON_SET(checkpoint, '$.data_set', 1)";
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
        // MySQL does not have the newest likes yet, but Redis still has a note of each.
        assert_no_false_no(&world, target(42), (1..=30).chain([1_000, 1_001])).await;
        let recent = world.cache.keys.recent("video", world.cache.keys.bucket(target(42)));
        let () = redis.del(&recent).await.unwrap();
        let () = redis.del(&[&filter, &config, &added]).await.unwrap();
    }
}
