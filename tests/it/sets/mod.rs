//! Numbers that events set: the newest set and what was counted after it, in whatever order that comes.

#![expect(clippy::unwrap_used, reason = "a test ends at the first surprise")]

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

/// Where the test's times begin: a minute ago.
fn start() -> i64 {
    tallyd::runtime::clock::now().0 - 60_000_000
}

/// What happens to a target's unread messages at a time.
#[derive(Clone, Copy, Debug)]
enum What {
    Count(i64),
    Set(i64),
    Reset,
}

/// By the target's id and the time.
type Event = (u64, i64, What);

/// As it is published, with that routing key.
fn published(number: usize, (id, at, what): Event, key: u64) -> (UserId, Vec<u8>) {
    let (id, at, of) = (TargetId(id), Micros(at), ("video", "unread"));
    let body = match what {
        What::Count(delta) => encode_count(id, of, delta, at, &format!("event-{number}"), None),
        What::Set(value) => encode_set(id, of, value, at),
        What::Reset => encode_reset(id, of, at),
    };
    (UserId(key), body)
}

/// In the order given, all by one partition.
fn bodies(events: &[Event]) -> Vec<(UserId, Vec<u8>)> {
    events.iter().enumerate().map(|(number, event)| published(number, *event, 1)).collect()
}

/// The numbers that events come to, without those that are zero.
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

/// The numbers in MySQL, without those that are zero.
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
