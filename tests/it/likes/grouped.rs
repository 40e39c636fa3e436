//! Calls at the same time publish their events as one list.

use std::time::Duration;

use futures_util::future::join_all;
use lapin::options::{ExchangeDeclareOptions, QueueBindOptions, QueueDeclareOptions};
use lapin::types::{AMQPValue, FieldTable};
use tallyd_client::{BrokerError, Clicked, Client, Event, PublishError, traced};
use tallyd_core::event::LikeEvent;
use tallyd_core::model::UserId;

use crate::common;
use common::{Dice, Model, World, eventually, grouping_client_of, target};

/// A list that is not full waits for this time.
const LONG: Duration = Duration::from_secs(2);

fn published(clicked: Result<Clicked, PublishError>) -> LikeEvent {
    match clicked.unwrap() {
        Clicked::Published(event) => event,
        limited => panic!("{limited:?}"),
    }
}

/// Sends two events alone, so that the next ones wait for each other. The first one also waits for the connection.
async fn first(client: &Client) {
    for _ in 0..2 {
        published(client.like(target(1), UserId(1)).await);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn likes_of_calls_at_the_same_time_become_few_messages() {
    let world = World::new("group_few", "").await;
    let (publisher, client) = (world.publisher().await, grouping_client_of(&world.api, LONG));
    let likes = join_all((1..=500).map(|user| client.like(target(user % 7 + 1), UserId(user)))).await;
    let messages = world.unconsumed(&world.broker.queue(0)).await;
    assert_eq!(messages, 6, "one like at once, four full lists, and one that has waited");
    let mut model = Model::default();
    likes.into_iter().for_each(|like| model.apply(&published(like)));
    let daemon = world.daemon();
    world.ends_as(&model, &publisher, daemon).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn clicks_of_one_user_in_two_lists_and_partitions_end_right() {
    for settings in ["", "reads_first = true\n"] {
        let settings = format!("[amqp]\npartitions = 2\n[consumer]\nbatch_events_max = 50\n{settings}");
        let world = World::new("group_two", &settings).await;
        let publisher = world.publisher().await;
        let [one, two] = [(); 2].map(|()| grouping_client_of(&world.api, Duration::from_millis(50)));
        let mut dice = Dice::of_run(31);
        let mut model = Model::default();
        let mut daemon = None;
        for _ in 0..20 {
            let mut users: Vec<u64> = (1..=60).collect();
            let likes = join_all(users.iter().map(|user| one.like(target(1), UserId(*user))));
            let likes = likes.await;
            // The first event of a list decides its partition.
            users.rotate_left(dice.below(60) as usize);
            let unlikes = join_all(users.iter().map(|user| two.unlike(target(1), UserId(*user)))).await;
            likes.into_iter().chain(unlikes).for_each(|click| model.apply(&published(click)));
            if daemon.is_none() {
                let messages =
                    world.unconsumed(&world.broker.queue(0)).await + world.unconsumed(&world.broker.queue(1)).await;
                assert!(messages <= 8, "{messages} messages of 120 clicks");
                daemon = Some(world.consuming().await);
            }
        }
        let batches = "SELECT COUNT(*) FROM partition_owner WHERE batches > 0";
        eventually("both partitions have had lists", async || world.count(batches).await == 2).await;
        world.ends_as(&model, &publisher, daemon.unwrap()).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn each_event_of_a_list_that_comes_back_has_its_own_error() {
    let world = World::new("group_back", "").await;
    let link = world.broker.connect("test").await.unwrap();
    let (exchange, durable) = (world.broker.exchange(), ExchangeDeclareOptions { durable: true, ..Default::default() });
    let topic = lapin::ExchangeKind::Topic;
    link.channel.exchange_declare(exchange.clone().into(), topic, durable, FieldTable::default()).await.unwrap();
    let client = world.client();
    let fails = async |is_expected: fn(&BrokerError) -> bool| {
        let clicks = join_all((1..=150).map(|user| client.like(target(1), UserId(user)))).await;
        for (user, click) in (1..).zip(clicks) {
            let Err(PublishError::NotConfirmed { event, source }) = click else { panic!("{user} is published") };
            assert!(matches!(*event, Event::Like(like) if like.user == UserId(user)), "{event:?}");
            assert!(is_expected(&source), "{source}");
        }
    };
    fails(|error| matches!(error, BrokerError::Returned { .. })).await;

    let mut full = FieldTable::default();
    full.insert("x-max-length".into(), AMQPValue::LongInt(0));
    full.insert("x-overflow".into(), AMQPValue::LongString("reject-publish".into()));
    let queue = format!("{}.full", world.name);
    let exclusive = QueueDeclareOptions { exclusive: true, ..Default::default() };
    link.channel.queue_declare(queue.clone().into(), exclusive, full).await.unwrap();
    let binding = QueueBindOptions::default();
    link.channel.queue_bind(queue.into(), exchange.into(), "#".into(), binding, FieldTable::default()).await.unwrap();
    fails(|error| matches!(error, BrokerError::Nacked)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_event_of_a_list_keeps_its_trace_in_logs_and_letters() {
    let trace = |number: u64| format!("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b{number:x}-01");
    let world = World::new("group_traces", "").await;
    let triggers = "CREATE TRIGGER slow BEFORE INSERT ON like_record FOR EACH ROW \
                    BEGIN SET @slept = SLEEP(0.7); \
                    IF NEW.user_id = 4 THEN SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'not this one'; END IF; END";
    sqlx::raw_sql(triggers).execute(&world.pool).await.unwrap();
    let publisher = world.publisher().await;
    let client = grouping_client_of(&world.api, LONG);
    let likes = async {
        first(&client).await;
        let likes = (2..=4).map(|user| {
            let trace = trace(user);
            let like = client.like(target(1), UserId(user));
            async move { traced(Some(&trace), like).await }
        });
        for like in join_all(likes).await {
            published(like);
        }
    };
    likes.await;
    assert_eq!(world.unconsumed(&world.broker.queue(0)).await, 3, "the three likes are not one message");
    let daemon = world.consuming().await;
    world.drained(&publisher).await;
    daemon.logged("\"batch-slow\"").await;
    let log = daemon.log();
    let slow = log.lines().find(|line| line.contains("\"batch-slow\"")).unwrap();
    for user in 2..=4 {
        assert!(slow.contains(&trace(user)), "{user}: {slow}");
    }
    let headers: String = sqlx::query_scalar("SELECT headers FROM dead_letter").fetch_one(&world.pool).await.unwrap();
    assert_eq!(headers, format!("{{\"traceparent\":\"{}\"}}", trace(4)));
    assert!(daemon.stop().success());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_call_that_is_cancelled_takes_no_other_event_with_it() {
    let world = World::new("group_cancel", "").await;
    let daemon = world.consuming().await;
    let client = grouping_client_of(&world.api, LONG);
    first(&client).await;
    let like = |user| client.like(target(1), UserId(user));
    let (cancelled, kept) = tokio::join!(tokio::time::timeout(LONG / 10, like(2)), like(3));
    assert!(cancelled.is_err());
    published(kept);
    eventually("all three likes are written", async || {
        world.count("SELECT COUNT(*) FROM like_record WHERE user_id <= 3").await == 3
    })
    .await;
    assert!(daemon.stop().success());
}
