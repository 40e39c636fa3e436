//! A recount runs while nothing else changes the counters.

use std::collections::BTreeMap;

use serde_json::json;
use sqlx::Row;

use tallyd_client::{Number, Source};
use tallyd_core::model::Metric;

use super::{QUERY, added, comment, comments, count, counters, run, served, settings, world};
use crate::common::{World, eventually, stderr, stdout, target};

/// Makes a counter for each case: right, too high, too low, without comments, missing in `counter`, and with rows in
/// two slots.
async fn mixed(world: &World) {
    comment(world, &[(1, 3), (2, 5), (3, 2), (5, 4), (6, 6), (i64::MAX as u64, 1)]).await;
    count(world, &[(1, 0, 3), (2, 0, 9), (3, 1, 1), (4, 0, 7), (6, 0, 4), (6, 1, 3), (7, 0, 0)]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn counters_become_what_the_query_says_and_each_change_is_noted() {
    for page_targets in [1, 2, 3, 10_000] {
        let name = format!("recount_plain_{page_targets}");
        let world = world(&name, &settings(QUERY, &format!("page_targets = {page_targets}"))).await;
        mixed(&world).await;
        // These rows have another kind or another metric, so the recount must ignore them.
        run(&world, "INSERT INTO counter (kind, target_id, metric, slot, value, update_at) VALUES (2, 2, 2, 0, 9, NOW(6)), (1, 2, 1, 0, 9, NOW(6))").await;
        let newest = async || {
            let sql = "SELECT target_id, CAST(MAX(TO_SECONDS(update_at)) AS SIGNED) FROM counter WHERE metric = 2 AND kind = 1 \
                       AND target_id IN (1, 2, 3, 4, 6, 7) GROUP BY target_id";
            super::numbers(&world, sql).await
        };
        let before = newest().await;
        let report = &world.report(&["admin", "recount"])["recounts"][0];
        let expected = BTreeMap::from([(2, -4), (3, 1), (4, -7), (5, 4), (6, -1), (i64::MAX as u64, 1)]);
        assert_eq!(added(&world).await, expected);
        assert_eq!(counters(&world).await, comments(&world).await);
        let seen = |field: &str| report[field].as_u64().unwrap();
        let told = ["checked", "exact", "drifted", "corrected", "transient", "busy", "drift_sum"].map(seen);
        assert_eq!((told, &report["ended"]), ([8, 2, 6, 6, 0, 0, 18], &json!("done")), "{report}");
        let row = sqlx::query("SELECT before_it, added, store, outcome, run FROM repair WHERE target_id = 6")
            .fetch_one(&world.pool);
        let row = row.await.unwrap();
        assert_eq!((row.get::<i64, _>(0), row.get::<i64, _>(1)), (7, -1));
        assert_eq!((row.get::<String, _>(2), row.get::<String, _>(3)), ("mysql".to_owned(), "done".to_owned()));
        assert_eq!(world.count("SELECT COUNT(*) FROM counter WHERE value = 9").await, 2, "the others");
        assert_eq!(newest().await, before, "no event was applied");
        let again = &world.report(&["admin", "recount", "video:comment"])["recounts"][0];
        assert_eq!((&again["drifted"], &again["exact"]), (&json!(0), &json!(8)));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dry_run_tells_and_changes_nothing() {
    let world = world("recount_dry", &settings(QUERY, "")).await;
    mixed(&world).await;
    let before = counters(&world).await;
    let told = world.tallyd(&["admin", "recount", "--dry-run"]);
    assert_eq!(told.status.code(), Some(2), "{}", stderr(&told));
    let text = stdout(&told);
    assert!(text.contains("video:comment: 8 targets checked, 2 exact, 6 drifted by 18 in all, 0 corrected"), "{text}");
    assert!(text.contains("a dry run") && text.contains("video:6: counter 7, query 6, correction -1"), "{text}");
    assert_eq!((counters(&world).await, added(&world).await.len()), (before, 0));
    // If a run changes nothing, it leaves no row in `job_run`.
    assert_eq!(world.count("SELECT COUNT(*) FROM job_run WHERE outcome = 'done'").await, 0);
    assert!(world.tallyd(&["admin", "recount"]).status.success());
    assert!(world.tallyd(&["admin", "recount", "--dry-run"]).status.success(), "no drift is left");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_too_much_to_be_true_changes_nothing_until_it_is_forced() {
    let limits = "[reconcile]\nrepair_abs_max = 50\nrepair_targets_max_percent = 5\n";
    let world = world("recount_brake", &format!("{}{limits}", settings(QUERY, ""))).await;
    let many: Vec<(u64, usize)> = (1..=1_000).map(|id| (id, 1)).collect();
    for piece in many.chunks(100) {
        let rows: Vec<String> = piece.iter().map(|(id, _)| format!("({id})")).collect();
        run(&world, &format!("INSERT INTO comment (video_id) VALUES {}", rows.join(","))).await;
    }
    let counted: Vec<(u64, u8, i64)> = (102..=1_000).map(|id| (id, 0, 1)).collect();
    count(&world, &counted).await;
    let dry = world.tallyd(&["admin", "recount", "--dry-run"]);
    assert!(stdout(&dry).contains("without --dry-run the run would stop: 101 of 1000 targets"), "{}", stdout(&dry));
    let braked = world.tallyd(&["admin", "recount"]);
    assert_eq!(braked.status.code(), Some(1));
    assert!(stdout(&braked).contains("101 of 1000 targets have drifted, more than"), "{}", stdout(&braked));
    assert!(stdout(&braked).contains("`tallyd admin recount video:comment --force`"), "{}", stdout(&braked));
    assert_eq!(added(&world).await.len(), 0, "the run must not correct a counter");
    assert_eq!(world.count("SELECT COUNT(*) FROM job_run WHERE outcome = 'braked'").await, 1);
    run(&world, "INSERT INTO counter (kind, target_id, metric, slot, value, update_at) SELECT 1, video_id, 2, 0, 1, NOW(6) FROM comment WHERE video_id < 101").await;
    run(&world, "UPDATE counter SET value = 53 WHERE target_id = 7").await;
    let braked = world.tallyd(&["admin", "recount", "video:comment"]);
    assert_eq!(braked.status.code(), Some(1));
    assert!(stdout(&braked).contains("off by 52, more than [reconcile] repair_abs_max = 50"), "{}", stdout(&braked));
    assert_eq!(added(&world).await.len(), 0);
    assert!(world.tallyd(&["admin", "recount", "--force", "--yes"]).status.success());
    assert_eq!(added(&world).await, BTreeMap::from([(7, -52), (101, 1)]));
    assert_eq!(counters(&world).await, comments(&world).await);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_table_of_another_database_a_sum_and_no_row_at_all_are_right_too() {
    let name = format!("t_recount_other_{}_shop", std::process::id());
    let query = format!(
        "SELECT video_id, SUM(stars) /* :after */ FROM `{name}`.stars WHERE note <> ':limit' AND video_id > :after \
         GROUP BY video_id ORDER BY video_id LIMIT :limit;"
    );
    let world = world("recount_other", &settings(&query, "")).await;
    run(&world, &format!("CREATE DATABASE {name}")).await;
    run(&world, &format!("CREATE TABLE {name}.stars (video_id INT NOT NULL, stars INT NOT NULL, note TEXT NOT NULL)"))
        .await;
    // The account can't read other databases by default. The test gives it this right, as the manual describes.
    let account = world.accounts.as_ref().unwrap().of_daemon_in_mysql();
    run(&world, &format!("GRANT SELECT ON {name}.stars TO {account}")).await;
    count(&world, &[(8, 0, 5)]).await;
    assert!(world.tallyd(&["admin", "recount"]).status.success());
    assert_eq!(
        added(&world).await,
        BTreeMap::from([(8, -5)]),
        "the count must become zero, because the table is empty"
    );
    run(&world, &format!("INSERT INTO {name}.stars VALUES (3, 5, ''), (3, -9, ''), (9, 2, '')")).await;
    assert!(world.tallyd(&["admin", "recount"]).status.success());
    assert_eq!(counters(&world).await, BTreeMap::from([(3, -4), (9, 2)]));
    run(&world, &format!("DROP DATABASE {name}")).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn redis_follows_a_correction_whoever_counts_there() {
    for writer in ["api", "daemon"] {
        let rule = format!("[[rule]]\nmetric = \"comment\"\nwriter = \"{writer}\"\n");
        let (world, daemon) = served(&format!("recount_{writer}"), &format!("{}{rule}", settings(QUERY, ""))).await;
        world.succeeds(&["reconcile"]).await;
        let client = world.api_server();
        let publisher = world.publisher().await;
        comment(&world, &[(1, 3), (2, 1)]).await;
        // The event of the comment on target 2 is never published.
        client.add(target(1), Metric(2), 3, "three").await.unwrap();
        world.drained(&publisher).await;
        assert!(world.tallyd(&["reconcile"]).status.success());
        assert!(world.tallyd(&["admin", "recount"]).status.success());
        assert_eq!(counters(&world).await, BTreeMap::from([(1, 3), (2, 1)]));
        let read = async || {
            // If the daemon counts the metric, it adds the corrections to Redis automatically. If API servers count it,
            // a reconcile must correct Redis.
            let by_itself = writer == "daemon" || world.tallyd(&["reconcile", "--changed"]).status.success();
            let numbers = client.read(&[target(1), target(2)]).await.unwrap();
            let redis = |value| Some(Number { value, source: Source::Redis });
            by_itself && (numbers[0].get(Metric(2)), numbers[1].get(Metric(2))) == (redis(3), redis(1))
        };
        eventually(&format!("Redis has the corrected counts, written by {writer}"), read).await;
        assert!(world.tallyd(&["reconcile", "--dry-run"]).status.success(), "no count is added twice");
        assert!(daemon.stop().success());
    }
}
