//! Another daemon finishes a job whose daemon crashed.

use tallyd_core::model::{BoardPeriod, UserId};

use crate::common::{Model, World, drift, event_of, eventually, target};

const SETTINGS: &str = "[amqp]\npartitions = 4\n\
    [reconcile]\nfull_cron = \"* * * * * *\"\npage_targets = 100\n\
    [archive]\ncron = \"* * * * * *\"\npage_members = 20\n\
    [[board]]\nname = \"likes\"\nperiod = \"week\"\narchive_grace = \"0s\"\n";

/// Starts a daemon. When the daemon's jobs have reached the pause point `point` as often as `times`, kills the daemon.
async fn die_at(world: &World, point: &str, times: usize) {
    let points = vec![point; times].join(",");
    let daemon = world.daemon_with(&[("TALLYD_PAUSE_POINT", &points)]);
    for time in 1..=times {
        eventually("the daemon reaches the point", || async { daemon.is_stopped() }).await;
        if time < times {
            daemon.signal("CONT");
        }
    }
    daemon.kill();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reconcile_and_an_archive_whose_daemons_die_are_ended_by_another_one() {
    let world = World::new("jobs_resumed", SETTINGS).await.hurried();
    let publisher = world.publisher().await;
    assert!(world.tallyd(&["reconcile"]).status.success());
    let client = world.api_server();
    let mut model = Model::default();
    for id in 1..=1_000 {
        let counted = client.like(target(id), UserId(id), &[]).await.unwrap();
        model.apply(&event_of(counted));
    }
    // This daemon runs no job. It writes the likes, and counts them in Redis.
    let writing = world.daemon_with(&[("TALLYD__RECONCILE__FULL_CRON", ""), ("TALLYD__ARCHIVE__CRON", "")]);
    world.counted(&publisher).await;
    assert!(writing.stop().success());
    for (id, by) in [(250, 3), (500, -1), (1_000, 2)] {
        drift(&world, target(id), by).await;
    }

    // The first daemon crashes during a reconcile run. The run has completed two pages, and has compared the third page
    // but not repaired it.
    die_at(&world, "reconcile:compared", 3).await;
    assert_eq!(world.count("SELECT COUNT(*) FROM job_run WHERE outcome IS NULL AND checkpoint IS NOT NULL").await, 1);
    world.end_leases().await;
    let at = BoardPeriod { board: "likes".to_owned(), period: "2026-W40".to_owned() };
    let (mut redis, key) = (world.redis().await, world.cache.keys.board(&at.board, &at.period));
    for member in 1..=500 {
        let _: f64 =
            redis::cmd("ZINCRBY").arg(&key).arg(member % 7 + 1).arg(member).query_async(&mut redis).await.unwrap();
    }
    // The second daemon crashes during an archive run. The second or the third daemon resumes the reconcile run.
    die_at(&world, "archive:copied-page", 1).await;
    world.end_leases().await;
    let daemon = world.daemon();
    daemon.logged("\"board-archived\"").await;
    world.drained(&publisher).await;
    let resumed = "SELECT COUNT(*) FROM job_run AS ended \
         JOIN job_run AS failed ON failed.run = JSON_VALUE(ended.report, '$.resumed_run') \
         WHERE ended.outcome = 'done' AND failed.outcome = 'failed'";
    // The second daemon can also die during a reconcile run, which the third daemon resumes.
    eventually("a reconcile resumes the failed run and ends", || async { world.count(resumed).await >= 1 }).await;
    let failed = "SELECT COUNT(*) FROM job_run WHERE outcome = 'failed' AND report LIKE '%its process ended%'";
    assert!(world.count(failed).await >= 2, "the crashed runs are noted as failed");
    assert!(daemon.stop().success());

    let repairs: Vec<(u64, i64)> =
        sqlx::query_as("SELECT target_id, added FROM repair WHERE outcome = 'done' ORDER BY target_id")
            .fetch_all(&world.pool)
            .await
            .unwrap();
    assert_eq!(repairs, [(250, -3), (500, 1), (1_000, -2)]);
    world.assert_equals(&model).await;
    let archived =
        "SELECT COUNT(DISTINCT member) * 1000000 + COUNT(*) FROM leaderboard_archive WHERE period = '2026-W40'";
    assert_eq!(world.count(archived).await, 500_000_500);
    let sum = "SELECT CAST(SUM(score) AS SIGNED) FROM leaderboard_archive WHERE period = '2026-W40'";
    assert_eq!(world.count(sum).await, (1..=500).map(|member| member % 7 + 1).sum::<i64>());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_that_panics_is_a_failed_run_and_the_daemon_goes_on() {
    let world = World::new("jobs_panic", SETTINGS).await.hurried();
    let publisher = world.publisher().await;
    let daemon = world.daemon_with(&[("TALLYD_PANIC_POINT", "archive:claimed")]);
    daemon.logged("the test requested a panic at this point").await;
    daemon.logged("\"job-failed\"").await;
    let mut model = Model::default();
    model.apply(&event_of(world.api_server().like(target(1), UserId(7), &[]).await.unwrap()));
    world.drained(&publisher).await;
    world.assert_equals(&model).await;
    // The lease of the failed run ends, and another process archives.
    world.end_leases().await;
    assert!(world.tallyd(&["archive"]).status.success());
    assert_eq!(world.count("SELECT COUNT(*) FROM job_run WHERE job = 'archive' AND outcome = 'failed'").await, 1);
}
