//! Drift that the events themselves tell of.

use tallyd::client::Client;
use tallyd::model::UserId;

use super::common::{assert_redis_equals, drift, eventually, target};
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
    assert_redis_equals(&world, &model).await;
    assert!(daemon.stop().success());
    world.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_drift_is_seen_by_the_events_and_looked_at_first() {
    let (world, daemon, model) = settled("seen", 20, "").await;
    let model = std::cell::RefCell::new(model);
    let client = Client::new(&world.api).unwrap();
    drift(&world, target(7), 2).await;
    let user = std::cell::Cell::new(1_000);
    let seen = || async { world.count("SELECT COUNT(*) FROM drift_seen").await == 1 };
    eventually("the events tell of it", || async {
        user.set(user.get() + 1);
        for id in [7, 8] {
            let counted = client.like(target(id), UserId(user.get()), &[]).await.unwrap().counted().unwrap();
            assert!(counted.count.is_some(), "the bucket is loaded");
            model.borrow_mut().apply(&counted.event);
        }
        seen().await
    })
    .await;
    daemon.logged("drift-seen").await;
    assert!(daemon.log().contains("events say that Redis has +2 on video:7"), "{}", daemon.log());
    for row in
        sqlx::query_as::<_, (u64, i64)>("SELECT target_id, drift FROM drift_seen").fetch_all(&world.pool).await.unwrap()
    {
        assert_eq!(row, (7, 2));
    }
    // A target that no run would look at: what changed is older than the last cut. But the events have told of it.
    let publisher = world.publisher().await;
    world.drained(&publisher).await;
    let dry = world.report(&["reconcile", "--changed", "--dry-run"]);
    assert_eq!((&dry["drifted"], &dry["repaired"]), (&1.into(), &0.into()), "{dry}");
    assert!(seen().await, "a dry run forgets nothing");
    sqlx::query("UPDATE counter SET update_at = update_at - INTERVAL 1 DAY").execute(&world.pool).await.unwrap();
    let report = world.report(&["reconcile", "--changed"]);
    assert_eq!((&report["repaired"], &report["drift_sum"]), (&1.into(), &2.into()), "{report}");
    assert!(!seen().await, "it was looked at");
    assert_redis_equals(&world, &model.into_inner()).await;
    assert!(daemon.stop().success());
    world.close().await;
}
