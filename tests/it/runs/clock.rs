//! Tests events whose `at` comes from the producer's clock, and a server whose clock is wrong.

use std::process::Stdio;
use std::time::Duration;

use super::common::private::Private;
use super::common::{Model, World, as_api, body, drift, stdout, target};
use crate::common::scripts::ApiServer;
use tallyd_core::event::LikeEvent;
use tallyd_core::model::{Micros, UserId};
use tallyd_rabbitmq::Publisher;

/// Counts a like in Redis, and publishes it with the given `at`.
async fn like_at(world: &World, with: (&ApiServer, &Publisher), model: &mut Model, id: u64, at: Micros) {
    let (client, publisher) = with;
    let counted = client.count(target(id), UserId(1), true, &[]).await.unwrap();
    let event = LikeEvent { at, ..counted.event };
    model.apply(&event);
    world.publish(publisher, &[body(&event)]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn within_the_skew_of_a_producers_clock_nothing_is_judged_and_after_it_all_is() {
    let settings = "[reconcile]\nevent_clock = \"producer\"\nclock_skew_max = \"20s\"";
    let world = World::new("producer_clock", &as_api(settings)).await;
    let client = world.api_server();
    let (publisher, daemon) = (world.publisher().await, world.daemon());
    assert!(world.tallyd(&["reconcile"]).status.success());
    let mut model = Model::default();
    let with = (&client, &publisher);
    let now = world.cache.now().await.unwrap();
    // The clock of the first event is ahead, and the clock of the second event is behind. The third event is older than
    // `clock_skew_max`, so the run treats its target as quiet.
    like_at(&world, with, &mut model, 1, now.after(Duration::from_secs(15))).await;
    like_at(&world, with, &mut model, 2, now.before(Duration::from_secs(15))).await;
    like_at(&world, with, &mut model, 3, now.before(Duration::from_secs(60))).await;
    for id in 1..=3 {
        drift(&world, target(id), 2).await;
    }
    world.drained(&publisher).await;
    // The events of targets 1 and 2 are within `clock_skew_max` of each cut, so the run watches these targets. During
    // the watch these targets get no events, so the run can decide whether to repair.
    let report = world.report(&["reconcile", "--full"]);
    assert_eq!(
        (&report["repaired"], &report["busy"], &report["undecided"]),
        (&3.into(), &2.into(), &0.into()),
        "{report}"
    );

    // If a target gets events without a pause, the run can't decide whether to repair, and leaves the counter
    // unchanged.
    drift(&world, target(3), 2).await;
    let run = world.command().args(["reconcile", "--full", "--format", "json"]).stdout(Stdio::piped()).spawn().unwrap();
    let run = tokio::task::spawn_blocking(|| run.wait_with_output().unwrap());
    while !run.is_finished() {
        let now = world.cache.now().await.unwrap();
        like_at(&world, with, &mut model, 3, now.before(Duration::from_secs(1))).await;
        drift(&world, target(3), -1).await;
    }
    let report: serde_json::Value = serde_json::from_str(&stdout(&run.await.unwrap())).unwrap();
    assert_eq!((&report["undecided"], &report["repaired"]), (&1.into(), &0.into()), "{report}");
    assert!(
        report["cut"].is_i64(),
        "a target that is never quiet must not block the comparison of the other targets: {report}"
    );
    world.drained(&publisher).await;
    let report = world.report(&["reconcile", "--changed"]);
    assert_eq!((&report["undecided"], &report["repaired"]), (&0.into(), &1.into()), "{report}");
    world.redis_ends_as(&model, daemon).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_redis_whose_clock_is_ahead_hides_no_change_from_runs() {
    let redis = Private::start_ahead(Duration::from_secs(1_200)).await;
    let world = World::new("redis_ahead", &format!("[redis]\nurl = \"{}\"\n", redis.url())).await;
    assert!(world.cache.now().await.unwrap() > tallyd_base::runtime::clock::now().after(Duration::from_secs(1_000)));
    let (publisher, _daemon) = (world.publisher().await, world.daemon());
    assert_eq!(world.reconcile("--changed").await["ended"], "done");
    let like = LikeEvent { target: target(1), user: UserId(1), at: tallyd_base::runtime::clock::now(), liked: true };
    world.consumed(&publisher, &[body(&like)]).await;
    world.outbox_added().await;
    drift(&world, target(1), 2).await;
    let report = world.reconcile("--changed").await;
    assert_eq!((&report["checked"], &report["repaired"]), (&1.into(), &1.into()), "{report}");
}
