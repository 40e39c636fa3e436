//! A map that is wrong: it loses no event, and it stops before it fills the dead letters.

use serde_json::{Value, json};

use super::{Site, event, now_ms, settings};
use crate::common::{eventually, stderr, stdout};

const LIKES: &str = "SELECT COUNT(*) FROM like_record WHERE NOT is_del";

/// Two partitions share the limit.
const FEW_LETTERS: &str = "[consumer]\ndead_letters_max = 1000\n";

/// Publishes likes of the users `from` to `to` in lists.
async fn like(site: &Site, users: std::ops::RangeInclusive<u64>, action: &str) {
    let at = now_ms();
    let likes: Vec<Value> = users.map(|user| event(action, 42, user, at)).collect();
    for events in likes.chunks(100) {
        site.publish(&json!({ "events": events })).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn likes_that_a_wrong_map_refuses_are_all_counted_later() {
    let mut site = Site::new("map_wrong", "ms").await;
    let wrong = settings(&site.exchange, "s") + FEW_LETTERS;
    site.world.set(&wrong);
    let daemon = site.daemon().await;
    like(&site, 1..=1_900, "LIKE").await;
    daemon.logged("the map site is stopped, because ").await;
    let open = "SELECT COUNT(*) FROM dead_letter WHERE reason = 'at-out-of-range'";
    assert_eq!(site.world.count(open).await, 500, "the partition's share");
    assert!(!daemon.log().contains("dead-letters-dropped"), "{}", daemon.log());
    assert!(daemon.stop().success());
    // Another definition of the map begins a new trial.
    site.world.set(&(settings(&site.exchange, "ms") + FEW_LETTERS));
    let daemon = site.daemon().await;
    eventually("all likes are written", || async {
        let output = site.world.tallyd(&["dead", "replay", "--all"]);
        assert!(output.status.success(), "{}{}", stdout(&output), stderr(&output));
        site.world.tallyd(&["dead", "list", "--summary"]);
        site.world.count(LIKES).await == 1_900
    })
    .await;
    assert!(daemon.stop().success());
    site.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_map_that_refuses_its_first_events_waits_for_an_operator() {
    let site = Site::new("map_stops", "ms").await;
    let daemon = site.daemon().await;
    like(&site, 1..=60, "LIKE").await;
    like(&site, 61..=1_100, "SHARE").await;
    daemon.logged("the map site is stopped, because ").await;
    like(&site, 2_001..=2_002, "LIKE").await;
    let resumes = |said: &str| {
        let output = site.world.tallyd(&["admin", "map", "resume", "site"]);
        assert!(output.status.success() && stdout(&output).contains(said), "{}{}", stdout(&output), stderr(&output));
    };
    assert_eq!(site.world.count(LIKES).await, 60, "the likes after the stop wait in the queue");
    assert_eq!(site.world.tallyd(&["admin", "map", "resume", "other"]).status.code(), Some(64));
    resumes("the map site is resumed");
    eventually("the queue is consumed again", || async { site.world.count(LIKES).await == 62 }).await;
    resumes("the map site is not stopped");
    assert!(daemon.stop().success());
    site.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_map_that_one_daemon_has_stopped_is_stopped_for_all() {
    let site = Site::new("map_stops_all", "ms").await;
    let daemons = [site.daemon().await, site.daemon().await];
    like(&site, 1..=4_000, "SHARE").await;
    for daemon in daemons {
        daemon.logged("the map site is stopped, because ").await;
        assert!(daemon.stop().success());
    }
    let written = site.world.count("SELECT COUNT(*) FROM dead_letter").await;
    let tried = "SELECT CAST(taken + refused AS SIGNED) FROM map_in_use WHERE stopped = 1";
    assert_eq!(site.world.count(tried).await, written, "no event is written after the stop");
    // A daemon that starts again with the same map does not begin a new trial.
    let daemon = site.world.daemon();
    daemon.logged("the map site is stopped, because ").await;
    assert_eq!(site.world.count("SELECT COUNT(*) FROM dead_letter").await, written);
    assert!(daemon.stop().success());
    site.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn one_bad_event_in_ten_delays_no_event_of_a_new_map() {
    let site = Site::new("map_mixed", "ms").await;
    let daemon = site.daemon().await;
    for tens in 0..120 {
        like(&site, tens * 10 + 1..=tens * 10 + 9, "LIKE").await;
        like(&site, tens * 10 + 10..=tens * 10 + 10, "SHARE").await;
    }
    eventually("the good likes are written", || async { site.world.count(LIKES).await == 1_080 }).await;
    eventually("the others are letters", || async {
        site.world.count("SELECT COUNT(*) FROM dead_letter").await == 120
    })
    .await;
    assert!(!daemon.log().contains("is stopped"), "{}", daemon.log());
    assert!(daemon.stop().success());
    site.close().await;
}

/// Settings with a map whose type, time and kind are outside of the body.
fn outside(exchange: &str, kinds: &str) -> String {
    let mut text = settings(exchange, "s");
    for (from, to) in [
        ("pointer = \"/action\"", "pointer = [\"header:task\", \"property:type\"]"),
        ("pointer = \"/ts\"", "pointer = \"property:timestamp\""),
        ("pointer = \"/object/kind\"", "pointer = \"routing_key\""),
        ("\"1\" = \"video\"", kinds),
        ("list = \"/events\"", "ignore_other_types = true"),
    ] {
        text = text.replace(from, to);
    }
    text
}

#[tokio::test(flavor = "multi_thread")]
async fn fields_outside_of_the_body_are_read_again_by_a_replay() {
    use lapin::BasicProperties;
    use lapin::types::{AMQPValue, FieldTable};

    let mut site = Site::new("map_outside", "ms").await;
    let now_s = now_ms().unsigned_abs() / 1_000;
    site.world.set(&outside(&site.exchange, "\"user.7\" = \"video\""));
    let daemon = site.daemon().await;
    let send = async |key: &str, user: u64, properties: BasicProperties| {
        let body = json!({ "object": { "id": 42 }, "actor": { "id": user } }).to_string();
        let properties = properties.with_timestamp(now_s);
        site.publisher.publish_with(&site.exchange, key, body.as_bytes(), properties).await.unwrap();
    };
    let task = |task: &str| {
        let mut headers = FieldTable::default();
        headers.insert("task".into(), AMQPValue::LongString(task.into()));
        BasicProperties::default().with_headers(headers)
    };
    send("user.7", 1, task("LIKE")).await;
    send("user.7", 2, BasicProperties::default().with_type("LIKE".into())).await;
    send("user.7", 3, task("MAIL")).await;
    // Only the headers tell these two apart.
    send("user.8", 4, task("LIKE")).await;
    send("user.8", 4, task("UNLIKE")).await;
    send("user.7", 5, BasicProperties::default()).await;
    eventually("two likes are written", || async { site.world.count(LIKES).await == 2 }).await;
    let letters = "SELECT COUNT(*) FROM dead_letter WHERE reason = 'unknown-kind' AND error LIKE '%routing_key%'";
    eventually("two events are refused", || async { site.world.count(letters).await == 2 }).await;
    let without =
        "SELECT COUNT(*) FROM dead_letter WHERE error LIKE 'type from header:task or property:type is missing%'";
    eventually("no event without a type is ignored", || async { site.world.count(without).await == 1 }).await;
    assert!(daemon.stop().success());
    site.world.set(&outside(&site.exchange, "\"user.7\" = \"video\", \"user.8\" = \"film\""));
    let daemon = site.daemon().await;
    let output = site.world.tallyd(&["dead", "replay", "--all"]);
    assert!(stdout(&output).contains("2 of 3 dead letters replayed"), "{}{}", stdout(&output), stderr(&output));
    let unlikes = "SELECT COUNT(*) FROM like_record WHERE is_del AND user_id = 4";
    eventually("the unlike is written after the like", || async { site.world.count(unlikes).await == 1 }).await;
    assert_eq!(site.world.count(LIKES).await, 2);
    assert!(daemon.stop().success());
    site.close().await;
}
