//! AMQP's short strings can contain any bytes, and RabbitMQ delivers strings that are not UTF-8.

use std::iter::once;

use serde_json::json;

use super::raw::{self, Properties, SHORT_STRINGS};
use super::{assert_lives, good};
use crate::common::{World, stderr};
use tallyd_core::model::UserId;

/// A string of the maximum length that ends in the middle of a character.
fn bytes() -> Vec<u8> {
    b"caf\xe9\xff".repeat(51)
}

/// The same string as dead letters show it.
fn shown() -> String {
    "caf??".repeat(51)
}

/// Properties in which each header and each short string has such bytes.
fn everywhere() -> Properties {
    let header = Properties::default().header(&bytes(), &raw::text(&bytes()));
    SHORT_STRINGS.iter().fold(header, |properties, (_, flag)| properties.short_string(*flag, &bytes()))
}

fn assert_shows(headers: &serde_json::Value) {
    assert_eq!(headers[shown()], json!("caf\u{fffd}\u{fffd}".repeat(51)), "{headers}");
    for name in ["message_id", "app_id", "correlation_id"] {
        assert_eq!(headers[name], json!(shown()), "{headers}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn bytes_that_are_no_text_stop_no_partition_of_either_type() {
    for queue_type in ["quorum", "classic"] {
        let world =
            World::new(&format!("bytes_{queue_type}"), &format!("[amqp]\nqueue_type = \"{queue_type}\"\n")).await;
        let publisher = world.publisher().await;
        let mut daemon = world.consuming().await;
        let (url, exchange, queue) = (world.config.amqp.url.expose(), world.broker.exchange(), world.broker.queue(0));
        let cases =
            SHORT_STRINGS.iter().map(|(name, flag)| (*name, Properties::default().short_string(*flag, &bytes())));
        let header = Properties::default().header(&bytes(), &raw::text(b"value"));
        // A list with one table, which has one field with an empty text.
        let nested = [&[b'A', 0, 0, 1, 10, b'F', 0, 0, 1, 5, 255], &bytes()[..], &raw::text(b"")].concat();
        let nested = Properties::default().header(b"nested", &nested);
        let cases = cases.chain([("header", header), ("nested", nested), ("all", everywhere())]);
        let mut number = 0;
        for (name, properties) in cases {
            number += 2;
            println!("{queue_type}: {name}");
            raw::publish(url, ("", queue.as_bytes()), &properties, &good(number));
            world.publish(&publisher, &[(UserId(number + 2), good(number + 1))]).await;
        }
        raw::publish(url, (&exchange, &bytes()), &Properties::default(), &good(number + 2));
        raw::publish(url, ("", queue.as_bytes()), &everywhere(), b"no JSON");
        world.drained(&publisher).await;
        assert_lives(&mut daemon);
        let likes = world.count("SELECT COUNT(*) FROM like_record").await;
        assert_eq!(u64::try_from(likes).unwrap(), number + 1, "every like is counted");
        let kept: String = sqlx::query_scalar("SELECT headers FROM dead_letter").fetch_one(&world.pool).await.unwrap();
        assert_shows(&serde_json::from_str(&kept).unwrap());
        assert!(daemon.stop().success());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_returned_message_with_bytes_that_are_no_text_is_replayed() {
    let world = World::new("bytes_back", "").await;
    let (publisher, _daemon) = (world.publisher().await, world.consuming().await);
    let (url, returned) = (world.config.amqp.url.expose(), world.broker.returned());
    for (number, properties) in (1..).zip(once(everywhere()).chain(once(Properties::default()))) {
        raw::publish(url, ("", returned.as_bytes()), &properties, &good(number));
    }
    let listed = world.report(&["dead", "list"]);
    assert_eq!(
        (&listed["returned"]["taken_in"], &listed["returned"]["problem"]),
        (&json!(2), &json!(null)),
        "{listed}"
    );
    let oldest = listed["letters"].as_array().unwrap().iter().map(|letter| letter["id"].as_u64().unwrap()).min();
    assert_shows(&world.report(&["dead", "show", &oldest.unwrap().to_string()])[0]["headers"]);
    let replayed = world.tallyd(&["dead", "replay", "--reason", "returned-by-broker"]);
    assert!(replayed.status.success(), "{}", stderr(&replayed));
    world.drained(&publisher).await;
    assert_eq!(world.count("SELECT COUNT(*) FROM like_record").await, 2);
}
