//! Tests clients while a server fails: a client does not count an unpublished click, and every call ends in time.

use std::time::{Duration, Instant};

use lapin::options::{ExchangeDeclareOptions, QueueBindOptions, QueueDeclareOptions, QueueDeleteOptions};
use lapin::types::{AMQPValue, FieldTable};
use redis::AsyncCommands;

use super::common::clicker::held_like;
use super::common::{World, as_api, eventually, target};
use super::example::{Example, on_board, outcome, three_truths};
use super::stalling::{Stall, Stalling};

/// The clients' default timeout for each server. A test of the documents checks it.
const TIMEOUT: Duration = Duration::from_secs(5);
/// The timeout of clients that get no answer. The clients that get one keep their default, for a loaded machine.
const SHORT: Duration = Duration::from_secs(2);
const SHORTLY: (&str, &str) = ("TIMEOUT_S", "2");
/// Extra time for a loaded machine. With this time, a client with the short timeout is still faster than a client that
/// waits its default timeout three times.
const SLACK: Duration = Duration::from_secs(8);
const ALL: usize = usize::MAX;

/// Fails if the target still has a counter or a score on a board.
async fn assert_taken_back(example: Example, world: &World) {
    assert_eq!(world.redis_counters().await.get(&target(42)), None, "{example:?}");
    assert_eq!(on_board(world, 42).await, [None; 2], "{example:?}");
    assert_eq!(example.lines(world, &["--liked-by", "7", "video", "42"]), ["no"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn clients_take_back_what_the_broker_does_not_take() {
    for example in Example::ALL {
        let world = World::new(&format!("client_refused_{}", example.name()), &as_api("")).await;
        let click = |settings: &[(&str, &str)]| example.refused(&world, settings, &["video", "42", "7"]);
        assert!(click(&[]).contains("no exchange"), "the exchange must not exist");
        assert_taken_back(example, &world).await;
        click(&[("AMQP_URL", "amqp://tally:tally@127.0.0.1:1/%2f")]);
        assert_taken_back(example, &world).await;

        // An exchange without a queue returns each message to the client.
        let link = world.broker.connect("test").await.unwrap();
        let durable = ExchangeDeclareOptions { durable: true, ..Default::default() };
        let exchange = world.broker.exchange();
        let kind = lapin::ExchangeKind::Topic;
        link.channel.exchange_declare(exchange.clone().into(), kind, durable, FieldTable::default()).await.unwrap();
        let returned = click(&[]);
        assert!(returned.contains("no queue takes") || returned.contains("UnroutableError"), "{returned}");
        assert_taken_back(example, &world).await;

        // A full queue rejects the event.
        let queue = format!("{}.full", world.name);
        let mut full = FieldTable::default();
        full.insert("x-max-length".into(), AMQPValue::LongInt(0));
        full.insert("x-overflow".into(), AMQPValue::LongString("reject-publish".into()));
        let options = QueueDeclareOptions::default();
        link.channel.queue_declare(queue.clone().into(), options, full).await.unwrap();
        let binding = QueueBindOptions::default();
        link.channel
            .queue_bind(queue.clone().into(), exchange.into(), "#".into(), binding, FieldTable::default())
            .await
            .unwrap();
        click(&[]);
        assert_taken_back(example, &world).await;
        link.channel.queue_delete(queue.into(), QueueDeleteOptions::default()).await.unwrap();

        // A daemon starts. Then the user repeats the click, and the client counts the click exactly once.
        let daemon = world.daemon();
        daemon.logged("\"consuming\"").await;
        assert!(world.tallyd(&["reconcile"]).status.success());
        assert_eq!(outcome(&example.click(&world, &["video", "42", "7"])), (true, Some(1)));
        assert_eq!(on_board(&world, 42).await, [Some(1); 2]);
        eventually("all three agree", || async {
            three_truths(&world).await.iter().all(|numbers| numbers.get(&target(42)) == Some(&1))
        })
        .await;
        assert!(daemon.stop().success());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn clients_leave_a_double_click_to_the_request_that_publishes_it() {
    for example in Example::ALL {
        let world = World::new(&format!("client_double_{}", example.name()), &as_api("")).await;
        world.publisher().await;
        let away = [("AMQP_URL", "amqp://tally:tally@127.0.0.1:1/%2f")];
        for is_published in [false, true] {
            let (proxy, first) = held_like(&world, &[]).await;
            example.refused(&world, &away, &["video", "42", "7"]);
            assert_eq!(world.redis_counters().await.get(&target(42)), Some(&1), "{example:?}");
            if is_published {
                proxy.release();
                assert!(first.await.unwrap().unwrap().counted().is_some());
                assert_eq!(example.lines(&world, &["--liked-by", "7", "video", "42"]), ["yes"]);
            } else {
                proxy.fail();
                first.await.unwrap().unwrap_err();
                assert_taken_back(example, &world).await;
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn clients_count_without_mysql_and_refuse_what_can_not_be_published() {
    for example in Example::ALL {
        let world = World::new(&format!("client_alone_{}", example.name()), &as_api("")).await;
        let daemon = world.daemon();
        daemon.logged("\"consuming\"").await;
        assert!(world.tallyd(&["reconcile"]).status.success());
        let away = [("MYSQL_URL", "mysql://root@127.0.0.1:1/tally")];
        let output = example.run(&world, &away, &["video", "42", "7"]);
        assert!(output.status.success(), "{example:?}: {}", super::common::stderr(&output));
        for ids in [["0", "7"], ["042", "7"], ["9223372036854775808", "7"], ["42", "0"], ["42", "1e3"]] {
            example.refused(&world, &[], &["video", ids[0], ids[1]]);
        }
        example.refused(&world, &[], &["song", "42", "7"]);
        // Without Redis nothing is counted, so nothing is published.
        example.refused(&world, &[("REDIS_URL", "redis://127.0.0.1:1/")], &["video", "42", "10"]);
        // A user's second click within the window exceeds the limit. Another user's click does not.
        let one = [("CLICKS_MAX", "1")];
        assert!(example.run(&world, &one, &["video", "42", "8"]).status.success());
        assert!(
            example
                .refused(&world, &one, &["--unlike", "video", "42", "8"])
                .contains("the user clicks too often: wait ")
        );
        assert!(example.run(&world, &one, &["video", "42", "9"]).status.success());
        eventually("all three agree", || async {
            three_truths(&world).await.iter().all(|numbers| numbers.get(&target(42)) == Some(&3))
        })
        .await;
        assert_eq!(world.count("SELECT COUNT(*) FROM dead_letter").await, 0);
        let keys: Vec<String> = world.redis().await.keys(format!("{}:limit:*", world.name)).await.unwrap();
        assert_eq!(keys.len(), 2, "{keys:?}");
        assert!(daemon.stop().success());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn clients_wait_their_timeout_for_a_broker_that_is_silent() {
    for example in Example::ALL {
        let world = World::new(&format!("client_silent_{}", example.name()), &as_api("")).await;
        world.publisher().await;
        let amqp = world.api.amqp.url.expose();
        // The first connection gets no confirm. The second connection gets the confirm.
        let once = Stalling::before(amqp, Stall { after: "target_id", callers: 1 }).await;
        let began = Instant::now();
        let output = example.run(&world, &[("AMQP_URL", &once.url)], &["video", "43", "7"]);
        assert!(output.status.success(), "{example:?}: {}", super::common::stderr(&output));
        assert!(began.elapsed() >= TIMEOUT, "{example:?}: {:?}", began.elapsed());
        assert_eq!((once.stalled(), once.callers()), (1, 2), "{example:?}");
        // No connection gets an answer. The proxy stalls at the publish, then at the handshake.
        for after in ["target_id", "AMQP"] {
            let always = Stalling::before(amqp, Stall { after, callers: ALL }).await;
            let began = Instant::now();
            example.refused(&world, &[SHORTLY, ("AMQP_URL", &always.url)], &["video", "42", "7"]);
            assert!((3 * SHORT..3 * SHORT + SLACK).contains(&began.elapsed()), "{example:?}: {:?}", began.elapsed());
            assert_eq!(always.callers(), 3, "{example:?}");
            assert_taken_back(example, &world).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn clients_call_like_lua_once_more_where_its_answer_is_lost() {
    for example in Example::ALL {
        let world = World::new(&format!("client_lost_{}", example.name()), &as_api("")).await;
        let daemon = world.daemon();
        daemon.logged("\"consuming\"").await;
        assert!(world.tallyd(&["reconcile"]).status.success());
        assert_eq!(outcome(&example.click(&world, &["video", "42", "7"])), (true, Some(1)));
        // The first call counts the unlike, but the first call's answer is lost. The second call reports that the
        // unlike changed nothing.
        let lost = Stalling::before(world.api.redis.url.expose(), Stall { after: "recent:", callers: 1 }).await;
        let output = example.run(&world, &[("REDIS_URL", &lost.url)], &["--unlike", "video", "42", "7"]);
        assert!(output.status.success(), "{example:?}: {}", super::common::stderr(&output));
        let event: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!((outcome(&event), lost.stalled()), ((false, Some(0)), 1), "{example:?}");
        // No store has a like of this new user. The client calls twice, and gets no answer to either call.
        let always = Stalling::before(world.api.redis.url.expose(), Stall { after: "recent:", callers: ALL }).await;
        example.refused(&world, &[SHORTLY, ("REDIS_URL", &always.url)], &["video", "42", "8"]);
        assert_eq!(always.stalled(), 2, "{example:?}");
        eventually("the unlike is in MySQL", || async {
            world.count("SELECT COUNT(*) FROM like_record WHERE user_id = 7 AND is_del = 1").await == 1
        })
        .await;
        assert!(three_truths(&world).await.iter().all(|numbers| !numbers.contains_key(&target(42))), "{example:?}");
        assert!(daemon.stop().success());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn clients_leave_a_mysql_alone_that_did_not_answer() {
    for example in Example::ALL {
        let world = World::new(&format!("client_rest_{}", example.name()), &as_api("")).await;
        world.publisher().await;
        let mysql =
            Stalling::before(world.api.mysql.url.expose(), Stall { after: "SELECT target_id", callers: ALL }).await;
        let program = match example {
            Example::Python => {
                "for user in (7, 8, 9): print(like.click(server, 'like', 'video', 42, user)[1])\n\
                 try: like.liked(server, 'video', 10, [42])\n\
                 except pymysql.MySQLError as error: print(error)"
            }
            Example::Node => {
                "for (const user of ['7', '8', '9']) console.log((await client.click('like', 'video', '42', user)).changed);
                 await client.liked('video', '10', ['42']).catch((error) => console.log(error.message));"
            }
        };
        let began = Instant::now();
        let said = example.program(&world, &[("MYSQL_URL", &mysql.url)], program);
        assert_eq!(said.to_lowercase().matches("true").count(), 3, "{example:?}: {said}");
        assert!(said.contains("failed a moment ago"), "{example:?}: {said}");
        assert!(began.elapsed() >= TIMEOUT, "{example:?}: {:?}", began.elapsed());
        assert_eq!((mysql.stalled(), mysql.callers()), (1, 1), "{example:?}");
        assert_eq!(world.redis_counters().await[&target(42)], 3);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_node_client_keeps_its_connection_where_one_event_is_refused() {
    let world = World::new("client_nack", "").await;
    let link = world.broker.connect("test").await.unwrap();
    let exchange = world.broker.exchange();
    let kind = lapin::ExchangeKind::Topic;
    let durable = ExchangeDeclareOptions { durable: true, ..Default::default() };
    link.channel.exchange_declare(exchange.clone().into(), kind, durable, FieldTable::default()).await.unwrap();
    // The broker rejects user 8's events and accepts all others.
    let queues = [("taken", "7", 1_000), ("refused", "8", 0)]
        .map(|(name, key, max)| (format!("{}.{name}", world.name), key, max));
    for (queue, key, max) in &queues {
        let mut arguments = FieldTable::default();
        arguments.insert("x-max-length".into(), AMQPValue::LongInt(*max));
        arguments.insert("x-overflow".into(), AMQPValue::LongString("reject-publish".into()));
        let name = || queue.clone().into();
        link.channel.queue_declare(name(), QueueDeclareOptions::default(), arguments).await.unwrap();
        let binding = QueueBindOptions::default();
        let binding =
            link.channel.queue_bind(name(), exchange.clone().into(), (*key).into(), binding, FieldTable::default());
        binding.await.unwrap();
    }
    // This proxy only counts the connections.
    let amqp = Stalling::before(world.api.amqp.url.expose(), Stall { after: "-", callers: 0 }).await;
    let program = "
        const clicks = Array.from({ length: 40 }, (_, id) => client.click('like', 'video', String(id + 1), id % 2 ? '7' : '8'));
        const ends = await Promise.allSettled(clicks);
        console.log(ends.map(({ status }, id) => Number((status === 'fulfilled') === (id % 2 === 1))).join(''));
        console.log(ends[0].reason.message, ends[0].reason.event.user_id);";
    let said = Example::Node.program(&world, &[("AMQP_URL", &amqp.url)], program);
    assert_eq!(said.lines().next().unwrap(), "1".repeat(40), "{said}");
    assert!(said.contains("message nacked 8"), "{said}");
    assert_eq!(amqp.callers(), 1);
    for (queue, ..) in queues {
        link.channel.queue_delete(queue.into(), QueueDeleteOptions::default()).await.unwrap();
    }
}
