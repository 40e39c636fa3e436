//! A reconcile runs after Redis or MySQL has lost its newest data, or after a clock was ahead.

use std::time::Duration;

use sqlx::AssertSqlSafe;
use tallyd_core::model::{Metric, UserId};

use super::common::private::Private;
use super::common::{World, as_api, drift, event_of, eventually, redis_likes, target};
use super::settled;

#[tokio::test(flavor = "multi_thread")]
async fn a_redis_that_comes_back_older_is_compared_from_its_own_cut_on() {
    let mut server = Private::start(&[]).await;
    let settings = format!("[redis]\nurl = \"{}\"\n[reconcile]\noverlap = \"1s\"", server.url());
    let (world, _daemon, mut model) = settled("older_redis", 20, &settings).await;
    let publisher = world.publisher().await;
    assert_eq!(world.report(&["reconcile", "--changed"])["ended"], "done");
    let () = redis::cmd("SAVE").query_async(&mut server.connect().await).await.unwrap();
    let client = world.api_server();
    let mut last = None;
    for id in 1..=20 {
        let event = event_of(client.like(target(id), UserId(9), &[]).await.unwrap());
        last = Some(event.at);
        model.apply(&event);
    }
    world.drained(&publisher).await;
    world.assert_equals(&model).await;
    // A run also checks the likes in the `overlap` before the last run. The test waits until the likes are older than
    // `overlap`, so later runs do not check these likes.
    let until = last.unwrap().after(Duration::from_secs(2));
    eventually("the likes are old", || async { world.cache.now().await.unwrap() > until }).await;
    assert_eq!(world.report(&["reconcile", "--changed"])["drifted"], 0);
    server.restart().await;
    let older = redis_likes(&world.api_server(), &[target(1)]).await;
    assert_eq!(older, [Some(2)], "the restored bucket must look loaded");
    let report = world.report(&["reconcile", "--changed"]);
    assert_eq!((&report["repaired"], &report["buckets_loaded"]), (&20.into(), &0.into()), "{report}");
    world.assert_redis_equals(&model).await;
    let again = world.report(&["reconcile", "--changed"]);
    assert_eq!(again["checked"], 0, "the run must note its cut again: {again}");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_older_redis_is_repaired_within_the_default_limits() {
    let mut server = Private::start(&[]).await;
    let (world, daemon, mut model) = settled("older_many", 150, &format!("[redis]\nurl = \"{}\"", server.url())).await;
    let publisher = world.publisher().await;
    let () = redis::cmd("SAVE").query_async(&mut server.connect().await).await.unwrap();
    let client = world.api_server();
    for id in 1..=150 {
        model.apply(&event_of(client.like(target(id), UserId(9), &[]).await.unwrap()));
    }
    world.drained(&publisher).await;
    world.assert_equals(&model).await;
    server.restart().await;
    let report = world.report(&["reconcile", "--changed"]);
    assert_eq!((&report["repaired"], &report["drift_sum"]), (&150.into(), &150.into()), "{report}");
    world.redis_ends_as(&model, daemon).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_redis_that_lost_all_is_not_compared_from_the_first_target_on() {
    let mut server = Private::start(&[]).await;
    let settings = format!("[redis]\nurl = \"{}\"\n[reconcile]\noverlap = \"1s\"", server.url());
    let (world, daemon, model) = settled("emptied_redis", 20, &settings).await;
    let until = world.cache.now().await.unwrap().after(Duration::from_secs(2));
    eventually("the likes are old", || async { world.cache.now().await.unwrap() > until }).await;
    assert_eq!(world.report(&["reconcile", "--changed"])["ended"], "done");
    server.restart().await;
    let report = world.report(&["reconcile", "--changed"]);
    assert_eq!((&report["buckets_loaded"], &report["checked"]), (&16.into(), &0.into()), "{report}");
    world.redis_ends_as(&model, daemon).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cut_from_the_future_is_void_for_changed_runs() {
    let (world, daemon, model) = settled("future_cut", 3, "").await;
    assert_eq!(world.report(&["reconcile", "--changed"])["ended"], "done");
    let ahead = "UPDATE job_run SET cut = cut + INTERVAL 1 DAY WHERE mode = 'changed'";
    assert_eq!(sqlx::query(ahead).execute(&world.pool).await.unwrap().rows_affected(), 1);
    drift(&world, target(2), 4).await;
    let report = world.report(&["reconcile", "--changed"]);
    assert_eq!((&report["repaired"], &report["drift_sum"]), (&1.into(), &4.into()), "{report}");
    world.redis_ends_as(&model, daemon).await;
}

/// Returns the cuts of all completed `changed` runs, in order. A cut is the time up to which a run has compared all
/// changes.
async fn cuts(world: &World) -> Vec<i64> {
    let micros = "CAST(TIMESTAMPDIFF(MICROSECOND, '1970-01-01', cut) AS SIGNED)";
    let sql = format!("SELECT {micros} FROM job_run WHERE mode = 'changed' AND outcome = 'done' ORDER BY run");
    sqlx::query_scalar(AssertSqlSafe(sql)).fetch_all(&world.pool).await.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_target_that_cannot_be_repaired_does_not_hold_the_cut() {
    let (world, _daemon, _) = settled("left_cut", 3, &as_api("")).await;
    // The run can't repair this counter, because likes that API servers count are never negative in Redis.
    sqlx::query("UPDATE counter SET value = -2 WHERE target_id = 1").execute(&world.pool).await.unwrap();
    for _ in 0..3 {
        let report = world.report(&["reconcile", "--changed"]);
        assert_eq!((&report["left"], &report["repaired"]), (&1.into(), &0.into()), "{report}");
    }
    let cuts = cuts(&world).await;
    assert!(cuts.len() == 3 && cuts.is_sorted_by(|before, after| before < after), "{cuts:?}");
    assert_eq!(world.count("SELECT COUNT(*) FROM drift_seen WHERE target_id = 1").await, 1);
    assert_eq!(redis_likes(&world.api_server(), &[target(1)]).await, [Some(2)]);
    assert_eq!(world.report(&["reconcile"])["counters_off"], 1);
    assert_eq!(world.report(&["reconcile", "--changed"])["left"], 0);
    assert_eq!(
        world.count("SELECT COUNT(*) FROM drift_seen").await,
        0,
        "the run must delete the hint, because the counter is right"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_settable_number_is_repaired_while_it_is_counted() {
    let rules = "[metrics]\nlike = 1\nunread = 4\n[[rule]]\nmetric = \"unread\"\nsettable = true\nwriter = \"api\"\n";
    let world = World::new("settable_hot", rules).await;
    let (publisher, _daemon) = (world.publisher().await, world.daemon());
    assert!(world.tallyd(&["reconcile"]).status.success());
    let client = world.api_server();
    let unread = Metric(4);
    client.set(target(1), unread, 7).await.unwrap();
    world.drained(&publisher).await;
    let key = world.cache.keys.counters("video", world.cache.keys.bucket(target(1)));
    let mut redis = world.redis().await;
    let _: i64 = redis::cmd("HSET").arg(&key).arg(1).arg("0,0,0,11").query_async(&mut redis).await.unwrap();
    let mut command = world.command();
    command.args(["reconcile", "--changed", "--format", "json"]).stdout(std::process::Stdio::piped());
    let run = command.spawn().unwrap();
    let run = tokio::task::spawn_blocking(|| run.wait_with_output().unwrap());
    let mut added = 0;
    while !run.is_finished() {
        added += 1;
        client.add(target(1), unread, 1, &format!("add-{added}")).await.unwrap();
    }
    let report: serde_json::Value = serde_json::from_slice(&run.await.unwrap().stdout).unwrap();
    assert_eq!((&report["repaired"], &report["left"], &report["drift_sum"]), (&1.into(), &0.into(), &4.into()));
    let field: String = redis::cmd("HGET").arg(&key).arg(1).query_async(&mut redis).await.unwrap();
    assert_eq!(field, format!("0,0,0,{}", 7 + added));
}
