//! Tests the commands of `tallyd dead`. With these commands an operator manages dead letters. The tests use a real
//! table and a real queue.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test ends at its first failure")]

mod edit;
mod look;
mod purge;
mod replay;
mod returned;

use std::process::Output;

use crate::common;
use common::{World, stderr, stdout};
use futures_util::StreamExt;
use lapin::message::Delivery;
use sqlx::Row;
use tallyd_core::event::{Reason, encode_count};
use tallyd_core::model::{Micros, TargetId};
use tallyd_mysql::Store;
use tallyd_mysql::letters::DeadLetter;

const METRICS: &str = "[metrics]\nlike = 1\nview = 3\n";

/// Makes a like of the kind `film`. Only some of the configurations have this kind.
fn film(id: u64, user: u64) -> Vec<u8> {
    let at = tallyd_base::runtime::clock::now();
    format!(r#"{{"type":"like","kind":"film","target_id":"{id}","user_id":"{user}","at":{at}}}"#).into_bytes()
}

/// A configuration with the kind `film`, which has the code 2.
const WITH_FILMS: &str = "[kinds]\nvideo = 1\nfilm = 2\n";

fn view(id: u64, event_id: &str, at: Micros) -> Vec<u8> {
    encode_count(TargetId(id), ("video", "view"), 1, at, event_id, None)
}

fn letter(body: &[u8], reason: Reason, first_seen: Micros) -> DeadLetter {
    DeadLetter {
        apart: String::new(),
        body: body.to_vec(),
        headers: "{}".into(),
        reason: reason.code(),
        error: format!("dead-lettered for the test: {}", reason.code()),
        queue: "the test's".to_owned(),
        first_seen,
    }
}

/// Puts dead letters into the table, as the consumer does.
async fn put(world: &World, letters: &[DeadLetter]) {
    Store::new(&world.config.mysql, 1).unwrap().keep_dead_letters(letters).await.unwrap();
}

/// Makes one dead letter from each body, and adds the letters to the table. All letters have this reason and the
/// current time.
async fn put_bodies(world: &World, reason: Reason, bodies: &[Vec<u8>]) {
    let letters: Vec<DeadLetter> =
        bodies.iter().map(|body| letter(body, reason, tallyd_base::runtime::clock::now())).collect();
    put(world, &letters).await;
}

/// Returns the id of each dead letter, and true if the letter is open.
async fn ids(world: &World) -> Vec<(u64, bool)> {
    sqlx::query("SELECT id, CAST(replayed_at IS NULL AS UNSIGNED) FROM dead_letter ORDER BY id")
        .fetch_all(&world.pool)
        .await
        .unwrap()
        .iter()
        .map(|row| (row.get(0), row.get_unchecked::<u64, _>(1) == 1))
        .collect()
}

async fn open(world: &World) -> i64 {
    world.count("SELECT COUNT(*) FROM dead_letter WHERE replayed_at IS NULL").await
}

/// Takes this number of messages from the queues. Returns each message with the number of its partition. The queues
/// have a single active consumer, so `basic.get` does not work.
async fn take(world: &World, messages: usize) -> Vec<(Delivery, u16)> {
    let link = world.broker.connect("test").await.unwrap();
    let mut queues = Vec::new();
    for partition in 0..world.broker.partitions() {
        let queue = world.broker.queue(partition);
        let consume =
            link.channel.basic_consume(queue.as_str().into(), "".into(), Default::default(), Default::default());
        queues.push(consume.await.unwrap().map(move |delivery| (delivery.unwrap(), partition)));
    }
    let taking = futures_util::stream::select_all(queues).take(messages).collect::<Vec<_>>();
    let taken = tokio::time::timeout(common::DEADLINE, taking).await.expect("the messages come");
    for (delivery, _) in &taken {
        assert!(delivery.acker.ack(Default::default()).await.unwrap());
    }
    link.call("close", link.channel.close(200, "done".into())).await.unwrap();
    taken
}

#[track_caller]
fn assert_exits(output: &Output, code: i32, said: &str) {
    let text = stdout(output) + &stderr(output);
    assert_eq!(output.status.code(), Some(code), "{text}");
    assert!(text.contains(said), "\"{said}\" is not in: {text}");
}
