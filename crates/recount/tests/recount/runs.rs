//! Some recounts crash, some run at the same time, and some are started by the daemon.

use std::collections::BTreeMap;

use serde_json::json;
use tallyd_recount::FAULT_POINTS;

use super::{QUERY, added, comment, comments, count, counters, run, served, settings, world};
use crate::common::{eventually, signal, stderr};

#[tokio::test(flavor = "multi_thread")]
async fn a_run_that_is_killed_anywhere_is_made_up_for_by_the_next_and_nothing_is_added_twice() {
    for (number, point) in FAULT_POINTS.into_iter().enumerate() {
        let world = world(&format!("recount_killed_{number}"), &settings(QUERY, "page_targets = 50")).await;
        // A recount can't correct so many videos in one transaction.
        let videos: Vec<(u64, usize)> = (1..=150).map(|id| (id, 1 + (id % 3) as usize)).collect();
        comment(&world, &videos).await;
        count(&world, &[(7, 0, 100), (160, 0, 5)]).await;
        let killed = world
            .command()
            .args(["admin", "recount", "--force", "--yes"])
            .env("TALLYD_FAULT_POINT", point)
            .output()
            .unwrap();
        assert!(stderr(&killed).contains("fault-point"), "{point}: {}", stderr(&killed));
        // The test ends the lease of the killed run.
        world.end_leases().await;
        assert!(world.tallyd(&["admin", "recount", "--force", "--yes"]).status.success());
        assert_eq!(counters(&world).await, comments(&world).await, "{point}");
        let mut expected: BTreeMap<u64, i64> = videos.iter().map(|(id, count)| (*id, *count as i64)).collect();
        expected.insert(7, 2 - 100);
        expected.insert(160, -5);
        assert_eq!(added(&world).await, expected, "{point}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn of_two_at_once_one_is_told_to_try_later() {
    let world = world("recount_two", &settings(QUERY, "")).await;
    comment(&world, &[(1, 3)]).await;
    let mut first = world.command();
    let first = first.args(["admin", "recount"]).env("TALLYD_PAUSE_POINT", "recount:correcting").spawn().unwrap();
    let stopped = || async {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", first.id())).unwrap();
        stat.rsplit_once(") ").unwrap().1.starts_with('T')
    };
    eventually("the first run has stopped", stopped).await;
    let second = world.tallyd(&["admin", "recount"]);
    assert_eq!(second.status.code(), Some(75), "{}", stderr(&second));
    assert!(stderr(&second).contains("is already running this job"), "{}", stderr(&second));
    // A reconcile can run at the same time, because it is another job with its own fence messages.
    assert!(world.tallyd(&["reconcile"]).status.success());
    // While the first run is frozen, its lease expires, and another run corrects the counters.
    run(&world, "UPDATE job_lock SET lease_until = NOW(6) WHERE job = 'recount'").await;
    assert!(world.tallyd(&["admin", "recount"]).status.success());
    signal(&first, "CONT");
    let ended = first.wait_with_output().unwrap();
    assert_eq!(ended.status.code(), Some(75), "another run took over");
    assert_eq!(added(&world).await, BTreeMap::from([(1, 3)]), "once");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_daemon_recounts_by_its_schedule_and_tells() {
    let (world, daemon) = served("recount_cron", &settings(QUERY, "cron = \"* * * * * *\"")).await;
    comment(&world, &[(1, 3), (2, 2)]).await;
    count(&world, &[(1, 1, 8)]).await;
    eventually("the counters are corrected", || async { counters(&world).await == BTreeMap::from([(1, 3), (2, 2)]) })
        .await;
    daemon.logged("recount-off").await;
    daemon.logged("video:comment: 2 targets checked").await;
    let done = "SELECT COUNT(*) FROM job_run WHERE job = 'recount' AND mode = 'video:comment' AND outcome = 'done'";
    eventually("the recount has run twice", || async { world.count(done).await > 1 }).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_recount_that_comes_with_a_reload_is_done_and_one_that_goes_is_not() {
    let (mut world, daemon) = served("recount_reload", &settings(QUERY, "")).await;
    comment(&world, &[(1, 3)]).await;
    world.set(&settings(QUERY, "cron = \"* * * * * *\""));
    daemon.signal("HUP");
    daemon.logged("[[recount]]").await;
    eventually("the counters are corrected", || async { counters(&world).await == BTreeMap::from([(1, 3)]) }).await;
    world.set("[metrics]\nlike = 1\ncomment = 2\n");
    daemon.signal("HUP");
    eventually("the reload is logged", || async { daemon.log().matches("\"reloaded\"").count() == 2 }).await;
    assert!(daemon.stop().success());
    let runs = "SELECT COUNT(*) FROM job_run WHERE job = 'recount'";
    let before = world.count(runs).await;
    let daemon = world.daemon();
    daemon.logged("\"consuming\"").await;
    assert!(daemon.stop().success());
    assert_eq!(world.count(runs).await, before);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_recount_that_is_wrong_keeps_no_other_from_being_done() {
    let second = "[[recount]]\nkind = \"video\"\nmetric = \"share\"\nquery = \"SELECT x, 1 FROM nowhere WHERE x > :after LIMIT :limit\"\n";
    let all = format!("{}{second}", settings(QUERY, "")).replace("comment = 2\n", "comment = 2\nshare = 3\n");
    let world = world("recount_both", &all).await;
    comment(&world, &[(1, 3)]).await;
    let output = world.tallyd(&["admin", "recount", "video:share", "video:comment", "--format", "json"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).contains("[[recount]] of video share: MySQL rejects the query"), "{}", stderr(&output));
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["recounts"][0]["corrected"], json!(1));
    assert_eq!(counters(&world).await, BTreeMap::from([(1, 3)]));
    let waits = "SELECT COUNT(*) FROM job_run WHERE mode = 'video:share' AND outcome = 'refused'";
    assert_eq!(world.count(waits).await, 1, "the failed recount must wait for its next scheduled time");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_recount_that_is_new_waits_for_its_time() {
    let second = "[[recount]]\nkind = \"video\"\nmetric = \"share\"\ncron = \"0 0 5 * * *\"\n\
                  query = \"SELECT id, 1 FROM comment WHERE id > :after ORDER BY id LIMIT :limit\"\n";
    let all = format!("{second}{}", settings(QUERY, "cron = \"* * * * * *\""));
    let all = all.replace("comment = 2\n", "comment = 2\nshare = 3\n");
    let (world, _daemon) = served("recount_new", &all).await;
    let done = "SELECT COUNT(*) FROM job_run WHERE mode = 'video:comment' AND outcome = 'done'";
    eventually("the other recount is done", || async { world.count(done).await > 1 }).await;
    assert_eq!(world.count("SELECT COUNT(*) FROM job_run WHERE mode = 'video:share'").await, 0);
}

/// When the daemon gets SIGTERM, it has received some events but has not written them. A fence message must not pass
/// before these events are written.
#[cfg(feature = "fault-points")]
#[tokio::test(flavor = "multi_thread")]
async fn a_stop_lets_no_fence_pass_events_that_the_daemon_holds() {
    use tallyd_core::event::encode_count;
    use tallyd_core::model::TargetId;

    let more = "[consumer]\nlinger_ms = 0\nbatch_events_max = 1\n[amqp]\nheartbeat_s = 3\n[reconcile]\npublish_grace = \"100ms\"\n";
    let world = world("recount_stop", &format!("{}{more}", settings(QUERY, ""))).await;
    let publisher = world.publisher().await;
    let queue = world.broker.queue(0);
    let publish = async |number: u64| {
        let body = encode_count(
            TargetId(1),
            ("video", "comment"),
            1,
            tallyd_base::runtime::clock::now(),
            &format!("e{number}"),
            None,
        );
        publisher.publish("", &queue, &body).await.unwrap();
    };
    let first = world.daemon_with(&[("TALLYD_PAUSE_POINT", "consumer:ending,consumer:ending")]);
    // The daemon's first session takes the messages one by one.
    for number in 1..=10 {
        publish(number).await;
    }
    eventually("the first session ends", || async { first.is_stopped() }).await;
    first.signal("CONT");
    let sessions = || first.log().matches("\"consuming\"").count();
    eventually("the daemon takes more messages at a time", || async { sessions() == 2 }).await;
    let second = world.daemon();
    second.logged("\"consuming\"").await;
    publish(11).await;
    eventually("the first daemon has the partition", || async { counters(&world).await == BTreeMap::from([(1, 11)]) })
        .await;

    // The daemon has event 12 in a waiting transaction, event 13 in the next batch, and event 14 in no batch yet.
    let mut lock = world.pool.begin().await.unwrap();
    sqlx::query("SELECT epoch FROM partition_owner FOR UPDATE").fetch_all(&mut *lock).await.unwrap();
    for number in 12..=14 {
        publish(number).await;
    }
    // The test does not read `innodb_trx`. The server refreshes this table only if it was not read for 100 ms, and the
    // test reads more often.
    let waits = "SELECT COUNT(*) FROM information_schema.processlist \
                 WHERE db = DATABASE() AND info LIKE 'UPDATE partition_owner SET batches%'";
    eventually("the first daemon writes", || async { world.count(waits).await == 1 }).await;
    eventually("the daemon has all messages", async || publisher.depth(&queue).await.unwrap().messages() == Some(0))
        .await;
    first.signal("TERM");
    lock.commit().await.unwrap();
    eventually("the first daemon pauses", || async { first.is_stopped() }).await;
    publish(15).await;
    comment(&world, &[(1, 15)]).await;

    let report = &world.report(&["admin", "recount"])["recounts"][0];
    assert_eq!(report["ended"], "done", "{report}");
    first.signal("CONT");
    let mut first = first;
    assert!(first.wait().success());
    world.drained(&publisher).await;
    assert_eq!((counters(&world).await, added(&world).await), (comments(&world).await, BTreeMap::new()), "{report}");
}
