//! Tests `tallyd admin compare`, which compares the counters of an older site with the counters of tallyd.

#![expect(clippy::unwrap_used, reason = "a test ends at its first failure")]

use futures_util::StreamExt;
use serde_json::{Value, json};
use sqlx::AssertSqlSafe;

use crate::common::{DEADLINE, World, signal, stderr, stdout};

/// The test account can run SCAN only if the configuration has this section.
const SETTINGS: &str = "[filter]\n";

async fn run(world: &World, sql: &str) {
    sqlx::query(AssertSqlSafe(sql.to_owned())).execute(&world.pool).await.unwrap();
}

/// Adds the targets with the ids 1 to `targets` to the table `counter`. Each target's count equals the target's id.
async fn counted(world: &World, targets: u64) {
    let rows: Vec<String> = (1..=targets).map(|id| format!("(1, {id}, 1, 0, {id}, '2026-01-01')")).collect();
    let sql = "INSERT INTO counter (kind, target_id, metric, slot, value, update_at) VALUES";
    run(world, &format!("{sql} {}", rows.join(","))).await;
}

fn key(world: &World, id: impl std::fmt::Display) -> String {
    format!("{}:old:{id}", world.name)
}

async fn set(world: &World, id: impl std::fmt::Display, value: impl std::fmt::Display) {
    let () = redis::cmd("SET")
        .arg(key(world, id))
        .arg(value.to_string())
        .query_async(&mut world.redis().await)
        .await
        .unwrap();
}

/// Returns the report and the exit code.
fn compared(world: &World, source: &[&str]) -> (Value, Option<i32>) {
    let output = world.tallyd(&[&["admin", "compare", "--format", "json"], source].concat());
    let report = serde_json::from_slice(&output.stdout);
    (report.unwrap_or_else(|error| panic!("{error}: {}", stderr(&output))), output.status.code())
}

fn numbers<const N: usize>(report: &Value, fields: [&str; N]) -> [u64; N] {
    fields.map(|field| report[field].as_u64().unwrap_or_else(|| panic!("{field} in {report}")))
}

#[tokio::test(flavor = "multi_thread")]
async fn every_difference_of_keys_is_found_and_nothing_is_changed() {
    let world = World::new("compare_keys", SETTINGS).await.hurried();
    world.publisher().await;
    counted(&world, 30).await;
    for id in 1..=30 {
        set(&world, id, id).await;
    }
    // Compared with tallyd, the older site has counters that are higher by 1, lower by 3 and higher by 500. Other keys
    // of the older site have an invalid value, the wrong type or an invalid id. The older site has no key for target 2
    // and a zero for target 98, and tallyd lacks target 99.
    for (id, value) in [("3", "4"), ("4", "1"), ("6", "506"), ("5", "many"), ("99", "7"), ("98", "0"), ("today", "1")] {
        set(&world, id, value).await;
    }
    let mut redis = world.redis().await;
    let _: i64 = redis::cmd("DEL").arg(key(&world, 2)).arg(key(&world, 7)).query_async(&mut redis).await.unwrap();
    let _: i64 = redis::cmd("HSET").arg(key(&world, 7)).arg("likes").arg(7).query_async(&mut redis).await.unwrap();
    let before = world.counters().await;
    let pattern = key(&world, "{id}");
    let (report, code) = compared(&world, &["--keys", &pattern]);
    assert_eq!(code, Some(0), "{report}");
    let fields =
        ["checked", "equal", "transient", "differ", "drift_sum", "missing_old", "missing_tallyd", "unreadable"];
    assert_eq!(numbers(&report, fields), [30, 25, 0, 5, 513, 1, 1, 2], "{report}");
    assert_eq!(report["tallyd_more"], json!({ "1": 0, "2-9": 2, "10-99": 0, "100+": 0 }), "{report}");
    assert_eq!(report["tallyd_less"], json!({ "1": 1, "2-9": 1, "10-99": 0, "100+": 1 }), "{report}");
    let worst = &report["worst"];
    assert_eq!(worst[0], json!({ "target": "video:6", "old": 506, "tallyd": 6, "drift": -500 }), "{report}");
    assert_eq!(worst[1], json!({ "target": "video:99", "old": 7, "tallyd": null, "drift": -7 }), "{report}");
    let text = stdout(&world.tallyd(&["admin", "compare", "--keys", &pattern]));
    assert!(text.contains("5 differ by 513 in total"), "{text}");
    assert!(text.contains("video:2: tallyd 2, the older site none, +2"), "{text}");
    assert_eq!(world.counters().await, before);
    assert_eq!(world.count("SELECT COUNT(*) FROM repair").await, 0);
    let junk: String = redis::cmd("GET").arg(key(&world, 5)).query_async(&mut redis).await.unwrap();
    assert_eq!(junk, "many");
    for (arguments, why) in [
        (vec!["--keys", "like:count"], "--keys like:count lacks {id}"),
        (vec!["--keys", "x:{id}", "--metric", "view"], "--metric view is not in [metrics]"),
        (vec![], "required arguments were not provided"),
    ] {
        let output = world.tallyd(&[&["admin", "compare"], arguments.as_slice()].concat());
        assert_eq!(output.status.code(), Some(64), "{arguments:?}");
        assert!(stderr(&output).contains(why), "{why}: {}", stderr(&output));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_event_in_flight_at_the_first_look_is_no_difference() {
    let world = World::new("compare_flight", SETTINGS).await;
    world.publisher().await;
    counted(&world, 3).await;
    for id in 1..=3 {
        set(&world, id, id + 1).await;
    }
    let client = redis::Client::open(world.config.redis.url.expose()).unwrap();
    let monitor = client.get_async_monitor().await.unwrap();
    let mut commands = monitor.into_on_message::<String>();
    let pattern = key(&world, "{id}");
    let running = world
        .command()
        .args(["admin", "compare", "--format", "json", "--keys", &pattern])
        .stdout(std::process::Stdio::piped())
        .spawn();
    let running = running.unwrap();
    let third = format!("\"GET\" \"{}\"", key(&world, 3));
    let looked = async { while !commands.next().await.unwrap().contains(&third) {} };
    tokio::time::timeout(DEADLINE, looked).await.expect("the first pass reads the third key");
    // The first pass has read all three keys. Now the last events of two targets arrive.
    set(&world, 1, 1).await;
    set(&world, 2, 2).await;
    let output = tokio::task::spawn_blocking(|| running.wait_with_output()).await.unwrap().unwrap();
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(numbers(&report, ["transient", "differ", "drift_sum"]), [2, 1, 1], "{report}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_comparison_that_is_stopped_before_its_second_look_is_not_done() {
    let world = World::new("compare_stopped", SETTINGS).await;
    world.publisher().await;
    counted(&world, 1).await;
    set(&world, 1, 5).await;
    let client = redis::Client::open(world.config.redis.url.expose()).unwrap();
    let mut commands = client.get_async_monitor().await.unwrap().into_on_message::<String>();
    let pattern = key(&world, "{id}");
    let mut command = world.command();
    command.args(["admin", "compare", "--format", "json", "--keys", &pattern]).stdout(std::process::Stdio::piped());
    let running = command.spawn().unwrap();
    // The scan for other keys comes after the first look. The second look is seconds later.
    let scanned = async { while !commands.next().await.unwrap().contains("\"SCAN\"") {} };
    tokio::time::timeout(DEADLINE, scanned).await.expect("the run searches for other keys");
    signal(&running, "TERM");
    let output = tokio::task::spawn_blocking(|| running.wait_with_output()).await.unwrap().unwrap();
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((output.status.code(), &report["ended"]), (Some(1), &json!("stopped")), "{report}");
}
