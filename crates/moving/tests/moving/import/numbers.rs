//! Imports opening balances. Opening balances are counts without a row per user.

use tallyd_core::event::LikeEvent;
use tallyd_core::model::UserId;

use super::{report, run, world};
use crate::common::{World, body, stderr, target};

const QUERY: &str =
    "SELECT id AS target, views AS value FROM old_post WHERE id > :after_target ORDER BY id LIMIT :rows";

fn settings(what: &str) -> String {
    format!(
        "[metrics]\nlike = 1\nview = 2\n[[import]]\nname = \"views\"\nkind = \"video\"\nmetric = \"view\"\n{what}\n"
    )
}

/// Returns the view counters in `counter` that are not zero, by target.
async fn views(world: &World) -> Vec<(u64, i64)> {
    sqlx::query_as(
        "SELECT target_id, CAST(SUM(value) AS SIGNED) AS views FROM counter WHERE kind = 1 AND metric = 2 GROUP BY target_id \
         HAVING views <> 0 ORDER BY target_id",
    )
    .fetch_all(&world.pool)
    .await
    .unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn numbers_of_a_column_are_levelled_again_and_again() {
    let world = world("import_column", &settings(&format!("query = \"{QUERY}\"\npage_rows = 2"))).await;
    run(&world, "CREATE TABLE old_post (id BIGINT NOT NULL PRIMARY KEY, views INT NOT NULL)").await;
    run(&world, "INSERT INTO old_post VALUES (1, 100), (2, 7), (5, 0), (9, 3000000)").await;
    // Events have already counted some views.
    let counted = "INSERT INTO counter (kind, target_id, metric, slot, value, update_at) VALUES (1, 2, 2, 0, 5, NOW(6)), (1, 9, 2, 1, 4, NOW(6))";
    run(&world, counted).await;
    let first = report(&world, 0, &[]);
    assert_eq!((&first["rows"], &first["changed"]), (&4.into(), &3.into()), "{first}");
    assert_eq!(views(&world).await, [(1, 100), (2, 7), (9, 3_000_000)]);
    assert_eq!(report(&world, 0, &[])["changed"], 0);
    run(&world, "UPDATE old_post SET views = views + 10 WHERE id < 5").await;
    assert_eq!(report(&world, 2, &["--verify"])["differing"], 2);
    report(&world, 0, &["views"]);
    assert_eq!(views(&world).await, [(1, 110), (2, 17), (9, 3_000_000)]);
    assert_eq!(report(&world, 0, &["--verify"])["differing"], 0);
    // A reconcile treats imported counts in the same way as all other counters in MySQL.
    let daemon = world.daemon();
    daemon.logged("\"consuming\"").await;
    // The daemon's counts that wait in the outbox would be lost.
    let refused = world.tallyd(&["import"]);
    assert_eq!(refused.status.code(), Some(75), "{}", stderr(&refused));
    assert!(stderr(&refused).contains("stop all daemons"), "{}", stderr(&refused));
    let reconciled = world.reconcile("--full").await;
    assert_eq!((&reconciled["drifted"], &reconciled["counters_off"]), (&0.into(), &0.into()), "{reconciled}");
    assert_eq!(views(&world).await, [(1, 110), (2, 17), (9, 3_000_000)]);
}

#[tokio::test(flavor = "multi_thread")]
async fn numbers_are_imported_though_nobody_reads_the_queues() {
    let settings = settings(&format!("query = \"{QUERY}\"\n[reconcile]\nqueue_depth_max = 5"));
    let world = world("import_stopped", &settings).await;
    run(&world, "CREATE TABLE old_post (id BIGINT NOT NULL PRIMARY KEY, views INT NOT NULL)").await;
    run(&world, "INSERT INTO old_post VALUES (1, 100), (2, 7)").await;
    let like = |user| {
        body(&LikeEvent { target: target(1), user: UserId(user), at: tallyd_base::runtime::clock::now(), liked: true })
    };
    let publisher = world.publisher().await;
    world.publish(&publisher, &(1..=20).map(like).collect::<Vec<_>>()).await;
    for passes in [&["--run-time", "20s"][..], &["--run-time", "20s", "--verify"]] {
        let report = report(&world, 0, passes);
        assert_eq!((&report["ended"], &report["rows"]), (&"done".into(), &2.into()), "{report}");
    }
    assert_eq!(views(&world).await, [(1, 100), (2, 7)]);
}

#[tokio::test(flavor = "multi_thread")]
async fn numbers_of_keys_in_redis_are_found_by_their_pattern() {
    let mut world = world("import_keys", "").await;
    let keys = format!("{}:post:views:{{id}}", world.name);
    world.set(&settings(&format!("keys = \"{keys}\"")));
    let account = world.accounts.as_ref().unwrap().of_daemon_in_mysql();
    let mut redis = world.redis().await;
    // docs/moving-reference.md describes this permission.
    let allow = ["SETUSER", account.split('\'').nth(1).unwrap(), "+scan"];
    let () = redis::cmd("ACL").arg(&allow).query_async(&mut redis).await.unwrap();
    let set = |id: &str, value: &str| redis::cmd("SET").arg(keys.replace("{id}", id)).arg(value).to_owned();
    for (id, value) in [("3", "12"), ("40", "0"), ("500", "7"), ("by-day", "9"), ("9223372036854775808", "1")] {
        let () = set(id, value).query_async(&mut redis).await.unwrap();
    }
    let found = report(&world, 0, &[]);
    assert_eq!((&found["rows"], &found["changed"], &found["ignored"]), (&3.into(), &2.into(), &2.into()), "{found}");
    assert_eq!(views(&world).await, [(3, 12), (500, 7)]);
    assert_eq!(report(&world, 0, &["--verify"])["differing"], 0);
    let () = set("3", "13").query_async(&mut redis).await.unwrap();
    let differs = report(&world, 2, &["--verify"]);
    assert_eq!(differs["targets"][0]["target"], "video:3", "{differs}");
    assert_eq!((&differs["targets"][0]["site"], &differs["targets"][0]["here"]), (&13.into(), &12.into()), "{differs}");
    let () = set("40", "many").query_async(&mut redis).await.unwrap();
    let output = world.tallyd(&["import"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).contains("post:views:40 does not hold a whole number >= 0"), "{}", stderr(&output));
}
