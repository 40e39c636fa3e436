//! Erases a target with likes and views.

use redis::AsyncCommands;
use serde_json::json;
use tallyd_core::event::encode_count;
use tallyd_core::model::{TargetId, UserId};

use super::{Likes, METRICS, VIDEO, erase, named, report};
use crate::common::{World, stderr, target};

/// With this rule, the likes and views of a target are also added to a board.
const ON_BOARD: &str = "[[rule]]\nmetric = \"like\"\nboard = \"hot\"\n[[board]]\nname = \"hot\"\nperiod = \"day\"\n";

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_left_of_a_target_and_others_keep_their_numbers() {
    let world = World::new("erase_target", &format!("{METRICS}{ON_BOARD}")).await;
    let publisher = world.publisher().await;
    let mut likes = Likes::new();
    for user in 1..=2_300 {
        likes.add(target(VIDEO), UserId(user));
        likes.add(target(1 + user % 7), UserId(user));
    }
    likes.set(target(VIDEO), UserId(5), false);
    likes.publish(&world, &publisher).await;
    let at = tallyd_base::runtime::clock::now();
    for id in [VIDEO, 3] {
        let view = encode_count(TargetId(id), ("video", "view"), 4, at, "one", None);
        publisher.publish(&world.broker.exchange(), &id.to_string(), &view).await.unwrap();
    }
    let _daemon = world.daemon();
    world.drained(&publisher).await;
    world.outbox_added().await;
    // The first reconcile loads the buckets.
    world.reconcile("--full").await;
    // The test changes the counter in Redis, so the next reconcile finds a drift. The run writes the target into its
    // report, into a row of `repair` and into a hint. The erase must remove the target from all three.
    let key = world.cache.keys.counters("video", world.cache.keys.bucket(target(VIDEO)));
    let before: String = world.redis().await.hget(&key, VIDEO).await.unwrap();
    assert_eq!(before, "2299,0,4");
    let () = world.redis().await.hset(&key, VIDEO, "2302,0,4").await.unwrap();
    world.reconcile("--full").await;
    sqlx::query("INSERT INTO drift_seen VALUES (1, ?, 1, 3, NOW(6))").bind(VIDEO).execute(&world.pool).await.unwrap();
    assert_eq!(world.tallyd(&["board", "snapshot", "hot"]).status.code(), Some(0));
    let before = named(&world, VIDEO).await;
    for table in ["like_record", "counter", "repair", "drift_seen", "job_run", "outbox", "leaderboard_snapshot"] {
        assert!(before.iter().any(|found| found.starts_with(table)), "{table} is not in {before:?}");
    }

    let erased = report(&erase(&world, &["--target", &format!("video:{VIDEO}")]), 0);
    assert_eq!((erased["rows"].as_u64(), erased["unlikes"].as_u64()), (Some(2_300), Some(2_299)));
    assert_eq!((&erased["numbers"]["repair"], &erased["numbers"]["drift_seen"]), (&json!(1), &json!(1)));
    // The erase has nothing to remove from the open board, because the unlikes have already removed the target.
    assert_eq!((&erased["saved"], &erased["zsets"]), (&json!(1), &json!(0)));
    assert_eq!(named(&world, VIDEO).await, [] as [String; 0]);
    likes.model.rows.retain(|(of, _), _| *of != target(VIDEO));
    world.assert_equals(&likes.model).await;
    assert_eq!(world.count("SELECT CAST(SUM(value) AS SIGNED) FROM counter WHERE metric = 3").await, 4);
    let full = world.reconcile("--full").await;
    assert_eq!((&full["drifted"], &full["phantoms"], &full["counters_off"]), (&json!(0), &json!(0), &json!(0)));

    let again = report(&erase(&world, &["--target", &format!("video:{VIDEO}")]), 0);
    for count in ["rows", "unlikes", "redis_keys", "outbox_rows", "zsets", "saved", "runs"] {
        assert_eq!(again[count], 0, "{count}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_can_not_be_erased_is_refused_before_anything_is() {
    let world = World::new("erase_refused", METRICS).await;
    for (arguments, code, said) in [
        (["--target", "film:1"], 64, "film:1 is not a target: write KIND:ID"),
        (["--target", "video:0"], 64, "video:0 is not a target: write KIND:ID"),
        (["--user", "0"], 64, "0 is not in 1..="),
        (["--user", "me"], 64, "invalid digit"),
        (["--board", "hot"], 64, "required"),
    ] {
        let output = erase(&world, &arguments);
        assert_eq!(output.status.code(), Some(code), "{arguments:?}: {}", stderr(&output));
        assert!(stderr(&output).contains(said), "{arguments:?}: {}", stderr(&output));
    }
    let output = erase(&world, &["--user", "7", "--board", "hot"]);
    assert_eq!(output.status.code(), Some(64), "{}", stderr(&output));
    assert!(stderr(&output).contains("no board is named hot"), "{}", stderr(&output));
    assert_eq!(world.count("SELECT COUNT(*) FROM job_run WHERE job = 'erase'").await, 0);
}
