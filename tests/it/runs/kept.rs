//! A run keeps hints about targets for the next run.

use tallyd_core::model::{Micros, UserId};

use super::common::{as_api, body, drift, target};
use super::settled;

#[tokio::test(flavor = "multi_thread")]
async fn many_drifts_that_were_seen_are_few_of_what_a_run_compares() {
    let (world, daemon, model) = settled("seen_many", 2_600, "").await;
    for id in 1..=120 {
        drift(&world, target(id), 1).await;
    }
    sqlx::query(
        "INSERT INTO drift_seen (kind, target_id, metric, drift, seen_at) \
         SELECT kind, target_id, metric, 1, NOW(6) FROM counter WHERE target_id <= 120",
    )
    .execute(&world.pool)
    .await
    .unwrap();
    let report = world.report(&["reconcile", "--changed"]);
    assert_eq!((&report["ended"], &report["repaired"]), (&"done".into(), &120.into()), "{report}");
    assert_eq!(
        (&report["checked"], world.count("SELECT COUNT(*) FROM drift_seen").await),
        (&2_600.into(), 0),
        "{report}"
    );
    world.redis_ends_as(&model, daemon).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_kept_target_is_compared_though_it_changed_long_ago() {
    let (world, daemon, model) = settled("seen", 20, "").await;
    drift(&world, target(7), 2).await;
    sqlx::query("UPDATE counter SET update_at = update_at - INTERVAL 1 DAY").execute(&world.pool).await.unwrap();
    let kept = || async { world.count("SELECT COUNT(*) FROM drift_seen").await };
    assert_eq!(world.report(&["reconcile", "--changed"])["checked"], 0, "no target has changed lately");
    sqlx::query("INSERT INTO drift_seen (kind, target_id, metric, drift, seen_at) VALUES (1, 7, 1, 0, NOW(6))")
        .execute(&world.pool)
        .await
        .unwrap();
    let dry = world.report(&["reconcile", "--changed", "--dry-run"]);
    assert_eq!((&dry["drifted"], &dry["repaired"]), (&1.into(), &0.into()), "{dry}");
    assert_eq!(kept().await, 1, "a dry run must not delete a hint");
    let report = world.report(&["reconcile", "--changed"]);
    assert_eq!((&report["repaired"], &report["drift_sum"]), (&1.into(), &2.into()), "{report}");
    assert_eq!(kept().await, 0, "the run must delete the hint");
    world.redis_ends_as(&model, daemon).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_like_that_is_written_an_hour_late_is_given_back_to_redis() {
    let (world, daemon, mut model) = settled("late", 3, &as_api("")).await;
    let client = world.api_server();
    let mut event = client.count(target(50), UserId(7), true, &[]).await.unwrap().event;
    assert_eq!(world.report(&["reconcile"])["repaired"], 1, "Redis has a like that MySQL lacks");
    // Later the event arrives, because an operator replays a dead letter or because the API server has kept the event.
    event.at = Micros(event.at.0 - 3_600_000_000);
    model.apply(&event);
    let publisher = world.publisher().await;
    world.consumed(&publisher, &[body(&event)]).await;
    let report = world.report(&["reconcile", "--changed"]);
    assert_eq!((&report["ended"], &report["repaired"]), (&"done".into(), &1.into()), "{report}");
    world.redis_ends_as(&model, daemon).await;
}
