//! A scrub is a part of a full reconcile. Together, several scrubs check all counters.

use std::collections::BTreeSet;

use super::common::{drift, eventually, target};
use super::settled;

#[tokio::test(flavor = "multi_thread")]
async fn scrubs_go_on_where_the_last_one_ended_and_see_everything_in_a_round() {
    let settings = "[reconcile]\nscrub_parts = 4\npage_targets = 10\n[kinds]\nvideo = 1\npost = 2";
    let (world, _daemon, model) = settled("scrub", 90, settings).await;
    for id in [1, 33, 66, 90] {
        drift(&world, target(id), 3).await;
    }
    // The test adds a counter to Redis for a target that MySQL does not know, and makes a row of `counter` that differs
    // from its like records.
    drift(&world, target(777_000), 2).await;
    sqlx::query("UPDATE counter SET value = value + 5 WHERE target_id = 50").execute(&world.pool).await.unwrap();
    let (mut checked, mut places, mut repaired, mut off, mut phantoms) = (0, BTreeSet::new(), 0, 0, 0);
    let number = |report: &serde_json::Value, name: &str| report[name].as_u64().unwrap();
    // A round checks all targets in about four runs. The number of runs varies, because each run estimates its share of
    // the targets from MySQL's statistics.
    for run in 1.. {
        let report = world.report(&["reconcile", "--scrub"]);
        assert_eq!((&report["mode"], &report["ended"]), (&"scrub".into(), &"done".into()), "{report}");
        assert_eq!(report["slice"]["after"].is_null(), run == 1, "{report}");
        checked += number(&report, "checked");
        repaired += number(&report, "repaired");
        off += number(&report, "counters_off");
        phantoms += number(&report, "phantoms");
        let until = &report["slice"]["until"];
        if until.is_null() {
            assert!((3..=8).contains(&run), "a round took {run} runs");
            break;
        }
        assert!(places.insert(until.as_str().unwrap().to_owned()), "{until} came twice");
    }
    // The runs also search for lost buckets. This search needs four runs to check all buckets.
    for _ in 0..4 {
        let report = world.report(&["reconcile", "--scrub"]);
        repaired += number(&report, "repaired");
        phantoms += number(&report, "phantoms");
    }
    assert!(checked >= 90, "{checked} targets were checked");
    // The sixth repair makes Redis equal to the wrong row. The correction of this row then comes to Redis, too.
    assert_eq!((repaired, off, phantoms >= 1), (6, 1, true), "{phantoms} phantoms");
    world.outbox_added().await;
    world.assert_redis_equals(&model).await;
    world.assert_equals(&model).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_scrub_that_is_cut_short_stays_where_the_last_one_ended() {
    let (world, _daemon, _) = settled("scrub_short", 90, "[reconcile]\nscrub_parts = 4\npage_targets = 10").await;
    let first = world.report(&["reconcile", "--scrub"]);
    let place = first["slice"]["until"].as_str().unwrap().to_owned();
    let short = world.report(&["reconcile", "--scrub", "--run-time", "1ms"]);
    assert_eq!((&short["ended"], &short["checked"]), (&"time-over".into(), &0.into()), "{short}");
    assert_eq!((&short["slice"]["after"], &short["slice"]["until"]), (&place.as_str().into(), &place.as_str().into()));
    let next = world.report(&["reconcile", "--scrub"]);
    assert_eq!(next["slice"]["after"], place, "{next}");
    assert!(next["checked"].as_u64().unwrap() > 0, "{next}");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_daemon_scrubs_by_its_schedule() {
    let (world, daemon, model) = settled("scrub_cron", 5, "").await;
    drift(&world, target(3), 2).await;
    assert!(daemon.stop().success());
    let daemon = world.daemon_with(&[("TALLYD__RECONCILE__SCRUB_CRON", "* * * * * *")]);
    eventually("a scrub repairs the drift", || async {
        world.count("SELECT COUNT(*) FROM repair WHERE target_id = 3 AND outcome = 'done'").await == 1
    })
    .await;
    world.redis_ends_as(&model, daemon).await;
}
