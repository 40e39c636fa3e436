//! A client with only addresses learns the site from its card. Without a card it publishes, but knows no number.

use std::time::{Duration, Instant};

use lapin::options::QueueDeclareOptions;
use serde_json::Value;
use tallyd_client::{Client, ClientError, Number, PublishError, Source};
use tallyd_core::card::Card;
use tallyd_core::model::{Kind, Metric, Target, TargetId, UserId};
use tallyd_rabbitmq::Link;

use crate::common;
use common::proxy::Proxy;
use common::{World, eventually, stranger_of};

/// A site whose kinds, metrics, layout and routing keys are not the defaults.
const SITE: &str = "[kinds]\nvideo = 4\npost = 9\n[metrics]\nlike = 2\nview = 5\n\
    [[rule]]\nmetric = \"view\"\nsettable = true\n\
    [reconcile]\nwatch_every = \"1s\"\n";

/// Names without rules.
const NAMES: &str = "[kinds]\nvideo = 4\npost = 9\n[metrics]\nlike = 2\nview = 5\nstock = 6\n";

/// This time is shorter than the minute after which a client reads the card anyway.
const AT_ONCE: Duration = Duration::from_secs(30);

async fn post(client: &Client) -> Target {
    Target { kind: client.kind("post").await.unwrap(), id: TargetId(42) }
}

/// Waits until the client reads this number from Redis.
async fn reads(client: &Client, target: Target, metric: &str, value: i64) {
    let metric = client.metric(metric).await.unwrap();
    let expected = Some(Number { value, source: Source::Redis });
    eventually("the client reads the number", || async {
        client.read(&[target]).await.unwrap()[0].get(metric) == expected
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_with_only_addresses_publishes_and_reads_on_any_site() {
    for (name, redis) in [
        ("card_packed", "bucket_bits = 5"),
        ("card_entity", "layout = \"entity\"\ncounter_key = \"{kind}:{id}:numbers\""),
        ("card_string", "layout = \"string\"\ncounter_key = \"n:{kind}:{id}:{metric}\""),
    ] {
        let settings = format!("{SITE}[amqp]\npartition_by = \"target\"\npartitions = 2\n[redis]\n{redis}\n");
        let world = World::new(name, &settings).await;
        drop(world.publisher().await);
        let daemon = world.daemon();
        daemon.logged("redis-loaded").await;
        let client = stranger_of(&world.api);
        eventually("the client sees the card", || async { client.site_refreshed().await.is_known }).await;
        let (target, view) = (post(&client).await, client.metric("view").await.unwrap());
        assert_eq!((target.kind, view), (Kind(9), Metric(5)));
        for user in [7, 7, 8] {
            client.like(target, UserId(user)).await.unwrap();
        }
        client.set(target, view, 5).await.unwrap();
        reads(&client, target, "like", 2).await;
        reads(&client, target, "view", 5).await;
        assert_eq!(client.liked(UserId(7), &[target]).await.unwrap(), [true]);
        let unknown = client.kind("viedo").await.unwrap_err().to_string();
        assert_eq!(unknown, "unknown kind \"viedo\": the site card has post, video");
        assert!(matches!(client.metric("x").await, Err(ClientError::UnknownName { what: "metric", .. })));
        assert!(daemon.stop().success());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_new_name_is_found_without_a_restart_and_a_lost_card_changes_nothing() {
    let mut world = World::new("card_new", SITE).await;
    let (proxy, url) = Proxy::before(world.api.redis.url.expose()).await;
    let mut proxied = world.api.clone();
    proxied.redis.url = url.as_str().into();
    let client = stranger_of(&proxied);
    world.cache.write_site_card(&Card::from(&world.config).encode()).await.unwrap();
    assert_eq!(client.kind("post").await.unwrap(), Kind(9));
    world.set(&SITE.replace("post = 9", "post = 9\narticle = 3"));
    world.cache.write_site_card(&Card::from(&world.config).encode()).await.unwrap();
    eventually("the new kind is found", || async { client.kind("article").await.is_ok() }).await;
    for lost in [None, Some("{\"version\": 2}"), Some("no card")] {
        match lost {
            Some(text) => world.cache.write_site_card(text).await.unwrap(),
            None => {
                let key = world.cache.keys.site_card();
                let () = redis::cmd("DEL").arg(key).query_async(&mut world.redis().await).await.unwrap();
            }
        }
        // From now on the proxy keeps the answers, so an answer shows that the client has read the card again.
        proxy.hold();
        proxy.release();
        eventually("the client reads the card", || async {
            let site = client.site_refreshed().await;
            assert_eq!((site.is_known, site.kinds.named("article")), (true, Some(Kind(3))), "{lost:?}");
            !proxy.answers().is_empty()
        })
        .await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_newer_card_allows_is_published_at_once() {
    let former = "[[rule]]\nmetric = \"like\"\nwriter = \"api\"\n[[rule]]\nmetric = \"stock\"\nsettable = true\n";
    let mut world = World::new("card_rules", &format!("{NAMES}{former}")).await;
    drop(world.publisher().await);
    let gateway = world.gateway().await;
    let client = stranger_of(&world.api);
    let (target, view, stock) =
        (post(&client).await, client.metric("view").await.unwrap(), client.metric("stock").await.unwrap());
    for refused in [client.set(target, view, 5).await, client.set(target, stock, -5).await] {
        assert!(matches!(refused, Err(PublishError::NotSent(ClientError::Invalid(_)))), "{refused:?}");
    }
    let refused = client.like(target, UserId(7)).await;
    assert!(matches!(refused, Err(PublishError::NotSent(ClientError::CountedByApi(_)))), "{refused:?}");
    let at = tallyd_base::runtime::clock::now();
    let set = format!(r#"{{"type":"set","kind":"post","target_id":42,"metric":"view","value":5,"at":{at}}}"#);
    let like = r#"{"type":"like","kind":"post","target_id":42,"user_id":7}"#;
    let posted = format!("[{set},{like}]");
    assert_eq!(gateway.post(&posted).await.verdicts(), ["refused"; 2]);
    let rule = |metric: &str| format!("[[rule]]\nmetric = \"{metric}\"\nsettable = true\nbelow_zero = true\n");
    world.set(&format!("{NAMES}{}{}", rule("view"), rule("stock")));
    world.write_card().await;
    // The card was read less than a second ago, so the next call can still use it.
    let begun = Instant::now();
    eventually("the client publishes", || async { client.set(target, view, 5).await.is_ok() }).await;
    eventually("the gateway publishes", || async { gateway.post(&set).await.status == 202 }).await;
    assert!(begun.elapsed() < AT_ONCE, "{:?}", begun.elapsed());
    client.set(target, stock, -5).await.unwrap();
    client.like(target, UserId(7)).await.unwrap();
    assert_eq!(gateway.post(&posted).await.verdicts(), ["confirmed"; 2]);
    assert!(gateway.process.stop().success());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_without_a_card_publishes_and_every_number_is_unknown() {
    let world = World::new("card_none", &format!("{SITE}[amqp]\nprefix = \"tally\"\n")).await;
    let link = world.broker.connect("test").await.unwrap();
    drop(world.publisher().await);
    let (queue, durable) = (format!("{}-all", world.name), QueueDeclareOptions::durable());
    link.channel.queue_declare(queue.as_str().into(), durable, Default::default()).await.unwrap();
    let (to, key) = ("tally.events".into(), "#".into());
    link.channel.queue_bind(queue.as_str().into(), to, key, Default::default(), Default::default()).await.unwrap();
    // Redis has lost all keys of the site, or is unreachable.
    let (proxy, url) = Proxy::before(world.config.redis.url.expose()).await;
    proxy.fail();
    let mut away = world.config.clone();
    away.redis.url = url.as_str().into();
    for config in [&world.config, &away] {
        let client = stranger_of(config);
        let target = post(&client).await;
        client.like(target, UserId(7)).await.unwrap();
        assert_eq!(next(&link, &queue).await["kind"], "post");
        let view = client.metric("view").await.unwrap();
        client.set(target, view, -5).await.unwrap();
        let set = next(&link, &queue).await;
        assert_eq!((&set["kind"], &set["metric"], &set["value"]), (&"post".into(), &"view".into(), &(-5).into()));
        let numbers = client.read(&[target, Target { kind: Kind(1), id: TargetId(42) }]).await.unwrap();
        assert!(numbers.iter().all(|numbers| (1..=u8::MAX).all(|code| numbers.get(Metric(code)).is_none())));
        assert!(matches!(client.liked(UserId(7), &[target]).await, Err(ClientError::NoCard)));
    }

    // The caller keeps the kind that it got without a card.
    let client = stranger_of(&world.config);
    let target = post(&client).await;
    world.cache.write_site_card(&Card::from(&world.config).encode()).await.unwrap();
    eventually("the client sees the card", || async { client.site_refreshed().await.is_known }).await;
    client.like(target, UserId(8)).await.unwrap();
    assert_eq!(next(&link, &queue).await["kind"], "post");
    assert_eq!(post(&client).await.kind, Kind(9));

    // The card's rules count for this kind, too.
    let client = stranger_of(&world.config);
    let () = redis::cmd("DEL").arg(world.cache.keys.site_card()).query_async(&mut world.redis().await).await.unwrap();
    let target = post(&client).await;
    let mut by_api = Card::from(&world.config);
    by_api.api.push("post:like".to_owned());
    world.cache.write_site_card(&by_api.encode()).await.unwrap();
    eventually("the client sees the card", || async { client.site_refreshed().await.is_known }).await;
    let refused = client.like(target, UserId(8)).await;
    assert!(matches!(refused, Err(PublishError::NotSent(ClientError::CountedByApi(_)))), "{refused:?}");
    for exchange in ["tally.events", "tally.partitions"] {
        link.channel.exchange_delete(exchange.into(), Default::default()).await.unwrap();
    }
    link.channel.queue_delete(queue.as_str().into(), Default::default()).await.unwrap();
    drop(link);
}

/// Takes the next message out of the queue.
async fn next(link: &Link, queue: &str) -> Value {
    let message = link.get(queue).await.unwrap().expect("a message");
    message.delivery.acker.ack(Default::default()).await.unwrap();
    serde_json::from_slice(&message.delivery.data).unwrap()
}
