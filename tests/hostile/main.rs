//! Messages that were made to hurt, and floods of them, on the real daemon: it lives, what is good among them is written, and the rest is set
//! aside with its reason, up to a bound.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test ends at the first surprise")]

#[path = "../common/mod.rs"]
mod common;
mod junk;
#[path = "../fuzz/mutate.rs"]
mod mutate;
mod numbers;
mod raw;

use std::collections::{BTreeMap, HashMap};

use common::dice;
use common::{Daemon, Model, World, body, eventually, stderr, stdout, target};
use lapin::BasicProperties;
use sqlx::Row;
use tallyd::event::{CountEvent, LikeEvent, Message, SetEvent, Terms, decode_all};
use tallyd::model::{Micros, UserId};

/// So much of a body is kept.
const KEPT_BYTES_MAX: usize = 1 << 20;

/// What becomes of the messages that are published, by the decoder's own word.
struct Expected {
    terms: Terms,
    model: Model,
    counts: Vec<CountEvent>,
    sets: Vec<SetEvent>,
    /// By the body.
    refused: HashMap<Vec<u8>, &'static str>,
}

impl Expected {
    fn of(world: &World) -> Self {
        Self {
            terms: Terms::new(&world.config),
            model: Model::default(),
            counts: Vec::new(),
            sets: Vec::new(),
            refused: HashMap::new(),
        }
    }

    fn note(&mut self, body: &[u8]) {
        decode_all(body, &self.terms, Micros::now(), |verdict, range| match verdict {
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

    /// Fails unless what is refused, and nothing else, is kept with its reason.
    async fn assert_letters(&self, world: &World) {
        let rows = sqlx::query("SELECT body, reason FROM dead_letter").fetch_all(&world.pool).await.unwrap();
        assert_eq!(rows.len(), self.refused.len(), "dead letters");
        for row in rows {
            let (body, reason): (Vec<u8>, String) = (row.get(0), row.get(1));
            assert_eq!(self.refused.get(&body).copied(), Some(reason.as_str()), "{}", body.escape_ascii());
        }
    }
}

/// A like that is good whatever stands beside it.
fn good(number: u64) -> Vec<u8> {
    body(&LikeEvent { target: target(number % 50 + 1), user: UserId(number + 1), at: Micros::now(), liked: true }).1
}

/// Publishes straight to a partition's queue, and waits until the broker has all.
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

/// Open dead letters by queue and reason.
async fn letters(world: &World) -> BTreeMap<(String, String), i64> {
    let sql = "SELECT queue, reason, COUNT(*) FROM dead_letter WHERE replayed_at IS NULL GROUP BY queue, reason";
    let rows = sqlx::query(sql).fetch_all(&world.pool).await.unwrap();
    rows.iter().map(|row| ((row.get(0), row.get(1)), row.get(2))).collect()
}

fn assert_lives(daemon: &mut Daemon) {
    assert!(daemon.child.try_wait().unwrap().is_none(), "the daemon has ended");
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
    assert!(daemon.stop().success());
    world.close().await;
}

/// Whoever reads it by calling himself needs some megabytes of stack, and an overflow ends the whole process.
#[tokio::test(flavor = "multi_thread")]
async fn headers_nested_as_deep_as_a_frame_can_hold_end_nothing() {
    let world = World::new("nested", "").await;
    let publisher = world.publisher().await;
    let mut daemon = world.daemon();
    daemon.logged("\"consuming\"").await;
    let (url, queue) = (world.config.amqp.url.expose(), world.broker.queue(0));
    let (lists, tables) = (raw::lists(raw::LISTS_MAX), raw::tables(raw::TABLES_MAX));
    for (value, body) in [(&lists, good(1)), (&tables, good(2)), (&lists, b"no JSON".to_vec())] {
        raw::publish(url, &queue, &body, value);
    }
    world.drained(&publisher).await;
    assert_lives(&mut daemon);
    assert_eq!(world.count("SELECT COUNT(*) FROM like_record").await, 2);
    let headers: String = sqlx::query_scalar("SELECT headers FROM dead_letter").fetch_one(&world.pool).await.unwrap();
    assert!(headers.contains("nested too deep"), "{headers}");
    assert!(daemon.stop().success());
    world.close().await;
}

/// RabbitMQ takes headers that fill a frame's payload, and the frame that it makes of them is larger than a client takes: the connection ends
/// at each delivery.
#[tokio::test(flavor = "multi_thread")]
async fn a_message_that_no_frame_brings_is_set_aside_by_the_broker_and_its_neighbours_are_written() {
    let world = World::new("unframed", "").await;
    let publisher = world.publisher().await;
    // Before it is whatever was set aside before.
    let aside = format!("{}.returned", world.name);
    for number in [1, 2] {
        publisher.publish("", &aside, &good(number)).await.unwrap();
    }
    let goods = |from: u64| (from..from + 50).map(|number| (UserId(number), good(number))).collect::<Vec<_>>();
    // The first of all: nobody reads how often those behind it have come back.
    raw::publish(world.config.amqp.url.expose(), &world.broker.queue(0), &good(1), &raw::too_large());
    for part in [goods(100), goods(200)] {
        world.publish(&publisher, &part).await;
    }
    // Which it goes to by turns, so that each sees a part of its returns.
    let daemons = [world.daemon(), world.daemon(), world.daemon()];
    // What comes again comes in another order: a last message says nothing.
    let written = || async { world.count("SELECT COUNT(*) FROM like_record").await };
    eventually("its neighbours are written", || async { written().await == 100 }).await;
    let depth = async |count| publisher.depth(&aside).await.unwrap().messages == count;
    eventually("it is set aside", || depth(3)).await;
    for daemon in daemons {
        assert!(daemon.stop().success());
    }
    let listed = world.tallyd(&["dead", "list"]);
    assert_eq!(world.count("SELECT COUNT(*) FROM dead_letter").await, 2, "{}", stderr(&listed));
    let said = format!("{}{}", stdout(&listed), stderr(&listed));
    assert!(said.contains("could not be looked at"), "{said}");
    eventually("it alone is left", || depth(1)).await;
    world.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn dead_letters_stop_at_their_bound_and_what_may_be_good_waits_for_room() {
    let settings = "[amqp]\npartitions = 2\n[consumer]\ndead_letters_max = 1000\n";
    let world = World::new("bound", settings).await;
    let publisher = world.publisher().await;
    let film = |number: u64| String::from_utf8(good(number)).unwrap().replace("video", "film").into_bytes();
    for partition in [0, 1_u16] {
        let of = |number: u64| u64::from(partition) * 10_000 + number;
        let malformed = (0..400).map(|number| format!("no JSON {}", of(number)).into_bytes());
        let films = (0..400).map(|number| film(of(number)));
        let all = std::iter::once(good(of(1))).chain(malformed).chain(films).chain(std::iter::once(good(of(2))));
        publish(&world, partition, plain(all)).await;
    }
    let likes = || world.count("SELECT COUNT(*) FROM like_record");
    let daemon = world.daemon();
    let of = |reason: &str, count| [0, 1].map(|partition| ((world.broker.queue(partition), reason.to_owned()), count));
    // A half of each part is for what may be good.
    let full: BTreeMap<_, _> = of("malformed-json", 250).into_iter().chain(of("unknown-kind", 250)).collect();
    eventually("both partitions are full", || async { letters(&world).await == full }).await;
    daemon.logged("dead-letters-dropped").await;
    daemon.logged("dead_letters_max leaves it").await;
    // Whoever dies with them and gets them again needs no room for those that are there, and makes none.
    daemon.kill();
    let daemon = world.daemon();
    daemon.logged("dead_letters_max leaves it").await;
    // One partition may be behind the other.
    eventually("those beside them that are good are written", || async { likes().await == 4 }).await;
    assert_eq!(letters(&world).await, full);
    for partition in [0, 1_u16] {
        publish(&world, partition, plain([good(u64::from(partition) + 20_000)])).await;
    }
    let purged = world.tallyd(&["dead", "purge", "--reason", "malformed-json", "--open", "--yes"]);
    assert!(purged.status.success(), "{}", stderr(&purged));
    world.drained(&publisher).await;
    assert_eq!(likes().await, 6);
    let kept = letters(&world).await;
    let films: BTreeMap<_, _> = of("unknown-kind", 400).into_iter().collect();
    assert_eq!(kept.into_iter().filter(|((_, reason), _)| reason == "unknown-kind").collect::<BTreeMap<_, _>>(), films);
    assert!(daemon.stop().success());
    world.close().await;
}
