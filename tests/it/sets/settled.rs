//! Checks the count after each single set or count event.

use std::collections::BTreeMap;

use sqlx::Row;
use tallyd_core::event::{encode_reset, encode_set};
use tallyd_core::model::{Micros, TargetId, UserId};

use super::common::World;
use super::{Event, UNREAD, What, bodies, model, published, start, unread};

/// Publishes the events one by one, so that each event is in a separate batch. Returns the count of target 1 after each
/// batch.
async fn one_by_one(world: &World, events: &[Event]) -> Vec<i64> {
    let publisher = world.publisher().await;
    let mut seen = Vec::new();
    for body in bodies(events) {
        world.consumed(&publisher, &[body]).await;
        seen.push(unread(world).await.get(&1).copied().unwrap_or(0));
    }
    seen
}

#[tokio::test]
async fn a_set_that_comes_late_keeps_what_was_counted_after_it() {
    let world = World::new("sets_late", UNREAD).await;
    let _daemon = world.daemon();
    let start = start();
    // Some count events are from yesterday, so they are in another partition of the table.
    let at = |second: i64| start + second * 1_000_000;
    let events = [
        (1, at(-86_400), What::Count(100)),
        (1, at(10), What::Count(1)),
        (1, at(20), What::Count(2)),
        (1, at(30), What::Count(4)),
        (1, at(15), What::Set(50)),
        (1, at(12), What::Set(70)),
        (1, at(14), What::Count(1_000)),
        (1, at(20), What::Reset),
        (1, at(-86_300), What::Set(9)),
        (1, at(40), What::Reset),
        (1, at(41), What::Count(-3)),
    ];
    assert_eq!(one_by_one(&world, &events).await, [100, 101, 103, 107, 56, 56, 56, 4, 4, 0, -3]);
    let newest =
        "SELECT COUNT(*) FROM counter WHERE metric = 4 AND TIMESTAMPDIFF(MICROSECOND, '1970-01-01', update_at) >=";
    let newest = sqlx::query_scalar(sqlx::AssertSqlSafe(format!("{newest} {}", at(41)))).fetch_one(&world.pool).await;
    assert_eq!((newest.unwrap(), unread(&world).await), (1_i64, model(&events)), "no `at` is after `update_at`");
    // An old set event arrives for a counter that already has newer count events.
    let far = [(2, at(-5 * 86_400), What::Count(1)), (2, at(-4 * 86_400), What::Count(2)), (2, at(-2), What::Count(4))];
    let far = [far.as_slice(), &[(2, at(-4 * 86_400) - 1, What::Set(100))]].concat();
    let publisher = world.publisher().await;
    let numbered: Vec<_> = far.iter().enumerate().map(|(number, event)| published(number + 50, *event, 1)).collect();
    for body in numbered {
        world.consumed(&publisher, &[body]).await;
    }
    assert_eq!(unread(&world).await.get(&2), Some(&106));
}

#[tokio::test]
async fn at_equal_times_a_count_is_void_and_the_larger_value_wins() {
    let world = World::new("sets_equal", UNREAD).await;
    let _daemon = world.daemon();
    let at = start();
    let events = [
        (1, at, What::Count(5)),
        (1, at, What::Set(3)),
        (1, at, What::Count(7)),
        (1, at, What::Set(8)),
        (1, at, What::Reset),
    ];
    assert_eq!(one_by_one(&world, &events).await, [5, 3, 3, 8, 8]);
    assert_eq!(
        world.count("SELECT COUNT(*) FROM applied_event").await,
        2,
        "`applied_event` must also have events without effect"
    );
    assert_eq!(world.count("SELECT COUNT(*) FROM recent_delta").await, 1);
}

#[tokio::test]
async fn what_was_counted_before_a_number_became_settable_goes_with_the_first_set() {
    let mut world = World::new("sets_begun", "[metrics]\nlike = 1\nunread = 4").await;
    let daemon = world.daemon();
    let start = start();
    let before = [(1, start, What::Count(5)), (1, start + 9, What::Count(6))];
    assert_eq!(one_by_one(&world, &before).await, [5, 11]);
    assert!(daemon.stop().success());
    world.set(UNREAD);
    let (_daemon, publisher) = (world.daemon(), world.publisher().await);
    for (number, event) in [(1, start + 10, What::Count(1)), (1, start + 5, What::Set(100))].into_iter().enumerate() {
        world.consumed(&publisher, &[published(number + 10, event, 1)]).await;
    }
    assert_eq!(unread(&world).await, BTreeMap::from([(1, 101)]));
}

#[tokio::test]
async fn the_documented_red_dot_shows_what_is_unread_in_any_order() {
    let text = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/docs/counters.md")).unwrap();
    let config = text.split("```toml\n").nth(1).unwrap().split("```").next().unwrap();
    let world = World::new("sets_documented", config).await;
    let (_, story) = text.split_once("## Unread counters").unwrap();
    let now = (tallyd_base::runtime::clock::now().0 / 1_000_000 - 5).to_string();
    let rows: Vec<(Vec<u8>, i64)> = story
        .lines()
        .filter_map(|line| line.split_once("| `{")?.1.split_once("}` | "))
        .map(|(event, unread)| {
            let event = format!("{{{}}}", event.replace("1795251385", &now));
            (event.into_bytes(), unread.trim_end_matches(" |").parse().unwrap())
        })
        .collect();
    assert_eq!(rows.len(), 7);
    let (_daemon, publisher) = (world.daemon(), world.publisher().await);
    let dot = "SELECT CAST(COALESCE(SUM(value), 0) AS SIGNED) FROM counter WHERE metric = 8 AND target_id = 9";
    for (event, unread) in &rows {
        world.consumed(&publisher, &[(UserId(9), event.clone())]).await;
        assert_eq!(world.count(dot).await, *unread, "{}", String::from_utf8_lossy(event));
    }
    // The test publishes the same events in reverse order for target 10.
    for (event, _) in rows.iter().rev() {
        let event = String::from_utf8_lossy(event).replace(r#""target_id":"9""#, r#""target_id":"10""#);
        world.publish(&publisher, &[(UserId(10), event.into_bytes())]).await;
    }
    world.drained(&publisher).await;
    let other = "SELECT CAST(COALESCE(SUM(value), 0) AS SIGNED) FROM counter WHERE metric = 8 AND target_id = 10";
    assert_eq!(world.count(other).await, 5);
    assert_eq!(world.count("SELECT COUNT(*) FROM dead_letter").await, 0);
}

#[tokio::test]
async fn sets_that_can_never_be_applied_are_set_aside_alone() {
    let settings = format!("[consumer]\napplied_event_keep = \"1h\"\n{UNREAD}");
    let world = World::new("sets_refused", &settings).await;
    // To set these counters, the daemon must subtract more than a single slot can store.
    let fill = "INSERT INTO counter (kind, target_id, metric, slot, value, update_at) VALUES \
                (1, 2, 4, 7, -9223372036854775808, '2026-01-01'), (1, 3, 4, 0, 9223372036854775807, '2026-01-01'), \
                (1, 3, 4, 7, 9223372036854775807, '2026-01-01')";
    sqlx::query(fill).execute(&world.pool).await.unwrap();
    let publisher = world.publisher().await;
    let now = tallyd_base::runtime::clock::now();
    let old = Micros(now.0 - 3_700_000_000);
    let of = |metric| ("video", metric);
    let refused = [
        encode_set(TargetId(1), of("view"), 5, now),
        encode_reset(TargetId(1), of("view"), now),
        encode_set(TargetId(1), of("like"), 5, now),
        encode_set(TargetId(1), of("unread"), (1 << 53) + 1, now),
        encode_reset(TargetId(1), of("unread"), old),
        encode_set(TargetId(2), of("unread"), 1, now),
        encode_set(TargetId(3), of("unread"), 1, now),
    ];
    let taken = [encode_set(TargetId(1), of("unread"), 5, now), encode_set(TargetId(4), of("unread"), 6, now)];
    let bodies: Vec<_> =
        taken[..1].iter().chain(&refused).chain(&taken[1..]).map(|body| (UserId(1), body.clone())).collect();
    world.publish(&publisher, &bodies).await;
    let daemon = world.daemon();
    world.drained(&publisher).await;
    assert!(daemon.stop().success());
    let letters =
        sqlx::query("SELECT reason, COUNT(*) FROM dead_letter GROUP BY reason").fetch_all(&world.pool).await.unwrap();
    let letters: BTreeMap<String, i64> = letters.iter().map(|row| (row.get(0), row.get(1))).collect();
    let expected = [
        ("at-too-old", 1),
        ("not-settable", 2),
        ("refused-by-database", 2),
        ("unknown-metric", 1),
        ("value-out-of-range", 1),
    ];
    assert_eq!(letters, expected.map(|(reason, count)| (reason.to_owned(), count)).into());
    let numbers = unread(&world).await;
    assert_eq!((numbers.get(&1), numbers.get(&4)), (Some(&5), Some(&6)));
}
