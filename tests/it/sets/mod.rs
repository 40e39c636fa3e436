//! Tests counters that events can set. The result is the value of the newest set plus all later counts, in any order of
//! arrival.

#![expect(clippy::unwrap_used, reason = "a test ends at its first failure")]

mod order;
mod settled;
mod watched;

use std::collections::{BTreeMap, BTreeSet};

use crate::common;
use common::World;
use sqlx::Row;
use tallyd_core::event::{encode_count, encode_reset, encode_set};
use tallyd_core::model::{Micros, TargetId, UserId};

const UNREAD: &str = "[metrics]\nlike = 1\nview = 3\nunread = 4\n[[rule]]\nmetric = \"unread\"\nsettable = true\n";

/// Returns the earliest time of the test's events, which is a minute ago.
fn start() -> i64 {
    tallyd_base::runtime::clock::now().0 - 60_000_000
}

/// A change to a target's number of unread messages.
#[derive(Clone, Copy, Debug)]
enum What {
    Count(i64),
    Set(i64),
    Reset,
}

/// An event with the target's id, the time, and the change.
type Event = (u64, i64, What);

/// Returns the message of the event, with the routing key `key`.
fn published(number: usize, (id, at, what): Event, key: u64) -> (UserId, Vec<u8>) {
    let (id, at, of) = (TargetId(id), Micros(at), ("video", "unread"));
    let body = match what {
        What::Count(delta) => encode_count(id, of, delta, at, &format!("event-{number}"), None),
        What::Set(value) => encode_set(id, of, value, at),
        What::Reset => encode_reset(id, of, at),
    };
    (UserId(key), body)
}

/// Returns the messages of the events in the same order. All messages have the same routing key, so they use the same
/// partition.
fn bodies(events: &[Event]) -> Vec<(UserId, Vec<u8>)> {
    events.iter().enumerate().map(|(number, event)| published(number, *event, 1)).collect()
}

/// Computes the expected counters that are not zero.
fn model(events: &[Event]) -> BTreeMap<u64, i64> {
    let ids: BTreeSet<u64> = events.iter().map(|(id, ..)| *id).collect();
    let value = |id: u64| {
        let of = || events.iter().filter(move |(of, ..)| *of == id);
        let set = of().filter_map(|(_, at, what)| match what {
            What::Count(_) => None,
            What::Set(value) => Some((*at, *value)),
            What::Reset => Some((*at, 0)),
        });
        let (since, value) = set.max().unwrap_or((0, 0));
        let added =
            of().filter_map(|(_, at, what)| if let What::Count(delta) = what { Some((*at, *delta)) } else { None });
        value + added.filter(|(at, _)| *at > since).map(|(_, delta)| delta).sum::<i64>()
    };
    ids.into_iter().map(|id| (id, value(id))).filter(|(_, value)| *value != 0).collect()
}

/// Returns the counters in MySQL that are not zero.
async fn unread(world: &World) -> BTreeMap<u64, i64> {
    sqlx::query(
        "SELECT target_id, CAST(SUM(value) AS SIGNED) AS value FROM counter WHERE metric = 4 GROUP BY target_id HAVING value <> 0",
    )
    .fetch_all(&world.pool)
    .await
    .unwrap()
    .iter()
    .map(|row| (row.get(0), row.get(1)))
    .collect()
}
