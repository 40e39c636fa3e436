//! The daemon adds each `count` event once, even after faults.

#![expect(clippy::unwrap_used, reason = "a test ends at its first failure")]

use std::collections::BTreeMap;

use crate::common;
use common::{Dice, World, body, eventually, stderr, stdout, target};
use sqlx::Row;
use tallyd_core::event::{LikeEvent, encode_count};
use tallyd_core::model::{Metric, Micros, TargetId, UserId};

const METRICS: &str = "[metrics]\nlike = 1\nview = 3\ncomment = 4\n";

/// Returns the counters in MySQL that are not zero, by target and metric.
async fn numbers(world: &World) -> Numbers {
    sqlx::query(
        "SELECT target_id, metric, CAST(SUM(value) AS SIGNED) AS value FROM counter WHERE target_id < 1000000 \
         GROUP BY target_id, metric HAVING value <> 0",
    )
    .fetch_all(&world.pool)
    .await
    .unwrap()
    .iter()
    .map(|row| ((row.get(0), row.get(1)), row.get(2)))
    .collect()
}

fn view(id: u64, delta: i64, at: Micros, event_id: &str) -> (UserId, Vec<u8>) {
    (UserId(id), encode_count(TargetId(id), ("video", "view"), delta, at, event_id, None))
}

/// The value of each counter, by target and metric.
type Numbers = BTreeMap<(u64, u8), i64>;

/// Makes `count` events with random targets, metrics and times. Returns the bodies and the expected counters.
fn some(count: u64) -> (Vec<(UserId, Vec<u8>)>, Numbers) {
    let (mut dice, now) = (Dice::of_run(5), tallyd_base::runtime::clock::now());
    let (mut bodies, mut sums) = (Vec::new(), BTreeMap::new());
    for number in 0..count {
        let (id, delta) = (1 + dice.below(20), 1 + dice.below(9).cast_signed());
        let (metric, code) = if dice.percent(70) { ("view", 3) } else { ("comment", 4) };
        let at = Micros(now.0 - dice.below(86_400_000_000).cast_signed());
        let body = encode_count(TargetId(id), ("video", metric), delta, at, &format!("event-{number}"), None);
        bodies.push((UserId(number), body));
        *sums.entry((id, code)).or_insert(0) += delta;
    }
    (bodies, sums)
}

#[tokio::test]
async fn a_count_is_added_once_however_often_it_is_delivered() {
    let world = World::new("counts_once", METRICS).await;
    let (_daemon, publisher) = (world.consuming().await, world.publisher().await);
    let (bodies, sums) = some(500);
    world.publish(&publisher, &bodies).await;
    // The test also publishes a like, so that the repeated messages contain several types of events.
    let like = LikeEvent { target: target(1), user: UserId(9), at: tallyd_base::runtime::clock::now(), liked: true };
    world.consumed(&publisher, &[body(&like)]).await;
    world.publish(&publisher, &bodies).await;
    world.consumed(&publisher, &[bodies[0].clone(), bodies[0].clone(), body(&like), bodies[1].clone()]).await;
    let mut expected = sums;
    expected.insert((1, 1), 1);
    assert_eq!(numbers(&world).await, expected);
    assert_eq!(world.count("SELECT COUNT(*) FROM applied_event").await, 500);
    assert_eq!(world.count("SELECT COUNT(*) FROM dead_letter").await, 0);
}

/// The publisher republishes unconfirmed events again and again.
#[tokio::test]
async fn batches_with_one_applied_count_each_are_written_once() {
    let world = World::new("counts_again", &format!("[log]\nlevel = \"debug\"\n{METRICS}")).await;
    let (daemon, publisher) = (world.consuming().await, world.publisher().await);
    let (bodies, mut sums) = some(100);
    world.consumed(&publisher, &bodies).await;
    for (round, applied) in bodies.iter().enumerate().take(20) {
        let new = view(21, 1, tallyd_base::runtime::clock::now(), &format!("new-{round}"));
        world.consumed(&publisher, &[applied.clone(), new]).await;
    }
    sums.insert((21, 3), 20);
    assert_eq!(numbers(&world).await, sums);
    let failed = daemon.log().matches("\"contention\"").count();
    assert!(failed <= 2, "{failed} transactions failed");
}

#[tokio::test]
async fn a_count_survives_the_daemons_death_before_and_after_its_commit() {
    let world = World::new("counts_killed", METRICS).await;
    let publisher = world.publisher().await;
    let (bodies, sums) = some(200);
    world.publish(&publisher, &bodies).await;
    for point in ["consumer:before-commit", "consumer:after-commit", "consumer:before-commit"] {
        let crashed = world.command().env("TALLYD_FAULT_POINT", point).output().unwrap();
        assert!(stderr(&crashed).contains("fault-point"), "{}", stderr(&crashed));
    }
    let _daemon = world.daemon();
    world.drained(&publisher).await;
    assert_eq!(numbers(&world).await, sums);
}

#[tokio::test]
async fn two_daemons_that_kill_each_others_work_count_once() {
    let world =
        World::new("counts_two", &format!("[amqp]\npartitions = 2\n[consumer]\nbatch_events_max = 50\n{METRICS}"))
            .await;
    let mut daemon = world.consuming().await;
    let publisher = world.publisher().await;
    let (bodies, sums) = some(2_000);
    for piece in bodies.chunks(400) {
        world.publish(&publisher, piece).await;
        let next = world.daemon();
        next.logged("\"started\"").await;
        daemon.kill();
        daemon = next;
    }
    // The test publishes the same events again, through other partitions.
    let elsewhere: Vec<_> = bodies.iter().map(|(user, body)| (UserId(user.0 + 1), body.clone())).collect();
    world.consumed(&publisher, &elsewhere).await;
    assert_eq!(numbers(&world).await, sums);
}

#[tokio::test]
async fn what_the_ledger_has_forgotten_is_refused_and_what_it_knows_is_kept() {
    let world = World::new("counts_old", &format!("[consumer]\napplied_event_keep = \"1h\"\n{METRICS}")).await;
    let ago = |seconds: i64| Micros(tallyd_base::runtime::clock::now().0 - seconds * 1_000_000);
    // This row is so old that its partition of the table has expired. The daemon empties the partition when it starts.
    let old = ago(20 * 86_400).0 / 1_000_000;
    let insert = format!(
        "INSERT INTO applied_event VALUES ({old}, REPEAT('x', 16)), ({}, REPEAT('y', 16))",
        ago(3_700).0 / 1_000_000
    );
    sqlx::query(sqlx::AssertSqlSafe(insert)).execute(&world.pool).await.unwrap();
    let daemon = world.daemon();
    daemon.logged("ledger-emptied").await;
    assert_eq!(world.count("SELECT COUNT(*) FROM applied_event").await, 1);
    let publisher = world.publisher().await;
    let late = view(1, 1, ago(3_700), "late");
    world.consumed(&publisher, &[view(1, 1, ago(3_500), "in time"), late, view(1, 1, ago(0), "")]).await;
    assert_eq!(numbers(&world).await, BTreeMap::from([((1, 3), 1)]));
    let reasons = "SELECT COUNT(*) FROM dead_letter WHERE reason IN ('at-too-old', 'event-id-out-of-range')";
    assert_eq!(world.count(reasons).await, 2);
}

/// A daemon must also reject events that another daemon, with a shorter `applied_event_keep`, has already forgotten.
#[tokio::test]
async fn what_another_daemon_has_forgotten_is_not_counted_twice() {
    let keeping = |keep: &str| format!("[consumer]\napplied_event_keep = \"{keep}\"\n{METRICS}");
    let mut world = World::new("counts_keep", &keeping("7d")).await;
    let publisher = world.publisher().await;
    let long = world.daemon();
    let old = view(1, 1, Micros(tallyd_base::runtime::clock::now().0 - 3 * 86_400_000_000), "old");
    world.consumed(&publisher, std::slice::from_ref(&old)).await;
    assert_eq!(numbers(&world).await, BTreeMap::from([((1, 3), 1)]));
    world.set(&keeping("1h"));
    let short = world.daemon();
    short.logged("ledger-emptied").await;
    assert!(short.stop().success());
    world.consumed(&publisher, &[old, view(2, 1, tallyd_base::runtime::clock::now(), "new")]).await;
    assert_eq!(numbers(&world).await, BTreeMap::from([((1, 3), 1), ((2, 3), 1)]));
    // The daemon writes the dead letters of a batch after the events of the batch, so the test first stops the daemon.
    assert!(long.stop().success());
    assert_eq!(world.count("SELECT COUNT(*) FROM dead_letter WHERE reason = 'at-too-old'").await, 1);
}

#[tokio::test]
async fn what_two_counts_do_only_together_is_refused_of_the_second_alone() {
    let world = World::new("counts_together", METRICS).await;
    let publisher = world.publisher().await;
    let nearly = i64::MAX - (1 << 31) - 5;
    let fill = format!(
        "INSERT INTO counter (kind, target_id, metric, slot, value, update_at) VALUES (1, 1, 3, 0, {nearly}, NOW(6))"
    );
    sqlx::query(sqlx::AssertSqlSafe(fill)).execute(&world.pool).await.unwrap();
    let (at, most) = (tallyd_base::runtime::clock::now(), 1 << 31);
    let bodies = [view(1, most, at, "a"), view(1, most, at, "b"), view(2, 7, at, "c")];
    world.publish(&publisher, &bodies).await;
    let daemon = world.daemon();
    world.drained(&publisher).await;
    assert_eq!(numbers(&world).await, BTreeMap::from([((1, 3), nearly + most), ((2, 3), 7)]));
    assert!(daemon.stop().success());
    assert_eq!(world.count("SELECT COUNT(*) FROM dead_letter WHERE reason = 'refused-by-database'").await, 1);
}

#[tokio::test]
async fn an_event_is_known_by_its_id_its_number_and_its_second() {
    let world = World::new("counts_known", METRICS).await;
    let (_daemon, publisher) = (world.consuming().await, world.publisher().await);
    let second = tallyd_base::runtime::clock::now().0 / 1_000_000 * 1_000_000 - 5_000_000;
    let at = |micros: i64| Micros(second + micros);
    let comment = (UserId(1), encode_count(TargetId(1), ("video", "comment"), 1, at(0), "id", None));
    // The bodies are: the same event twice within one second, two events with the same id but another metric or target,
    // and one different event.
    let bodies = [
        view(1, 1, at(0), "id"),
        view(1, 1, at(999_999), "id"),
        comment,
        view(2, 1, at(0), "id"),
        view(1, 1, at(1_000_000), "id"),
    ];
    world.consumed(&publisher, &bodies).await;
    assert_eq!(numbers(&world).await, BTreeMap::from([((1, 3), 2), ((1, 4), 1), ((2, 3), 1)]));
}

#[tokio::test]
async fn the_ledger_is_emptied_while_batches_are_written() {
    let world = World::new("counts_prune", &format!("[consumer]\nbatch_events_max = 20\n{METRICS}")).await;
    let (_daemon, publisher) = (world.consuming().await, world.publisher().await);
    let (bodies, sums) = some(3_000);
    let store = tallyd_mysql::Store::new(&world.config.mysql, 2).unwrap();
    let publishing = async { world.publish(&publisher, &bodies).await };
    let emptying = async {
        let old = tallyd_base::runtime::clock::now().0 / 1_000_000 - 20 * 86_400;
        for number in 0..10 {
            let insert = format!("INSERT INTO applied_event VALUES ({}, REPEAT('x', 16))", old + number);
            sqlx::query(sqlx::AssertSqlSafe(insert)).execute(&world.pool).await.unwrap();
            let keep = world.config.consumer.applied_event_keep.0;
            eventually("the old day is emptied", || async {
                // If another session uses the table, the deletion waits for a few seconds and then fails. The daemon
                // also empties old days when it starts.
                store.forget_applied(tallyd_base::runtime::clock::now(), keep).await.is_ok()
                    && world.count("SELECT COUNT(*) FROM applied_event WHERE id = REPEAT('x', 16)").await == 0
            })
            .await;
        }
    };
    tokio::join!(publishing, emptying);
    world.drained(&publisher).await;
    assert_eq!(numbers(&world).await, sums);
    assert_eq!(world.count("SELECT COUNT(*) FROM applied_event").await, 3_000);
}

#[tokio::test]
async fn a_targets_numbers_are_shown_side_by_side() {
    let rule = "[[rule]]\nmetric = \"view\"\nwriter = \"api\"\n";
    let world = World::new("counts_show", &format!("{METRICS}{rule}")).await;
    let _daemon = world.consuming().await;
    let client = world.api_server();
    for user in 1..=3 {
        client.like(target(42), UserId(user), &[]).await.unwrap();
    }
    let publisher = world.publisher().await;
    for (delta, event_id) in [(9, "a"), (-2, "b")] {
        client.add(target(42), Metric(3), delta, event_id).await.unwrap();
    }
    world.drained(&publisher).await;
    let shown = stdout(&world.tallyd(&["show", "video:42"]));
    let words = |line: usize| shown.lines().nth(line).unwrap().split_whitespace().collect::<Vec<_>>();
    assert_eq!(words(2), ["like", "unknown", "3", "3"], "the bucket must not be loaded\n{shown}");
    assert!(world.tallyd(&["reconcile"]).status.success());
    let shown = world.report(&["show", "video:42"]);
    let number = |metric: &str, redis: Option<i64>, counter: i64, rows: Option<i64>| serde_json::json!({ "metric": metric, "redis": redis, "counter": counter, "rows": rows });
    let expected =
        [number("like", Some(3), 3, Some(3)), number("view", Some(7), 7, None), number("comment", Some(0), 0, None)];
    assert_eq!(shown, serde_json::json!({ "target": "video:42", "numbers": expected }));
    let refused = world.tallyd(&["show", "film:1"]);
    assert_eq!(refused.status.code(), Some(64));
    assert!(stderr(&refused).contains("the kinds are video"), "{}", stderr(&refused));
}

/// Returns the code blocks of docs/counters.md that are marked with this language.
fn documented(language: &str) -> Vec<String> {
    let text = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/docs/counters.md")).unwrap();
    let opening = format!("```{language}\n");
    text.split(&opening).skip(1).map(|rest| rest.split("```").next().unwrap().to_owned()).collect()
}

#[tokio::test]
async fn the_documented_product_is_counted_and_read_by_key() {
    let world = World::new("counts_documented", &documented("toml")[0]).await;
    let (_daemon, publisher) = (world.consuming().await, world.publisher().await);
    let text = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/docs/counters.md")).unwrap();
    let (product, _) = text.split_once("## Unread counters").unwrap();
    let events =
        product.lines().filter_map(|line| line.split_once("| `{").and_then(|(_, rest)| rest.split_once("}` |")));
    let now = (tallyd_base::runtime::clock::now().0 / 1_000_000).to_string();
    let bodies: Vec<(UserId, Vec<u8>)> = events
        .map(|(event, _)| {
            let event = format!("{{{event}}}").replace("1795251385", &now).replace("1795251386", &now);
            (UserId(7), event.into_bytes())
        })
        .collect();
    assert_eq!(bodies.len(), 8);
    world.consumed(&publisher, &bodies).await;
    assert_eq!(world.count("SELECT COUNT(*) FROM dead_letter").await, 0);
    let [view, select] = documented("sql").try_into().unwrap();
    sqlx::raw_sql(sqlx::AssertSqlSafe(view)).execute(&world.pool).await.unwrap();
    let row = sqlx::query(sqlx::AssertSqlSafe(select.clone())).fetch_one(&world.pool).await.unwrap();
    let numbers: [i64; 4] = ["likes", "comments", "views", "forwards"].map(|name| row.get(name));
    assert_eq!(numbers, [1, 0, 1_000, 0]);
    assert_eq!(numbers_of(&world, 9).await, BTreeMap::from([(5, 1), (8, 1)]));

    // The table `counter` contains many other targets, so the view must read these few targets by key.
    let rows: Vec<String> = (1_000..3_000).map(|id| format!("(1, {id}, 1, 0, 1, NOW(6))")).collect();
    let fill =
        format!("INSERT INTO counter (kind, target_id, metric, slot, value, update_at) VALUES {}", rows.join(","));
    sqlx::query(sqlx::AssertSqlSafe(fill)).execute(&world.pool).await.unwrap();
    sqlx::raw_sql("ANALYZE TABLE counter").execute(&world.pool).await.unwrap();
    let mut connection = world.pool.acquire().await.unwrap();
    let before = handler_reads(&mut connection).await;
    sqlx::query(sqlx::AssertSqlSafe(select)).fetch_all(&mut *connection).await.unwrap();
    let read = handler_reads(&mut connection).await - before;
    assert!(read < 100, "{read} rows were read");
    let ids: Vec<String> = (1_000..1_100).map(|id| id.to_string()).collect();
    let hundred = format!("SELECT * FROM video_counter WHERE target_id IN ({})", ids.join(","));
    let before = handler_reads(&mut connection).await;
    let found = sqlx::query(sqlx::AssertSqlSafe(hundred)).fetch_all(&mut *connection).await.unwrap();
    let read = handler_reads(&mut connection).await - before;
    assert!(found.len() == 100 && read < 1_000, "{} targets, {read} rows were read", found.len());
    drop(connection);
}

/// Returns the counters of one target, by metric.
async fn numbers_of(world: &World, id: u64) -> BTreeMap<u8, i64> {
    numbers(world)
        .await
        .into_iter()
        .filter(|((of, _), _)| *of == id)
        .map(|((_, metric), value)| (metric, value))
        .collect()
}

/// Returns how many rows this connection has read.
async fn handler_reads(connection: &mut sqlx::MySqlConnection) -> i64 {
    let sql =
        "SHOW SESSION STATUS WHERE Variable_name IN ('Handler_read_next', 'Handler_read_rnd_next', 'Handler_read_key')";
    let rows = sqlx::query(sql).fetch_all(connection).await.unwrap();
    rows.iter().map(|row| row.get::<String, _>(1).parse::<i64>().unwrap()).sum()
}
