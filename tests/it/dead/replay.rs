//! Replays dead letters.

use std::process::{Child, Stdio};

use sqlx::Row;
use tallyd_core::event::{LikeEvent, Reason};
use tallyd_core::model::{Kind, Micros, Target, TargetId, UserId};

use super::{METRICS, WITH_FILMS, assert_exits, film, ids, open, put_bodies, take, view};
use crate::common::{Model, World, body, eventually, signal, stderr, stdout, target};

fn both() -> String {
    format!("{WITH_FILMS}{METRICS}")
}

#[tokio::test(flavor = "multi_thread")]
async fn replays_end_with_exact_rows_however_often_they_are_killed() {
    let mut world = World::new("dead_replay", METRICS).await;
    let (daemon, publisher) = (world.consuming().await, world.publisher().await);
    let now = tallyd_base::runtime::clock::now();
    // These bodies are likes and counts of a kind that is not configured. Some bodies are lists that also contain valid
    // events.
    let (mut bodies, mut model) = (Vec::new(), Model::default());
    for number in 1..=150_u64 {
        let event = LikeEvent {
            target: Target { kind: Kind(2), id: TargetId(1 + number % 7) },
            user: UserId(1 + number % 40),
            at: Micros(now.0 + i64::try_from(number).unwrap()),
            liked: number % 3 > 0,
        };
        model.apply(&event);
        let like = tallyd_core::event::encode_like(&event, "film", None);
        let count = view(1 + number % 5, &format!("e-{number}"), now);
        let count = String::from_utf8(count).unwrap().replace("video", "film").into_bytes();
        bodies.push((event.user, [b"[", like.as_slice(), b",", &count, b"]"].concat()));
    }
    world.publish(&publisher, &bodies).await;
    eventually("all events are dead-lettered", || async { open(&world).await == 300 }).await;
    assert!(daemon.stop().success());
    assert_exits(&world.tallyd(&["dead", "replay", "--all"]), 1, "0 of 300 dead letters replayed");
    assert_exits(
        &world.tallyd(&["dead", "replay", "--all", "--dry-run"]),
        0,
        "0 of 300 dead letters would be replayed",
    );

    world.set(&both());
    let dry = world.report(&["dead", "replay", "--all", "--dry-run"]);
    assert_eq!((&dry["found"], &dry["replayed"], &dry["left"]), (&300.into(), &300.into(), &0.into()));
    assert_eq!(open(&world).await, 300);
    let killed =
        world.command().args(["dead", "replay", "--all"]).env("TALLYD_FAULT_POINT", "dead:confirmed").output().unwrap();
    assert!(stderr(&killed).contains("fault-point"), "{}", stderr(&killed));
    assert_eq!(open(&world).await, 300, "a letter that was not marked as replayed must still be open");
    let report = world.report(&["dead", "replay", "--reason", "unknown-kind", "--limit", "100"]);
    assert_eq!(report["replayed"], 100);
    let _daemon = world.consuming().await;
    let killed =
        world.command().args(["dead", "replay", "--all"]).env("TALLYD_FAULT_POINT", "dead:confirmed").output().unwrap();
    assert!(stderr(&killed).contains("fault-point"), "{}", stderr(&killed));
    assert_eq!(open(&world).await, 200);
    assert_exits(&world.tallyd(&["dead", "replay", "--since", "1h"]), 0, "200 of 200 dead letters replayed");
    world.drained(&publisher).await;
    assert_eq!(open(&world).await, 0);
    world.assert_equals(&model).await;
    assert_eq!(world.count("SELECT CAST(SUM(value) AS SIGNED) FROM counter WHERE metric = 3").await, 150);
    // The command replays all letters a second time.
    let all: Vec<String> = ids(&world).await.iter().map(|(id, _)| id.to_string()).collect();
    let again: Vec<&str> = ["dead", "replay", "--force"].into_iter().chain(all.iter().map(String::as_str)).collect();
    assert_exits(&world.tallyd(&again), 0, "300 of 300");
    world.drained(&publisher).await;
    world.assert_equals(&model).await;
    assert_eq!(world.count("SELECT CAST(SUM(value) AS SIGNED) FROM counter WHERE metric = 3").await, 150);
    assert_exits(&world.tallyd(&["dead", "replay", "--all"]), 0, "0 of 0");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_letter_goes_to_the_partition_that_its_producer_would_choose() {
    let world = World::new("dead_routed", &format!("[amqp]\npartitions = 4\n{METRICS}")).await;
    let publisher = world.publisher().await;
    let like =
        |user| LikeEvent { target: target(1), user: UserId(user), at: tallyd_base::runtime::clock::now(), liked: true };
    let bodies: Vec<(String, Vec<u8>)> = (1..=12)
        .map(|id: u64| match id % 2 {
            0 => (id.to_string(), body(&like(id)).1),
            _ => (id.to_string(), view(id, "x", tallyd_base::runtime::clock::now())),
        })
        .collect();
    let taken = async || {
        let mut taken: Vec<(Vec<u8>, u16)> = Vec::new();
        for (delivery, partition) in take(&world, 12).await {
            assert_eq!(delivery.properties.delivery_mode(), &Some(2));
            taken.push((delivery.data, partition));
        }
        taken.sort();
        taken
    };
    for (key, body) in &bodies {
        publisher.publish(&world.broker.exchange(), key, body).await.unwrap();
    }
    let expected = taken().await;
    put_bodies(&world, Reason::UnknownKind, &bodies.into_iter().map(|(_, body)| body).collect::<Vec<_>>()).await;
    assert_exits(&world.tallyd(&["dead", "replay", "--all"]), 0, "12 of 12");
    assert_eq!(taken().await, expected);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_would_be_refused_is_left_unless_forced_and_comes_back() {
    let world = World::new("dead_left", METRICS).await;
    let (_daemon, publisher) = (world.consuming().await, world.publisher().await);
    let good =
        body(&LikeEvent { target: target(1), user: UserId(1), at: tallyd_base::runtime::clock::now(), liked: true }).1;
    let half = [b"[", good.as_slice(), b",", &film(1, 1), b"]"].concat();
    let old = view(1, "old", Micros(1_262_304_000_000_000));
    let fence = br#"{"type":"fence","fence":7}"#.to_vec();
    put_bodies(&world, Reason::ReturnedByBroker, &[b"nonsense".to_vec(), old, half, fence, good]).await;
    let limited = world.report(&["dead", "replay", "--all", "--limit", "1", "--dry-run"]);
    assert_eq!(
        (&limited["replayed"], &limited["left"]),
        (&1.into(), &4.into()),
        "a replay must skip letters that it can't send"
    );
    let output = world.tallyd(&["dead", "replay", "1", "2", "3", "4", "5"]);
    assert_exits(&output, 1, "1 of 5 dead letters replayed");
    let text = stdout(&output);
    for said in [
        "1 was skipped: would be refused: malformed-json: ",
        "2 was skipped: would be refused: at-too-old: ",
        "3 was skipped: 1 of 2 events would be accepted; first refusal: unknown-kind: ",
        "4 was skipped: a fence",
    ] {
        assert!(text.contains(said), "{said} is not in {text}");
    }
    assert_exits(&world.tallyd(&["dead", "replay", "5"]), 1, "5 was skipped: it was replayed at 2");
    assert_eq!(ids(&world).await, [(1, true), (2, true), (3, true), (4, true), (5, false)]);

    let forced = world.report(&["dead", "replay", "--all", "--force"]);
    assert_eq!((&forced["replayed"], &forced["left"]), (&3.into(), &1.into()), "{forced}");
    world.drained(&publisher).await;
    // Two letters came back unchanged. One event of the list was written, and the other event is now a new letter.
    assert_eq!(ids(&world).await.len(), 6);
    let states: Vec<(u64, String, u32, bool)> =
        sqlx::query("SELECT id, reason, refusals, replayed_at IS NULL FROM dead_letter ORDER BY id")
            .fetch_all(&world.pool)
            .await
            .unwrap()
            .iter()
            .map(|row| (row.get(0), row.get_unchecked(1), row.get_unchecked(2), row.get_unchecked::<i64, _>(3) == 1))
            .collect();
    let state = |index: usize| (states[index].1.as_str(), states[index].2, states[index].3);
    assert_eq!(state(0), ("malformed-json", 2, true));
    assert_eq!(state(1), ("at-too-old", 2, true));
    assert_eq!(state(2), ("returned-by-broker", 1, false));
    assert_eq!(state(3), ("returned-by-broker", 1, true));
    assert_eq!(state(5), ("unknown-kind", 1, true));
    assert_eq!(world.counters().await[&target(1)], 1);
}

/// Starts a command, and waits until it has stopped itself at its pause point after the first confirms.
async fn paused(world: &World, arguments: &[&str]) -> Child {
    let mut command = world.command();
    command.args(arguments).env("TALLYD_PAUSE_POINT", "dead:confirmed").stdout(Stdio::piped()).stderr(Stdio::piped());
    let child = command.spawn().unwrap();
    let stat = format!("/proc/{}/stat", child.id());
    eventually("the command has stopped", || async { std::fs::read_to_string(&stat).unwrap().contains(") T ") }).await;
    child
}

#[tokio::test(flavor = "multi_thread")]
async fn a_replay_that_is_told_to_stop_notes_what_it_has_sent() {
    let world = World::new("dead_stopped", "").await;
    world.publisher().await;
    let like =
        |user| LikeEvent { target: target(1), user: UserId(user), at: tallyd_base::runtime::clock::now(), liked: true };
    put_bodies(&world, Reason::ReturnedByBroker, &(1..=150).map(|user| body(&like(user)).1).collect::<Vec<_>>()).await;
    let replay = paused(&world, &["dead", "replay", "--all"]).await;
    signal(&replay, "TERM");
    signal(&replay, "CONT");
    let output = replay.wait_with_output().unwrap();
    assert_exits(&output, 1, "stopped: the remaining letters are unchanged");
    let sent = take(&world, 64).await.len();
    assert_eq!(open(&world).await, 150 - i64::try_from(sent).unwrap());
    assert_exits(&world.tallyd(&["dead", "replay", "--all"]), 0, "86 of 86");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_letter_that_is_refused_before_its_replay_is_noted_stays_open() {
    let world = World::new("dead_race", "").await;
    let _daemon = world.consuming().await;
    put_bodies(&world, Reason::MalformedJson, &[b"nonsense".to_vec()]).await;
    let replay = paused(&world, &["dead", "replay", "1", "--force"]).await;
    let refusals = "SELECT CAST(refusals AS SIGNED) FROM dead_letter WHERE id = 1";
    eventually("the letter is rejected again", || async { world.count(refusals).await == 2 }).await;
    signal(&replay, "CONT");
    let output = replay.wait_with_output().unwrap();
    assert_exits(&output, 1, "1 of the replayed letters were immediately refused again");
    assert_eq!(ids(&world).await, [(1, true)]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_replay_ends_though_what_it_sends_comes_back_as_new_letters() {
    let world = World::new("dead_endless", "[consumer]\nlinger_ms = 1\n").await;
    let _daemon = world.consuming().await;
    // Each letter is a list of ten events. After the replay, each of these events is a separate letter.
    let list = |number: u64| {
        let events: Vec<Vec<u8>> = (0..10).map(|user| film(number, 1 + user)).collect();
        [b"[".as_slice(), &events.join(&b","[..]), b"]"].concat()
    };
    put_bodies(&world, Reason::ReturnedByBroker, &(1..=300).map(list).collect::<Vec<_>>()).await;
    assert_exits(&world.tallyd(&["dead", "replay", "--all", "--force"]), 0, "300 of 300 dead letters replayed");
    world.drained(&world.publisher().await).await;
    assert_eq!(open(&world).await, 3_000);
}

#[tokio::test(flavor = "multi_thread")]
async fn replayed_likes_are_said_to_be_missing_in_filters() {
    let world = World::new("dead_filters", &format!("{METRICS}[filter]\nlikes_min = 1000\n")).await;
    world.publisher().await;
    let like =
        body(&LikeEvent { target: target(1), user: UserId(1), at: tallyd_base::runtime::clock::now(), liked: true }).1;
    put_bodies(&world, Reason::ReturnedByBroker, &[like, view(1, "a", tallyd_base::runtime::clock::now())]).await;
    assert!(!stdout(&world.tallyd(&["dead", "replay", "2"])).contains("filters rebuild"));
    assert_exits(&world.tallyd(&["dead", "replay", "1"]), 0, "run `tallyd admin filters rebuild`");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_replay_that_no_queue_takes_fails_and_leaves_the_letter_open() {
    let world = World::new("dead_unroutable", "").await;
    world.publisher().await;
    let link = world.broker.connect("test").await.unwrap();
    link.channel.queue_delete(world.broker.queue(0).into(), Default::default()).await.unwrap();
    let like =
        body(&LikeEvent { target: target(1), user: UserId(1), at: tallyd_base::runtime::clock::now(), liked: true }).1;
    put_bodies(&world, Reason::ReturnedByBroker, &[like]).await;
    assert_exits(&world.tallyd(&["dead", "replay", "--all"]), 1, "no queue is bound for it");
    assert_eq!(open(&world).await, 1);
}
