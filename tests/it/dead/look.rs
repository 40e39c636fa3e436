//! Tests `tallyd dead list`, `tallyd dead show`, and invalid command lines.

use std::time::Duration;

use serde_json::json;
use tallyd_core::event::Reason;
use tallyd_core::model::{Micros, UserId};

use super::{METRICS, WITH_FILMS, assert_exits, film, letter, put, put_bodies, view};
use crate::common::ports::free_port;
use crate::common::{World, eventually, stderr, stdout};

/// Control characters. Two sequences clear the screen (one in ASCII, one with a C1 character), and another character
/// reverses the reading direction.
const NASTY: &str = "{\"type\": \"\u{1b}[2J\u{9b}2J\u{202e}\u{7}";

#[tokio::test(flavor = "multi_thread")]
async fn dead_letters_are_listed_newest_first_and_do_nothing_to_a_terminal() {
    let world = World::new("dead_list", METRICS).await;
    let (_daemon, publisher) = (world.consuming().await, world.publisher().await);
    let bodies = [film(1, 7), NASTY.as_bytes().to_vec(), vec![0xff, 0x1b, b'c'], vec![b'x'; 64 * 1024]];
    for (number, body) in (1..).zip(&bodies) {
        world.publish(&publisher, &[(UserId(7), body.clone())]).await;
        let count = "SELECT COUNT(*) FROM dead_letter";
        eventually("the message is dead-lettered", || async { world.count(count).await == number }).await;
    }
    let output = world.tallyd(&["dead", "list"]);
    assert_exits(&output, 0, "malformed-json  open");
    let text = stdout(&output);
    assert!(text.chars().all(|shown| shown == '\n' || !shown.is_control()), "{text:?}");
    assert!(!text.contains('\u{202e}'), "{text:?}");
    for said in
        ["\\u{1b}[2J\\u{9b}2J\\u{202e}\\u{7}", "\\xff\\u{1b}c (3 bytes)", "xxx… (65536 bytes)", "kind is \"film\""]
    {
        assert!(text.contains(said), "{said} is not in {text}");
    }

    let listed = world.report(&["dead", "list"]);
    let letters = listed["letters"].as_array().unwrap();
    let ids: Vec<u64> = letters.iter().map(|letter| letter["id"].as_u64().unwrap()).collect();
    assert!(ids.len() == 4 && ids.is_sorted_by(|newer, older| newer > older), "{ids:?}");
    assert_eq!((&letters[3]["reason"], &letters[3]["replayed_at"]), (&json!("unknown-kind"), &json!(null)));
    assert_eq!((&letters[3]["refusals"], &letters[3]["queue"]), (&json!(1), &json!(world.broker.queue(0))));
    assert_eq!((&listed["more"], &listed["returned"]["taken_in"]), (&json!(false), &json!(0)));
    let raw = stdout(&world.tallyd(&["dead", "list", "--format", "json"]));
    assert!(raw.chars().all(|shown| shown == '\n' || !shown.is_control()), "{raw:?}");

    let summary = world.report(&["dead", "list", "--summary"]);
    let reasons: Vec<(&str, u64)> = summary["reasons"]
        .as_array()
        .unwrap()
        .iter()
        .map(|of| (of["reason"].as_str().unwrap(), of["open"].as_u64().unwrap()))
        .collect();
    assert_eq!(reasons, [("malformed-json", 3), ("unknown-kind", 1)]);
    assert_exits(&world.tallyd(&["dead", "list", "--summary"]), 0, "unknown-kind");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_list_is_of_a_reason_of_a_time_of_what_is_open_and_not_too_long() {
    let world = World::new("dead_some", "").await;
    let now = tallyd_base::runtime::clock::now();
    let letters: Vec<_> = (0..6)
        .map(|hours| {
            let reason = if hours % 2 == 0 { Reason::UnknownKind } else { Reason::AtInFuture };
            letter(&film(hours, 1), reason, now.before(Duration::from_secs(3_600 * hours)))
        })
        .collect();
    put(&world, &letters).await;
    sqlx::query("UPDATE dead_letter SET replayed_at = NOW(6) WHERE id = 1").execute(&world.pool).await.unwrap();
    let since = tallyd::letter::text::instant(now.before(Duration::from_secs(3_600 * 3 + 60)));
    let cases: [(&[&str], &[u64]); 7] = [
        (&[], &[6, 5, 4, 3, 2, 1]),
        (&["--reason", "unknown-kind"], &[5, 3, 1]),
        (&["--reason", "unknown-kind", "--open"], &[5, 3]),
        (&["--since", "150m"], &[3, 2, 1]),
        (&["--since", &since], &[4, 3, 2, 1]),
        (&["--limit", "2"], &[6, 5]),
        (&["--reason", "too-large"], &[]),
    ];
    for (arguments, expected) in cases {
        let listed = world.report(&[&["dead", "list", "--no-returned"], arguments].concat());
        let ids: Vec<u64> =
            listed["letters"].as_array().unwrap().iter().map(|letter| letter["id"].as_u64().unwrap()).collect();
        assert_eq!(ids, expected, "{arguments:?}");
        assert_eq!((&listed["more"], &listed["returned"]), (&json!(arguments.contains(&"--limit")), &json!(null)));
    }
    let text = stdout(&world.tallyd(&["dead", "list", "--no-returned", "--limit", "5"]));
    assert!(text.contains("there are more") && !text.contains("  replayed 2"), "{text}");
    assert_exits(&world.tallyd(&["dead", "list", "--no-returned", "--reason", "too-large"]), 0, "no dead letters");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_letter_is_shown_whole_and_judged_by_todays_configuration() {
    let mut world = World::new("dead_show", METRICS).await;
    let twice = br#"{"at":12345678901234567890123,"at":1,"x":"\u001b"}"#.to_vec();
    let binary: Vec<u8> = (0..=255).collect();
    let large = vec![b'y'; 64 * 1024 + 1];
    let old = view(3, "old", Micros(1_262_304_000_000_000));
    let bodies = [film(1, 7), twice, NASTY.as_bytes().to_vec(), binary.clone(), large.clone(), old];
    put_bodies(&world, Reason::UnknownKind, &bodies).await;

    let shown = world.report(&["dead", "show", "1", "6", "4"]);
    assert_eq!(shown[0]["body"].as_str().unwrap().as_bytes(), bodies[0]);
    assert_eq!(shown[0]["now"]["refused"], 1);
    assert!(shown[0]["now"]["words"].as_str().unwrap().starts_with("would be refused: unknown-kind: "), "{shown}");
    assert!(shown[1]["now"]["words"].as_str().unwrap().contains("at-too-old"), "{shown}");
    assert!(shown[2]["body_hex"].as_str().unwrap().starts_with("000102"), "{shown}");
    for (id, said) in [
        ("1", "\"target_id\": \"1\""),
        ("2", "{\n  \"at\": 12345678901234567890123,\n  \"at\": 1,\n  \"x\": \"\\u001b\"\n}"),
        ("3", "\\u{1b}[2J\\u{9b}2J\\u{202e}"),
        ("4", "00000040  40 41 42"),
        ("5", "65537 bytes"),
    ] {
        let output = world.tallyd(&["dead", "show", id]);
        assert_exits(&output, 0, said);
        assert!(stdout(&output).chars().all(|shown| shown == '\n' || !shown.is_control()), "{id}");
    }
    for (id, body) in (1..).zip(&bodies) {
        assert_eq!(world.tallyd(&["dead", "show", &id.to_string(), "--raw"]).stdout, *body);
    }

    world.set(WITH_FILMS);
    let shown = world.report(&["dead", "show", "1"]);
    let now = json!({ "taken": 1, "refused": 0, "words": "would be accepted", "routing_key": "7" });
    assert_eq!(shown[0]["now"], now);
    assert_exits(&world.tallyd(&["dead", "show", "1"]), 0, "now         would be accepted");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_command_line_that_is_wrong_exits_with_64() {
    let world = World::new("dead_usage", "").await;
    for (arguments, said) in [
        (&["dead"][..], "Usage"),
        (&["dead", "list", "--reason", "because"], "because"),
        (&["dead", "list", "--since", "soon"], "2026-11-21T10:00:00Z"),
        (&["dead", "list", "--limit", "0"], "0"),
        (&["dead", "show"], "ID"),
        (&["dead", "show", "17"], "there is no dead letter 17"),
        (&["dead", "show", "1", "2", "--raw"], "name one"),
        (&["dead", "replay"], "--all"),
        (&["dead", "replay", "17", "18"], "there is no dead letter 17, 18"),
        (&["dead", "replay", "1", "--all"], "cannot be used with"),
        (&["dead", "replay", "--edit", "--all"], "cannot be used with"),
        (&["dead", "replay", "--edit", "1", "2"], "name one"),
        (&["dead", "replay", "--edit", "17"], "there is no dead letter 17"),
        (&["dead", "purge"], "--older-than"),
        (&["dead", "purge", "--open"], "--older-than"),
        (&["dead", "purge", "--open", "--replayed"], "cannot be used with"),
        (&["dead", "purge", "17"], "there is no dead letter 17"),
        (&["dead", "purge", "--older-than", "soon"], "30m"),
    ] {
        assert_exits(&world.tallyd(arguments), 64, said);
    }
    for command in ["list", "show", "replay", "purge"] {
        assert_exits(&world.tallyd(&["dead", command, "--help"]), 0, "--format");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn servers_that_are_away_are_said() {
    let world = World::new("dead_away", "[mysql]\nconnect_timeout_ms = 1000").await;
    put_bodies(&world, Reason::UnknownKind, &[film(1, 1)]).await;
    let port = free_port();
    let mysql = ("TALLYD__MYSQL__URL", format!("mysql://root@127.0.0.1:{port}/tally"));
    let amqp = ("TALLYD__AMQP__URL", format!("amqp://u@127.0.0.1:{port}/%2f"));
    for arguments in [&["list"][..], &["show", "1"], &["replay", "--all"], &["purge", "1", "--yes"]] {
        let output = world.command().arg("dead").args(arguments).env(mysql.0, &mysql.1).output().unwrap();
        assert_exits(&output, 75, "connect to MySQL");
    }
    // Even if RabbitMQ is unreachable, the command lists the letters in the table.
    let output = world.command().args(["dead", "list"]).env(amqp.0, &amqp.1).output().unwrap();
    assert_exits(&output, 0, "could not be read: connect to RabbitMQ");
    assert!(stdout(&output).contains("unknown-kind"), "{}", stdout(&output));
    // RabbitMQ is reachable now, but the queue is not declared.
    assert_exits(&world.tallyd(&["dead", "list"]), 0, "no queue");
    let output = world.command().args(["dead", "replay", "1", "--force"]).env(amqp.0, &amqp.1).output().unwrap();
    assert_exits(&output, 75, "connect to RabbitMQ");
    // The exchange is not declared, either.
    let output = world.tallyd(&["dead", "replay", "1", "--force"]);
    assert!(matches!(output.status.code(), Some(1 | 75)), "{}", stderr(&output));
    assert_eq!(super::open(&world).await, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dead_letter_names_the_trace_of_its_message() {
    const TRACE: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
    let world = World::new("dead_trace", "").await;
    let _daemon = world.consuming().await;
    let (publisher, exchange) = (world.publisher().await, world.broker.exchange());
    for (body, header) in [("{", Some(TRACE)), ("[", Some("00-invalid")), ("none", None)] {
        publisher.publish_traced(&exchange, "7", body.as_bytes(), header).await.unwrap();
    }
    eventually("all bodies are dead-lettered", || async { world.count("SELECT COUNT(*) FROM dead_letter").await == 3 })
        .await;
    // An operator has changed this row, so its headers are invalid.
    let changed = "UPDATE dead_letter SET headers = 'no JSON' WHERE body = 'none'";
    sqlx::query(changed).execute(&world.pool).await.unwrap();
    let listed = world.report(&["dead", "list"]);
    let of = |body: &str| listed["letters"].as_array().unwrap().iter().find(|it| it["body"] == body).unwrap().clone();
    assert_eq!(of("{")["traceparent"], TRACE);
    assert_eq!([&of("[")["traceparent"], &of("none")["traceparent"]], [&json!(null); 2]);
    let id = of("{")["id"].to_string();
    let traceparent = format!("traceparent {TRACE}");
    for command in [vec!["dead", "list"], vec!["dead", "show", &id]] {
        assert_eq!(stdout(&world.tallyd(&command)).matches(&traceparent).count(), 1, "{command:?}");
    }
}
