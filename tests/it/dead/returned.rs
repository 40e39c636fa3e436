//! Messages that RabbitMQ itself dead-lettered.

use futures_util::StreamExt;
use lapin::options::{BasicGetOptions, BasicPublishOptions};
use lapin::types::{AMQPValue, FieldTable};
use lapin::{BasicProperties, Confirmation};
use serde_json::json;
use sqlx::{AssertSqlSafe, Connection, MySqlConnection};
use tallyd_core::event::LikeEvent;
use tallyd_core::model::UserId;
use tallyd_rabbitmq::Link;

use super::{assert_exits, ids};
use crate::common::{World, body, eventually, stack, stderr, stdout, target};

/// Declares all queues. Then moves messages to the queue of returned messages, as the broker does after too many
/// returns.
async fn set_aside(world: &World, bodies: &[Vec<u8>]) -> Link {
    let link = world.broker.connect("test").await.unwrap();
    world.broker.declare_for(&link, world.broker.partitions()).await.unwrap();
    link.channel.confirm_select(Default::default()).await.unwrap();
    for body in bodies {
        let mut death = FieldTable::default();
        death.insert("time".into(), AMQPValue::Timestamp(1_764_000_000));
        let mut headers = FieldTable::default();
        headers.insert("x-death".into(), AMQPValue::FieldArray(vec![AMQPValue::FieldTable(death)].into()));
        headers.insert("x-first-death-queue".into(), AMQPValue::LongString(world.broker.queue(0).into()));
        headers.insert("x-first-death-reason".into(), AMQPValue::LongString("delivery_limit".into()));
        let properties = BasicProperties::default().with_headers(headers).with_delivery_mode(2);
        let queue = world.broker.returned();
        let options = BasicPublishOptions { mandatory: true, ..BasicPublishOptions::default() };
        let sent = link.channel.basic_publish("".into(), queue.as_str().into(), options, body, properties).await;
        assert!(matches!(sent.unwrap().await.unwrap(), Confirmation::Ack(None)));
    }
    link
}

/// Waits until the queue of returned messages has this number of messages. So the broker also has time to requeue the
/// messages of a killed process.
async fn waits(world: &World, messages: u32) {
    let publisher = world.broker.connect_publisher("test").await.unwrap();
    let queue = world.broker.returned();
    eventually("the messages are in the queue", async || publisher.count(&queue).await.unwrap() == messages).await;
}

fn likes(count: u64) -> Vec<(UserId, Vec<u8>)> {
    let like = |user| LikeEvent {
        target: target(42),
        user: UserId(user),
        at: tallyd_base::runtime::clock::now(),
        liked: true,
    };
    (1..=count).map(|user| body(&like(user))).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn what_the_broker_set_aside_is_taken_in_whenever_the_command_is_killed() {
    let world = World::new("dead_returned", "").await;
    let bodies: Vec<Vec<u8>> = likes(250).into_iter().map(|(_, body)| body).collect();
    // Two equal messages become one dead letter. A fence message of a finished run is dropped.
    let fence = br#"{"type":"fence","fence":7}"#.to_vec();
    set_aside(&world, &[bodies.clone(), vec![bodies[0].clone(), fence]].concat()).await;
    for (point, rows) in [("dead:returned-before-commit", 0), ("dead:returned-after-commit", 100)] {
        let killed = world.command().args(["dead", "list"]).env("TALLYD_FAULT_POINT", point).output().unwrap();
        assert!(stderr(&killed).contains("fault-point"), "{}", stderr(&killed));
        waits(&world, 252).await;
        assert_eq!(world.count("SELECT COUNT(*) FROM dead_letter").await, rows, "after {point}");
    }
    let listed = world.report(&["dead", "list"]);
    let queue = world.broker.returned();
    assert_eq!(
        listed["returned"],
        json!({ "queue": queue, "taken_in": 251, "fences": 1, "left": 0, "full": false, "problem": null })
    );
    waits(&world, 0).await;
    assert_eq!(world.count("SELECT COUNT(*) FROM dead_letter").await, 250);
    let newest = &world.report(&["dead", "list", "--reason", "returned-by-broker"])["letters"][0];
    assert_eq!((&newest["queue"], &newest["reason"]), (&json!(world.broker.queue(0)), &json!("returned-by-broker")));
    assert_eq!(newest["first_seen"], "2025-11-24T16:00:00.000000Z");
    assert!(newest["error"].as_str().unwrap().contains("delivery_limit"), "{newest}");
    let shown = world.report(&["dead", "show", &newest["id"].to_string()]);
    assert_eq!(shown[0]["headers"]["x-first-death-reason"], "delivery_limit");
    assert_eq!(shown[0]["now"]["words"], "would be accepted");

    // The command replays the letters that were moved to the table. If a replayed letter is dead-lettered again, it is
    // open again.
    let _daemon = world.consuming().await;
    assert_exits(&world.tallyd(&["dead", "replay", "--all"]), 0, "250 of 250 dead letters replayed");
    world.drained(&world.publisher().await).await;
    assert_eq!(world.counters().await[&target(42)], 250);
    set_aside(&world, &bodies[..1]).await;
    assert_exits(&world.tallyd(&["dead", "list"]), 0, "1 message was moved from");
    assert_eq!(super::open(&world).await, 1);
}

/// Takes a message from the queue and closes the channel, because RabbitMQ 4.3 does not count a reject with requeue.
/// Returns true if the broker has set the message aside. A busy broker can refuse a consumer (541), so the caller
/// tries again.
async fn gives_back(world: &World, queue: &str) -> bool {
    let Ok(link) = world.broker.connect("test").await else { return false };
    let consume = link.channel.basic_consume(queue.into(), "".into(), Default::default(), Default::default());
    let Ok(mut consumer) = consume.await else { return false };
    let is_set_aside = tokio::select! {
        _ = consumer.next() => false,
        () = waits(world, 1) => true,
    };
    // If the consumer were dropped first, it would be cancelled, and would still hold the message for a moment.
    let _ = link.channel.close(200, "done".into()).await;
    is_set_aside
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_that_came_back_too_often_is_set_aside_by_the_broker_and_written_by_a_replay() {
    let world = World::new("dead_limit", "").await;
    let publisher = world.publisher().await;
    world.publish(&publisher, &likes(1)).await;
    let queue = world.broker.queue(0);
    while !gives_back(&world, &queue).await {}
    // The test waits until this consumer has ended, because a queue gives all its messages to a single consumer.
    assert_eq!(world.unconsumed(&queue).await, 0);
    let output = world.tallyd(&["dead", "list"]);
    assert_exits(&output, 0, "1 message was moved from");
    assert!(stdout(&output).contains("(delivery_limit)"), "{}", stdout(&output));
    assert_eq!(world.report(&["dead", "list"])["letters"][0]["queue"], json!(queue));
    let _daemon = world.daemon();
    assert_exits(&world.tallyd(&["dead", "replay", "--reason", "returned-by-broker"]), 0, "1 of 1");
    world.drained(&publisher).await;
    assert_eq!(world.counters().await[&target(42)], 1);
    assert_eq!(ids(&world).await, [(1, false)]);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_account_that_may_not_write_takes_no_message_from_the_queue() {
    let world = World::new("dead_reader", "").await;
    set_aside(&world, &[b"x".to_vec()]).await;
    let account = format!("{}_r", world.name);
    let mut admin = MySqlConnection::connect(&stack("MYSQL_URL")).await.unwrap();
    let sql = format!(
        "CREATE USER '{account}'@'%' IDENTIFIED BY 'secret'; GRANT SELECT ON {}.* TO '{account}'@'%'",
        world.name
    );
    sqlx::raw_sql(AssertSqlSafe(sql)).execute(&mut admin).await.unwrap();
    let mut url = url::Url::parse(world.config.mysql.url.expose()).unwrap();
    url.set_username(&account).unwrap();
    url.set_password(Some("secret")).unwrap();
    let list = |more: &[&str]| {
        let mut command = world.command();
        command.args(["dead", "list"]).args(more).env("TALLYD__MYSQL__URL", url.as_str()).output().unwrap()
    };
    // The command does not fetch the message, because it would have to requeue it, and the broker counts each requeue.
    assert_exits(&list(&[]), 0, "could not be read: check that dead letters can be stored");
    assert!(!stdout(&list(&["--no-returned"])).contains("could not be read"));
    let link = world.broker.connect("test").await.unwrap();
    let queue = world.broker.returned();
    let message = link.channel.basic_get(queue.as_str().into(), BasicGetOptions::default()).await.unwrap().unwrap();
    assert!(!message.delivery.redelivered);
    drop(link);
    sqlx::raw_sql(AssertSqlSafe(format!("DROP USER '{account}'@'%'"))).execute(&mut admin).await.unwrap();
    waits(&world, 1).await;
    assert_eq!(stderr(&world.tallyd(&["dead", "list"])), "");
    waits(&world, 0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_returned_message_that_mysql_refuses_keeps_none_of_its_neighbours() {
    let world = World::new("dead_row", "").await;
    let trigger = "CREATE TRIGGER refuse BEFORE INSERT ON dead_letter FOR EACH ROW \
                   IF NEW.body = 'not this one' THEN SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'refused'; END IF";
    sqlx::raw_sql(trigger).execute(&world.pool).await.unwrap();
    set_aside(&world, &["one", "two", "not this one", "three", "four"].map(|body| body.as_bytes().to_vec())).await;
    let listed = world.report(&["dead", "list"]);
    assert_eq!(listed["returned"]["taken_in"], 4);
    assert!(listed["returned"]["problem"].is_string(), "{listed}");
    assert_eq!(world.count("SELECT COUNT(*) FROM dead_letter").await, 4);
    waits(&world, 1).await;
}
