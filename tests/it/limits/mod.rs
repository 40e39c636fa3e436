//! The daemon must use a limited amount of memory, files and threads, even with a long queue or during a long outage of
//! MySQL.

#![expect(clippy::unwrap_used, reason = "a test ends at its first failure")]

mod cell;
mod frames;

use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use crate::common;
use cell::Cell;
use common::proxy::Proxy;
use common::size::size;
use common::{Daemon, Model, World, body, target};
use lapin::options::{BasicPublishOptions, ConfirmSelectOptions};
use lapin::types::{AMQPValue, FieldTable};
use lapin::{BasicProperties, Confirmation};
use tallyd_core::event::{LIST_BYTES_MAX, LikeEvent, encode_like};
use tallyd_core::model::UserId;

/// Returns the memory limit that docs/operations/install.md recommends for the default settings.
fn memory_max_mib(partitions: u64) -> u64 {
    256 + 128 * (partitions - 1)
}

/// The limit for the bytes of a batch, in MiB. A daily run uses smaller batches, and so fewer messages.
fn batch_mib() -> u64 {
    size(2, 8)
}

/// Returns the number of MiB that do not fit into the daemon's memory limit.
fn large_mib(partitions: u64) -> u64 {
    size(80 * partitions, memory_max_mib(partitions) + 64)
}

/// The daemon's threads, tasks and open files stay below these limits. Its open files are connections, the log and
/// epoll. A leak per message or per outage would exceed the limits by far.
const FILES_MAX: usize = 64;
const THREADS_MAX: usize = 32;
const TASKS_MAX: usize = 64;

fn likes(from: u64, number: u64) -> Vec<LikeEvent> {
    let at = tallyd_base::runtime::clock::now();
    let like = |user| LikeEvent { target: target(1 + user % 100), user: UserId(user), at, liked: true };
    (from..from + number).map(like).collect()
}

/// Makes a list that is as long as a message can be. The list contains one event and many spaces.
fn list(event: &LikeEvent) -> (UserId, Vec<u8>) {
    let mut body = [b"[".as_slice(), &encode_like(event, "video", None)].concat();
    body.resize(LIST_BYTES_MAX - 1, b' ');
    body.push(b']');
    (event.user, body)
}

/// Returns the highest memory use of the daemon so far.
fn peak_mib(daemon: &Daemon) -> u64 {
    daemon.status_kib("VmHWM") / 1024
}

/// Reads the number of tasks from the daemon's metrics.
fn tasks(daemon: &Daemon) -> usize {
    let log = daemon.log();
    let line = log.lines().find(|line| line.contains("\"admin-listening\"")).unwrap();
    let line: serde_json::Value = serde_json::from_str(line).unwrap();
    let mut stream = TcpStream::connect(line["address"].as_str().unwrap()).unwrap();
    stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").unwrap();
    let mut page = String::new();
    stream.read_to_string(&mut page).unwrap();
    let tasks = page.lines().find_map(|line| line.strip_prefix("tallyd_tasks ")).unwrap();
    // The daemon writes a gauge as a decimal number, such as 7.0.
    tasks.strip_suffix(".0").unwrap_or(tasks).parse().unwrap()
}

fn number_of(daemon: &Daemon, what: &str) -> usize {
    fs::read_dir(format!("/proc/{}/{what}", daemon.child.id())).unwrap().count()
}

/// After tens of thousands of small messages the consumer has a large prefetch. Then large messages arrive while MySQL
/// doesn't answer. The consumer can't keep all large messages in memory.
async fn stays_under_memory_max(
    name: &str,
    partitions: u64,
    large: &[LikeEvent],
    publish: impl AsyncFnOnce(&World, &[LikeEvent]),
) {
    let settings = format!(
        "[amqp]\npartitions = {partitions}\n[consumer]\nbatch_bytes_max = {}\n[admin]\nlisten = \"127.0.0.1:0\"\n",
        batch_mib() << 20
    );
    let mut world = World::new(name, &settings).await;
    let (proxy, url) = Proxy::before(world.config.mysql.url.expose()).await;
    world.set(&format!("{settings}[mysql]\nurl = \"{url}\""));
    let cell = Cell::new(&world.name, memory_max_mib(partitions));
    let publisher = world.publisher().await;
    let small = likes(1, size(10_000, 25_000) * partitions);
    world.publish(&publisher, &small.iter().map(body).collect::<Vec<_>>()).await;
    let daemon = world.daemon();
    cell.holds(&daemon);
    world.drained(&publisher).await;

    // Without a limit for bytes, the daemon would keep all large messages. The small size allows half of them: 16 MiB for
    // the inbox, and the rest for what the allocator and the AMQP library add.
    let before = peak_mib(&daemon);
    let limit_mib = size(before + large_mib(partitions) / 2, memory_max_mib(partitions));
    proxy.hold();
    publish(&world, large).await;
    // A partition fails if a batch can't be written, or if its session restarts because too many bytes have arrived.
    for partition in 0..partitions {
        daemon.logged(&format!(" partition {partition} failed")).await;
    }
    let (peak_held, held) = (peak_mib(&daemon), [number_of(&daemon, "fd"), number_of(&daemon, "task"), tasks(&daemon)]);
    proxy.release();
    world.drained(&publisher).await;

    let mut model = Model::default();
    small.iter().chain(large).for_each(|event| model.apply(event));
    assert_eq!(world.counters().await, model.counters());
    let peak = peak_mib(&daemon);
    assert!(peak < limit_mib, "{peak} MiB of {limit_mib} MiB, {before} before, {peak_held} at the end of the outage");
    // The first numbers were measured during the outage, and the second numbers are measured after it.
    for [files, threads, tasks] in [held, [number_of(&daemon, "fd"), number_of(&daemon, "task"), tasks(&daemon)]] {
        println!("{peak} of {limit_mib} MiB, {files} files, {threads} threads, {tasks} tasks");
        assert!(files < FILES_MAX, "{files} files");
        assert!(threads < THREADS_MAX, "{threads} threads");
        assert!(tasks < TASKS_MAX, "{tasks} tasks");
    }
    cell.was_never_full();
    assert_eq!(daemon.stop().code(), Some(0));
}

async fn publish_lists(world: &World, events: &[LikeEvent]) {
    let publisher = world.broker.connect_publisher("test").await.unwrap();
    for event in events {
        world.publish(&publisher, &[list(event)]).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn lists_that_come_after_small_messages_while_mysql_is_away_stay_under_memory_max() {
    let large = likes(1_000_000, large_mib(1));
    stays_under_memory_max("limits_lists", 1, &large, publish_lists).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_second_partition_takes_no_more_than_its_share_of_memory_max() {
    let large = likes(1_000_000, large_mib(2));
    stays_under_memory_max("limits_two", 2, &large, publish_lists).await;
}

/// Two of these messages together are larger than the limit for bytes in flight. But RabbitMQ always delivers at least
/// two messages, because the prefetch is never lower.
#[tokio::test(flavor = "multi_thread")]
async fn messages_of_which_few_are_too_much_are_set_aside_and_their_neighbours_are_written() {
    const LARGE: u8 = 8;
    let world = World::new("limits_few", "[consumer]\nbatch_bytes_max = 1048576\n").await;
    let publisher = world.publisher().await;
    let (first, last) = (likes(1, 10), likes(100, 10));
    world.publish(&publisher, &first.iter().map(body).collect::<Vec<_>>()).await;
    for number in 0..LARGE {
        // The messages must differ, because equal messages become one dead letter.
        world.publish(&publisher, &[(UserId(1), vec![b'0' + number; 15 << 20])]).await;
    }
    world.publish(&publisher, &last.iter().map(body).collect::<Vec<_>>()).await;
    let daemon = world.daemon();
    world.drained(&publisher).await;
    let mut model = Model::default();
    first.iter().chain(&last).for_each(|event| model.apply(event));
    assert_eq!(world.counters().await, model.counters());
    let letters = world.count("SELECT COUNT(*) FROM dead_letter WHERE reason = 'too-large'").await;
    assert_eq!(letters, i64::from(LARGE));
    assert!(daemon.log().contains("\"prefetch-lowered\""), "{}", daemon.log());
    assert_eq!(daemon.stop().code(), Some(0));
}

/// The messages have small bodies and large headers. The headers of each message must fit into a frame of 128 KiB.
#[tokio::test(flavor = "multi_thread")]
async fn headers_that_come_after_small_messages_while_mysql_is_away_stay_under_memory_max() {
    let large = likes(1_000_000, large_mib(1) * 10);
    stays_under_memory_max("limits_headers", 1, &large, async |world, events| {
        let channel = world.broker.connect("test").await.unwrap().channel;
        channel.confirm_select(ConfirmSelectOptions::default()).await.unwrap();
        let mut headers = FieldTable::default();
        headers.insert("x-large".into(), AMQPValue::LongString("x".repeat(104_858).into()));
        let properties = BasicProperties::default().with_headers(headers).with_delivery_mode(2);
        for event in events {
            let (exchange, (user, body)) = (world.broker.exchange(), body(event));
            let options = BasicPublishOptions { mandatory: true, ..BasicPublishOptions::default() };
            let key = user.to_string();
            let sent = channel.basic_publish(
                exchange.as_str().into(),
                key.as_str().into(),
                options,
                &body,
                properties.clone(),
            );
            assert!(matches!(sent.await.unwrap().await.unwrap(), Confirmation::Ack(None)));
        }
    })
    .await;
}

/// Many buckets are missing in Redis, but they have almost no counters. Each bucket takes 16 bytes of memory while the
/// daemon loads it.
#[tokio::test(flavor = "multi_thread")]
async fn memory_stays_bounded_while_lost_buckets_are_loaded() {
    let bits = size(17, 20);
    let world = World::new("memory_load", &format!("[redis]\nbucket_bits = {bits}\ntimeout_ms = 30000\n")).await;
    let cell = Cell::new(&world.name, memory_max_mib(1));
    let daemon = world.daemon_with(&[("TALLYD__RECONCILE__CHANGED_CRON", "* * * * * *")]);
    cell.holds(&daemon);
    let loaded = async || daemon.log().contains("\"redis-loaded\"");
    let until = Instant::now() + Duration::from_secs(240);
    while !loaded().await {
        assert!(Instant::now() < until, "the buckets were not loaded in time");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    let (peak, limit) = (peak_mib(&daemon), size(96, memory_max_mib(1)));
    println!("{peak} of {limit} MiB");
    assert!(peak < limit, "{peak} MiB");
    cell.was_never_full();
}
