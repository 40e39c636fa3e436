//! The real daemon takes events from RabbitMQ and writes them to MySQL.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test ends at its first failure")]

mod bodies;
mod faults;
mod fences;

use std::time::{Duration, Instant};

use crate::common;
use common::size::size;
use common::{Daemon, Dice, Model, World, body, eventually, target};
use futures_util::StreamExt;
use lapin::options::BasicConsumeOptions;
use lapin::types::FieldTable;
use tallyd_core::event::LikeEvent;
use tallyd_core::model::{Micros, UserId};

const TARGETS: u64 = 500;
const USERS: u64 = 5_000;
const NOW: i64 = 1_790_000_000_000_000;

/// All message bodies with their users, the expected result, and the malformed bodies.
type Traffic = (Vec<(UserId, Vec<u8>)>, Model, Vec<Vec<u8>>);

/// Returns the prefetch of a session that begins with this line of the log.
fn prefetch_of(line: &str) -> Option<u64> {
    let line: serde_json::Value = serde_json::from_str(line).ok()?;
    line["prefetch"].as_u64().filter(|_| line["event"] == "consuming")
}

/// Waits until the consumer has a usual prefetch. It takes the first ten messages one by one, and never keeps one waiting.
async fn takes_many(daemon: &Daemon) {
    let is_usual = |line: &str| prefetch_of(line).is_some_and(|prefetch| prefetch > 1);
    eventually("the consumer takes many messages", async || daemon.log().lines().any(is_usual)).await;
}

/// Receives messages as the only consumer, and dies without an acknowledgement.
async fn receive_and_die(world: &World, messages: u16) {
    let link = world.broker.connect("test").await.unwrap();
    link.channel.basic_qos(messages, Default::default()).await.unwrap();
    let (queue, options) = (world.broker.queue(0), BasicConsumeOptions::default());
    let consume = link.channel.basic_consume(queue.as_str().into(), "test".into(), options, FieldTable::default());
    let deliveries = consume.await.unwrap().take(messages.into());
    assert_eq!(deliveries.count().await, usize::from(messages));
    link.channel.close(200, "dies".into()).await.unwrap();
}

/// Makes `count` messages: 20 % are unlikes, 10 % are duplicates, 5 % are out of order, and 1 % are
/// malformed.
fn traffic(count: usize, seed: u64) -> Traffic {
    let mut dice = Dice::of_run(seed);
    let (mut bodies, mut model, mut malformed) = (Vec::new(), Model::default(), Vec::new());
    let mut events: Vec<LikeEvent> = Vec::new();
    while bodies.len() < count {
        let number = bodies.len();
        if dice.percent(1) {
            let text =
                ["nonsense", "{\"type\":\"like\"}", "{\"type\":\"like\",\"kind\":\"film\",\"target_id\":1}", "[]"];
            // The numbers make each body unique, because equal bodies become one dead letter.
            let body = format!("{}\n{seed} {number}", text[dice.below(4) as usize]).into_bytes();
            malformed.push(body.clone());
            bodies.push((UserId(1 + dice.below(USERS)), body));
            continue;
        }
        let event = if dice.percent(10) && !events.is_empty() {
            events[dice.below(events.len() as u64) as usize]
        } else {
            let late = if dice.percent(5) { dice.below(10_000_000) as i64 } else { 0 };
            LikeEvent {
                // The product of two random numbers is often small, so a few targets get most of the likes.
                target: target(1 + dice.below(TARGETS) * dice.below(TARGETS) / TARGETS),
                user: UserId(1 + dice.below(USERS)),
                at: Micros(NOW + number as i64 * 1_000 - late),
                liked: !dice.percent(20),
            }
        };
        model.apply(&event);
        events.push(event);
        bodies.push(body(&event));
    }
    (bodies, model, malformed)
}

async fn assert_dead_letters(world: &World, malformed: &[Vec<u8>]) {
    let mut kept: Vec<Vec<u8>> =
        sqlx::query_scalar("SELECT body FROM dead_letter").fetch_all(&world.pool).await.unwrap();
    let mut malformed = malformed.to_vec();
    kept.sort();
    malformed.sort();
    assert!(kept == malformed, "{} dead letters, {} malformed messages", kept.len(), malformed.len());
}

#[tokio::test(flavor = "multi_thread")]
async fn events_in_any_order_end_as_the_model_says() {
    let world = World::new("any_order", "").await;
    let (bodies, model, malformed) = traffic(5_000, 1);
    let (publisher, daemon) = (world.publisher().await, world.daemon());
    world.publish(&publisher, &bodies).await;
    world.ends_as(&model, &publisher, daemon).await;
    assert_dead_letters(&world, &malformed).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn four_partitions_share_the_work_and_end_as_the_model_says() {
    let world = World::new("four_partitions", "[amqp]\npartitions = 4").await;
    let (bodies, model, malformed) = traffic(5_000, 2);
    let (publisher, daemon) = (world.publisher().await, world.daemon());
    world.publish(&publisher, &bodies).await;
    world.ends_as(&model, &publisher, daemon).await;
    assert_dead_letters(&world, &malformed).await;
    assert_eq!(world.count("SELECT COUNT(DISTINCT slot) FROM counter").await, 4);
}

#[tokio::test(flavor = "multi_thread")]
async fn sigterm_under_load_writes_what_it_acknowledged_and_leaves_the_rest() {
    let world = World::new("sigterm", "[consumer]\nbatch_events_max = 200\n[amqp]\nprefetch = 2000").await;
    let publisher = world.publisher().await;
    let (bodies, model, malformed) = traffic(30_000, 4);
    world.publish(&publisher, &bodies).await;
    let daemon = world.daemon();
    eventually("some batches are written", || async { world.count("SELECT COUNT(*) FROM like_record").await > 1_000 })
        .await;
    assert_eq!(daemon.stop().code(), Some(0));
    let left = world.unconsumed(&world.broker.queue(0)).await;
    assert!(left > 0 && left < 30_000, "{left} messages are left in the queue");
    let owner: Option<String> =
        sqlx::query_scalar("SELECT owner FROM partition_owner").fetch_one(&world.pool).await.unwrap();
    assert_eq!(owner, None, "the partition must be released");
    // Each event must be either in MySQL or still in the queue.
    let written = world.count("SELECT COUNT(*) FROM like_record").await;
    let daemon = world.daemon();
    world.drained(&publisher).await;
    assert!(world.count("SELECT COUNT(*) FROM like_record").await > written);
    world.assert_equals(&model).await;
    assert!(daemon.stop().success());
    assert_dead_letters(&world, &malformed).await;
}

#[tokio::test]
async fn a_like_is_written_at_once_unless_a_batch_has_just_begun() {
    const LINGER: Duration = Duration::from_secs(3);
    let world = World::new("idle_like", &format!("[consumer]\nlinger_ms = {}", LINGER.as_millis())).await;
    let daemon = world.consuming().await;
    let publisher = world.publisher().await;
    let like = |user| body(&LikeEvent { target: target(1), user: UserId(user), at: Micros(NOW), liked: true });
    let began = Instant::now();
    world.publish(&publisher, &(1..=10).map(like).collect::<Vec<_>>()).await;
    takes_many(&daemon).await;
    assert!(began.elapsed() < 3 * LINGER, "each of the first ten likes waited");
    let writes = async |user| {
        let began = Instant::now();
        world.publish(&publisher, &[like(user)]).await;
        let is_written = async || world.count("SELECT COUNT(*) FROM like_record").await == user.cast_signed();
        eventually("the like is written", is_written).await;
        began.elapsed()
    };
    let began = Instant::now();
    assert!(writes(11).await < LINGER);
    writes(12).await;
    assert!(began.elapsed() > LINGER, "the second like did not wait");
    // Lets the partition be idle.
    tokio::time::sleep(LINGER).await;
    assert!(writes(13).await < LINGER);
}

#[tokio::test]
async fn a_busy_partition_begins_at_most_one_batch_per_linger() {
    const LINGER: Duration = Duration::from_millis(200);
    let settings = format!("[consumer]\nlinger_ms = {}\n[log]\nlevel = \"debug\"\n", LINGER.as_millis());
    let world = World::new("busy_likes", &settings).await;
    let daemon = world.consuming().await;
    let publisher = world.publisher().await;
    let (bodies, model, _) = traffic(300, 20);
    let (first, rest) = bodies.split_at(10);
    world.publish(&publisher, first).await;
    takes_many(&daemon).await;
    let began = Instant::now();
    let before = daemon.log().len();
    for like in rest {
        world.publish(&publisher, std::slice::from_ref(like)).await;
    }
    world.drained(&publisher).await;
    let lingers = began.elapsed().as_millis() / LINGER.as_millis();
    let batches = daemon.log()[before..].lines().filter(|line| line.contains("\"batch-committed\"")).count();
    assert!(batches > 1 && batches as u128 <= lingers + 1, "{batches} batches in {lingers} times linger_ms");
    world.assert_equals(&model).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_row_that_the_database_refuses_is_set_aside_alone() {
    let world = World::new("refused_row", "[consumer]\nlinger_ms = 500").await;
    sqlx::raw_sql(
        "CREATE TRIGGER refuse BEFORE INSERT ON like_record FOR EACH ROW \
         IF NEW.user_id IN (13, 666) THEN SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'not this one'; END IF",
    )
    .execute(&world.pool)
    .await
    .unwrap();
    let publisher = world.publisher().await;
    let event = |user| LikeEvent { target: target(1), user: UserId(user), at: Micros(NOW), liked: true };
    let bodies: Vec<_> = (1..=1_000).map(|user| body(&event(user))).collect();
    let mut model = Model::default();
    (1..=1_000).filter(|user| ![13, 666].contains(user)).for_each(|user| model.apply(&event(user)));
    let daemon = world.daemon();
    world.publish(&publisher, &bodies).await;
    eventually("valid likes are written", || async { world.count("SELECT COUNT(*) FROM like_record").await == 998 })
        .await;
    world.ends_as(&model, &publisher, daemon).await;
    assert_dead_letters(&world, &[body(&event(13)).1, body(&event(666)).1]).await;
    let reasons = world
        .count("SELECT COUNT(*) FROM dead_letter WHERE reason = 'refused-by-database' AND error LIKE '%not this one%'");
    assert_eq!(reasons.await, 2);
}

/// When a consumer starts, it tests MySQL with an update of a row of kind 0. A trigger undoes the update of this row's
/// state. Some servers assign the version column before the state column. To the consumer, MySQL then looks
/// like one of these servers.
#[tokio::test(flavor = "multi_thread")]
async fn rows_are_read_first_where_the_faster_way_is_not_exact() {
    let world = World::new("not_exact", "").await;
    sqlx::raw_sql(
        "CREATE TRIGGER keeps BEFORE UPDATE ON like_record FOR EACH ROW \
         SET NEW.is_del = IF(NEW.kind = 0, OLD.is_del, NEW.is_del)",
    )
    .execute(&world.pool)
    .await
    .unwrap();
    let (bodies, model, malformed) = traffic(500, 18);
    let (publisher, daemon) = (world.publisher().await, world.daemon());
    daemon.logged("reads-first").await;
    world.publish(&publisher, &bodies).await;
    world.ends_as(&model, &publisher, daemon).await;
    assert_dead_letters(&world, &malformed).await;
    assert_eq!(world.count("SELECT COUNT(*) FROM like_record WHERE kind = 0").await, 0);
}

/// After a restart the broker can route a user to another partition, so two partitions write the same rows. In this
/// test two partitions always write the same rows. The test runs with `reads_first` off and on.
#[tokio::test(flavor = "multi_thread")]
async fn two_writers_on_the_same_rows_stay_exact() {
    for reads_first in [false, true] {
        let settings =
            format!("[amqp]\npartitions = 2\n[consumer]\nbatch_events_max = 300\nreads_first = {reads_first}");
        let world = World::new(&format!("two_writers_{reads_first}"), &settings).await;
        let publisher = world.publisher().await;
        let mut dice = Dice::of_run(10);
        let (mut model, mut published) = (Model::default(), Vec::new());
        for number in 0..20_000 {
            let event = LikeEvent {
                target: target(1 + dice.below(5)),
                user: UserId(1 + dice.below(200)),
                at: Micros(NOW + number),
                liked: !dice.percent(40),
            };
            model.apply(&event);
            published.push((dice.below(2) as u16, body(&event).1));
        }
        let daemon = world.daemon();
        for part in published.chunks(2_000) {
            futures_util::future::join_all(part.iter().map(async |(partition, body)| {
                publisher.publish("", &world.broker.queue(*partition), body).await.unwrap();
            }))
            .await;
        }
        world.ends_as(&model, &publisher, daemon).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn lists_of_events_end_as_the_model_says_whatever_partition_they_go_through() {
    let world = World::new("lists", "[amqp]\npartitions = 2\n[consumer]\nbatch_events_max = 700").await;
    let publisher = world.publisher().await;
    let (bodies, model, malformed) = traffic(30_000, 11);
    // A list must be valid JSON, so the test sends each invalid body as a separate message. The events of a list belong
    // to several users, so the routing key of the list matches only its first user.
    let (events, alone): (Vec<_>, Vec<_>) =
        bodies.into_iter().partition(|(_, body)| serde_json::from_slice::<serde_json::Value>(body).is_ok());
    let list = |part: &[(UserId, Vec<u8>)]| {
        let events: Vec<&[u8]> = part.iter().map(|(_, body)| body.trim_ascii()).collect();
        (part[0].0, [b"[".as_slice(), &events.join(&b","[..]), b"]"].concat())
    };
    let mut lists: Vec<_> = events.chunks(100).map(list).collect();
    lists.extend(alone);
    let daemon = world.daemon();
    world.publish(&publisher, &lists).await;
    world.ends_as(&model, &publisher, daemon).await;
    // Each malformed body is an event followed by a unique number. A list contains the event without the number. So
    // some malformed events in lists are equal, and equal malformed events become one dead letter.
    let mut expected: Vec<Vec<u8>> = malformed
        .iter()
        .map(|body| match serde_json::from_slice::<serde_json::Value>(body) {
            Ok(_) => body.trim_ascii().to_vec(),
            Err(_) => body.clone(),
        })
        .collect();
    expected.sort();
    expected.dedup();
    assert_dead_letters(&world, &expected).await;
}

/// Hundreds of thousands of events are queued, in lists of a thousand events. The daemon keeps only a few batches in
/// memory.
#[tokio::test(flavor = "multi_thread")]
async fn memory_is_bounded_under_a_backlog_of_many_events() {
    let number = size(400, 1_200);
    let world = World::new("backlog", "").await;
    let publisher = world.publisher().await;
    let lists: Vec<(UserId, Vec<u8>)> = (0..number)
        .map(|list| {
            let events = (0..1_000).map(|user| {
                let (target, at) = (target(1 + list % 50), Micros(NOW + i64::try_from(list).unwrap()));
                body(&LikeEvent { target, user: UserId(1 + list * 1_000 + user), at, liked: true }).1
            });
            (UserId(1 + list), [b"[".as_slice(), &events.collect::<Vec<_>>().join(&b","[..]), b"]"].concat())
        })
        .collect();
    let backlog_mib = lists.iter().map(|(_, body)| body.len()).sum::<usize>() >> 20;
    for part in lists.chunks(50) {
        world.publish(&publisher, part).await;
    }
    let daemon = world.daemon();
    world.drained(&publisher).await;
    // The test subtracts the memory for the program file, because the file of a debug build is large.
    let peak_mib = (daemon.status_kib("VmHWM") - daemon.status_kib("RssFile")) / 1_024;
    // Two open batches and messages for four batches, besides the memory of an idle daemon.
    let allowed_mib = world.config.consumer.batch_bytes_max as u64 * 6 / (1 << 20) + 12;
    println!("{backlog_mib} MiB in the queue, up to {peak_mib} MiB in memory, of {allowed_mib}");
    assert!(peak_mib < allowed_mib, "the daemon used up to {peak_mib} MiB, not counting its program file");
    assert!(daemon.stop().success());
    let events = i64::try_from(number * 1_000).unwrap();
    assert_eq!(world.count("SELECT COUNT(*) FROM like_record").await, events);
    assert_eq!(world.count("SELECT CAST(SUM(value) AS SIGNED) FROM counter").await, events);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_slow_batch_is_logged_with_the_traces_of_its_messages() {
    const TRACE: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
    let world = World::new("consumer_slow", "").await;
    let slow = "CREATE TRIGGER slow BEFORE INSERT ON like_record FOR EACH ROW SET @slept = SLEEP(2.1)";
    sqlx::raw_sql(slow).execute(&world.pool).await.unwrap();
    let daemon = world.consuming().await;
    let (publisher, exchange) = (world.publisher().await, world.broker.exchange());
    let (user, like) = body(&LikeEvent { target: target(1), user: UserId(7), at: Micros(NOW), liked: true });
    publisher.publish_traced(&exchange, &user.to_string(), &like, Some(TRACE)).await.unwrap();
    daemon.logged("\"batch-slow\"").await;
    let log = daemon.log();
    let line = log.lines().find(|line| line.contains("\"batch-slow\"")).unwrap();
    let line: serde_json::Value = serde_json::from_str(line).unwrap();
    assert_eq!((&line["level"], &line["traceparents"]), (&"WARN".into(), &TRACE.into()), "{line}");
    assert!(line["seconds"].as_f64().unwrap() > 2.0 && line["events"] == 1, "{line}");
}
