//! The real daemon gets a very large number of harmful messages. The daemon must keep running, and write the valid
//! events among these messages. It dead-letters all other messages with a reason, until a limit is reached.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test ends at its first failure")]

mod junk;
mod numbers;
mod raw;
mod text;

use std::collections::{BTreeMap, HashMap};

use crate::common;
use common::servers::change;
use common::{Daemon, Model, World, body, eventually, stderr, stdout, target};
use lapin::BasicProperties;
use sqlx::Row;
use tallyd_core::event::{CountEvent, LikeEvent, Message, SetEvent, Terms, decode_all};
use tallyd_core::model::UserId;

/// If the daemon rejects a longer body, it keeps only this number of bytes.
const KEPT_BYTES_MAX: usize = 1 << 20;

/// The expected results of the published messages, which the test computes with tallyd's decoder.
struct Expected {
    terms: Terms,
    model: Model,
    counts: Vec<CountEvent>,
    sets: Vec<SetEvent>,
    /// Maps the body of each rejected message to the reason.
    refused: HashMap<Vec<u8>, &'static str>,
}

impl Expected {
    fn of(world: &World) -> Self {
        Self {
            terms: Terms::from(&world.config),
            model: Model::default(),
            counts: Vec::new(),
            sets: Vec::new(),
            refused: HashMap::new(),
        }
    }

    fn note(&mut self, body: &[u8]) {
        decode_all(body, &self.terms, tallyd_base::runtime::clock::now(), |verdict, range| match verdict {
            Ok(Message::Like(event)) => self.model.apply(&event),
            Ok(Message::Fence(_)) => {}
            Ok(Message::Count(event)) => self.counts.push(event),
            Ok(Message::Set(event)) => self.sets.push(event),
            Err(refusal) => {
                let kept = body[range].chunks(KEPT_BYTES_MAX).next().unwrap_or_default().to_vec();
                self.refused.insert(kept, refusal.reason.code());
            }
        });
    }

    /// Checks that each rejected message is a dead letter with the expected reason, and that there are no other dead
    /// letters.
    async fn assert_letters(&self, world: &World) {
        let rows = sqlx::query("SELECT body, reason FROM dead_letter").fetch_all(&world.pool).await.unwrap();
        assert_eq!(rows.len(), self.refused.len(), "dead letters");
        for row in rows {
            let (body, reason): (Vec<u8>, String) = (row.get(0), row.get(1));
            assert_eq!(self.refused.get(&body).copied(), Some(reason.as_str()), "{}", body.escape_ascii());
        }
    }
}

/// Makes a valid like, which the test sends among invalid messages.
fn good(number: u64) -> Vec<u8> {
    body(&LikeEvent {
        target: target(number % 50 + 1),
        user: UserId(number + 1),
        at: tallyd_base::runtime::clock::now(),
        liked: true,
    })
    .1
}

/// Publishes directly to a partition's queue, and waits until the broker has all messages.
async fn publish(world: &World, partition: u16, messages: Vec<(Vec<u8>, BasicProperties)>) {
    let link = world.broker.connect("test").await.unwrap();
    link.channel.confirm_select(Default::default()).await.unwrap();
    let queue = world.broker.queue(partition);
    for (body, properties) in messages {
        let sent = link.channel.basic_publish("".into(), queue.as_str().into(), Default::default(), &body, properties);
        drop(sent.await.unwrap());
    }
    link.channel.wait_for_confirms().await.unwrap();
    link.call("close", link.channel.close(200, "done".into())).await.unwrap();
}

fn plain(bodies: impl IntoIterator<Item = Vec<u8>>) -> Vec<(Vec<u8>, BasicProperties)> {
    bodies.into_iter().map(|body| (body, BasicProperties::default())).collect()
}

/// Counts open dead letters by queue and reason.
async fn letters(world: &World) -> BTreeMap<(String, String), i64> {
    let sql = "SELECT queue, reason, COUNT(*) FROM dead_letter WHERE replayed_at IS NULL GROUP BY queue, reason";
    let rows = sqlx::query(sql).fetch_all(&world.pool).await.unwrap();
    rows.iter().map(|row| ((row.get(0), row.get(1)), row.get(2))).collect()
}

fn assert_lives(daemon: &mut Daemon) {
    assert!(daemon.child.try_wait().unwrap().is_none(), "the daemon has exited");
    let log = daemon.log();
    assert!(!log.contains("panicked") && !log.contains("outage-begun"), "{log}");
}

#[tokio::test(flavor = "multi_thread")]
async fn whatever_comes_as_a_message_the_daemon_lives_and_its_neighbours_are_written() {
    let world = World::new("hostile", "[admin]\nlisten = \"127.0.0.1:0\"\n").await;
    let publisher = world.publisher().await;
    let mut daemon = world.daemon();
    daemon.logged("listening on").await;
    let mut expected = Expected::of(&world);
    let mut messages = Vec::new();
    for (number, (body, properties)) in (0..).zip(junk::messages(2_500)) {
        let like = good(number);
        expected.note(&body);
        expected.note(&like);
        messages.extend([(body, properties), (like, BasicProperties::default())]);
    }
    publish(&world, 0, messages).await;
    junk::ask(&daemon, 150).await;
    world.drained(&publisher).await;
    assert_lives(&mut daemon);
    world.assert_equals(&expected.model).await;
    expected.assert_letters(&world).await;
}

/// A recursive parser would need some megabytes of stack for such headers, and a stack overflow would end the process.
#[tokio::test(flavor = "multi_thread")]
async fn headers_nested_as_deep_as_a_frame_can_hold_end_nothing() {
    let world = World::new("nested", "").await;
    let publisher = world.publisher().await;
    let mut daemon = world.consuming().await;
    let (url, queue) = (world.config.amqp.url.expose(), world.broker.queue(0));
    let nested = |value: &[u8]| raw::Properties::default().header(b"nested", value);
    let (lists, tables) = (raw::lists(raw::LISTS_MAX), raw::tables(raw::TABLES_MAX));
    for (value, body) in [(&lists, good(1)), (&tables, good(2)), (&lists, b"no JSON".to_vec())] {
        raw::publish(url, ("", queue.as_bytes()), &nested(value), &body);
    }
    world.drained(&publisher).await;
    assert_lives(&mut daemon);
    assert_eq!(world.count("SELECT COUNT(*) FROM like_record").await, 2);
    let headers: String = sqlx::query_scalar("SELECT headers FROM dead_letter").fetch_one(&world.pool).await.unwrap();
    assert!(headers.contains("nested too deep"), "{headers}");
}

/// RabbitMQ accepts headers that fill the payload of a frame. When RabbitMQ delivers this message, the frame is larger
/// than a client accepts. So each delivery ends the client's connection.
#[tokio::test(flavor = "multi_thread")]
async fn a_message_that_no_frame_brings_is_set_aside_by_the_broker_and_its_neighbours_are_written() {
    let world = World::new("unframed", "").await;
    let publisher = world.publisher().await;
    // Dead letters of two earlier messages are in the queue already.
    let aside = format!("{}.returned", world.name);
    for number in [1, 2] {
        publisher.publish("", &aside, &good(number)).await.unwrap();
    }
    let goods = |from: u64| (from..from + 50).map(|number| (UserId(number), good(number))).collect::<Vec<_>>();
    // This message is the first in the queue. When a daemon receives this message, the daemon's connection ends. So no
    // daemon can read the delivery counts of the later messages in the queue.
    let (url, queue) = (world.config.amqp.url.expose(), world.broker.queue(0));
    raw::publish(
        url,
        ("", queue.as_bytes()),
        &raw::Properties::default().header(b"nested", &raw::too_large()),
        &good(1),
    );
    for part in [goods(100), goods(200)] {
        world.publish(&publisher, &part).await;
    }
    // The broker delivers the message to one daemon after another, so each daemon gets only some of the deliveries.
    let daemons = [world.daemon(), world.daemon(), world.daemon()];
    // Redelivered messages can arrive in any order, so the test only counts the rows.
    let written = || async { world.count("SELECT COUNT(*) FROM like_record").await };
    eventually("the other messages of the queue are written", || async { written().await == 100 }).await;
    let depth = async |count| publisher.depth(&aside).await.unwrap().messages() == Some(count);
    eventually("the message is dead-lettered", || depth(3)).await;
    for daemon in daemons {
        assert!(daemon.stop().success());
    }
    let listed = world.tallyd(&["dead", "list"]);
    assert_eq!(world.count("SELECT COUNT(*) FROM dead_letter").await, 2, "{}", stderr(&listed));
    let said = format!("{}{}", stdout(&listed), stderr(&listed));
    assert!(said.contains("could not be read"), "{said}");
    eventually("only this message is left", || depth(1)).await;
}

/// A like of a kind that is not configured.
fn film(number: u64) -> Vec<u8> {
    String::from_utf8(good(number)).unwrap().replace("video", "film").into_bytes()
}

#[tokio::test(flavor = "multi_thread")]
async fn likes_go_on_and_no_event_is_lost_when_dead_letters_are_full() {
    let settings = "[amqp]\npartitions = 2\n[consumer]\ndead_letters_max = 1000\n";
    let mut world = World::new("bound", settings).await;
    let publisher = world.publisher().await;
    let nothing = |number: u64| format!("{{\"a\":{number}}}").into_bytes();
    for partition in [0, 1_u16] {
        let of = |from: u64, until: u64| (from..until).map(move |number| u64::from(partition) * 10_000 + number);
        let junk = of(0, 300).map(nothing).chain(of(0, 400).map(film)).chain(of(300, 400).map(nothing));
        publish(&world, partition, plain(junk.chain(of(0, 5).map(good)))).await;
    }
    let daemon = world.daemon();
    world.drained(&publisher).await;
    assert_eq!(
        world.count("SELECT COUNT(*) FROM like_record").await,
        10,
        "the daemon writes the likes behind the invalid messages"
    );
    daemon.logged("dead-letters-dropped").await;
    daemon.logged("dead-letters-returned").await;
    let of = |reason: &str, count| [0, 1].map(|partition| ((world.broker.queue(partition), reason.to_owned()), count));
    let full: BTreeMap<_, _> = of("no-type", 300).into_iter().chain(of("unknown-kind", 200)).collect();
    assert_eq!(letters(&world).await, full);
    let listed = |list: &serde_json::Value| (list["returned"]["taken_in"].clone(), list["returned"]["left"].clone());
    let returned = world.broker.returned();
    eventually("the broker dead-letters messages", async || {
        publisher.depth(&returned).await.unwrap().messages() == Some(400)
    })
    .await;
    assert_eq!(
        listed(&world.report(&["dead", "list"])),
        (0.into(), 400.into()),
        "the quota for dead letters must be full"
    );
    let purged = world.tallyd(&["dead", "purge", "--reason", "no-type", "--open", "--yes"]);
    assert!(purged.status.success(), "{}", stderr(&purged));
    assert_eq!(listed(&world.report(&["dead", "list"])), (400.into(), 0.into()));
    assert_eq!(letters(&world).await, of("unknown-kind", 400).into_iter().collect::<BTreeMap<_, _>>());
    assert!(daemon.stop().success());
    world.set(&format!("{settings}[kinds]\nvideo = 1\nfilm = 2\n"));
    let _daemon = world.daemon();
    let replayed = world.tallyd(&["dead", "replay", "--reason", "unknown-kind"]);
    assert!(replayed.status.success(), "{}", stderr(&replayed));
    world.drained(&publisher).await;
    assert_eq!(world.count("SELECT COUNT(*) FROM like_record WHERE kind = 2").await, 800, "no like must be lost");
}

/// The quota for dead letters and the queue of returned messages are both full. The daemon stops reading this partition
/// until the broker takes dead letters again, and reports the reason.
#[tokio::test(flavor = "multi_thread")]
async fn a_partition_waits_while_the_broker_takes_no_dead_letter() {
    let world = World::new("bound_full", "[consumer]\ndead_letters_max = 1000\n").await;
    let publisher = world.publisher().await;
    let (policy, pattern) = (world.name.as_str(), format!("^{}\\.returned$", world.name));
    let limit = r#"{"max-length": 50, "overflow": "reject-publish"}"#;
    let set = ["set_policy", "--apply-to", "queues", policy, &pattern, limit];
    let full = change(&set, &["clear_policy", policy]);
    let returned = world.broker.returned();
    eventually("the broker rejects messages above the limit", || async {
        publisher.publish("", &returned, b"{}").await.is_err()
    })
    .await;
    publish(&world, 0, plain((0..1_100).map(film))).await;
    publish(&world, 0, plain([good(1)])).await;
    let daemon = world.daemon();
    daemon.logged("the dead-letter quota is full, and publishing to").await;
    assert_eq!(letters(&world).await.into_values().sum::<i64>(), 1_000);
    drop(full);
    world.drained(&publisher).await;
    daemon.logged("outage-over").await;
    assert_eq!(world.count("SELECT COUNT(*) FROM like_record").await, 1);
    let purged = world.tallyd(&["dead", "purge", "--reason", "unknown-kind", "--open", "--yes"]);
    assert!(purged.status.success(), "{}", stderr(&purged));
    assert!(world.tallyd(&["dead", "list"]).status.success());
    assert_eq!(letters(&world).await[&(world.broker.queue(0), "unknown-kind".to_owned())], 100, "none is lost");
}
