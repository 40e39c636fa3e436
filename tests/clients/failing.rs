//! What clients do when something fails: nothing is counted that is not published.

use lapin::options::{ExchangeDeclareOptions, QueueBindOptions, QueueDeclareOptions, QueueDeleteOptions};
use lapin::types::{AMQPValue, FieldTable};
use redis::AsyncCommands;

use super::common::{World, eventually, target};
use super::example::{Example, outcome, three_truths};

/// Neither a number nor a click is left of it.
async fn assert_taken_back(example: Example, world: &World) {
    assert_eq!(world.redis_counters().await.get(&target(42)), None, "{example:?}");
    assert_eq!(example.lines(world, &["--liked-by", "7", "video", "42"]), ["no"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn clients_take_back_what_the_broker_does_not_take() {
    for example in Example::ALL {
        let world = World::new(&format!("client_refused_{}", example.name()), "").await;
        let click = |settings: &[(&str, &str)]| example.refused(&world, settings, &["video", "42", "7"]);
        assert!(click(&[]).contains("no exchange"), "nobody has made one");
        assert_taken_back(example, &world).await;
        click(&[("AMQP_URL", "amqp://tally:tally@127.0.0.1:1/%2f")]);
        assert_taken_back(example, &world).await;

        // An exchange without a queue sends back what comes.
        let link = world.broker.connect("test").await.unwrap();
        let durable = ExchangeDeclareOptions { durable: true, ..Default::default() };
        let exchange = world.broker.exchange();
        let kind = lapin::ExchangeKind::Topic;
        link.channel.exchange_declare(exchange.clone().into(), kind, durable, FieldTable::default()).await.unwrap();
        let returned = click(&[]);
        assert!(returned.contains("no queue takes") || returned.contains("UnroutableError"), "{returned}");
        assert_taken_back(example, &world).await;

        // A queue that is full refuses it.
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

        // Once there is a daemon, the same click counts once.
        let daemon = world.daemon();
        daemon.logged("\"consuming\"").await;
        assert!(world.tallyd(&["reconcile"]).status.success());
        assert_eq!(outcome(&example.click(&world, &["video", "42", "7"])), (true, Some(1)));
        eventually("all three say the same", || async {
            three_truths(&world).await.iter().all(|numbers| numbers.get(&target(42)) == Some(&1))
        })
        .await;
        assert!(daemon.stop().success());
        world.close().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn clients_count_without_mysql_and_refuse_what_can_not_be_published() {
    for example in Example::ALL {
        let world = World::new(&format!("client_alone_{}", example.name()), "").await;
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
        // Without Redis nothing is counted, and so nothing is published.
        example.refused(&world, &[("REDIS_URL", "redis://127.0.0.1:1/")], &["video", "42", "10"]);
        // A second click within the window is one too many; another user's is not.
        let one = [("CLICKS_MAX", "1")];
        assert!(example.run(&world, &one, &["video", "42", "8"]).status.success());
        assert!(example.refused(&world, &one, &["--unlike", "video", "42", "8"]).contains("too many clicks: wait "));
        assert!(example.run(&world, &one, &["video", "42", "9"]).status.success());
        eventually("all three say the same", || async {
            three_truths(&world).await.iter().all(|numbers| numbers.get(&target(42)) == Some(&3))
        })
        .await;
        assert_eq!(world.count("SELECT COUNT(*) FROM dead_letter").await, 0);
        let keys: Vec<String> = world.redis().await.keys(format!("{}:limit:*", world.name)).await.unwrap();
        assert_eq!(keys.len(), 2, "{keys:?}");
        assert!(daemon.stop().success());
        world.close().await;
    }
}
