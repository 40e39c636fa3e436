//! RabbitMQ's setting `frame_max` is zero, which means that it has no limit.

use super::{body, likes};
use crate::common::servers::{Changed, change};
use crate::common::{Model, World};
use lapin::options::{BasicPublishOptions, ConfirmSelectOptions};
use lapin::types::{AMQPValue, FieldTable};
use lapin::{BasicProperties, Confirmation};
use tallyd_connect::address::ServerUrl;
use tallyd_core::event::LikeEvent;
use tallyd_rabbitmq::Broker;

const USUAL: u32 = 131_072;
const HIGHER: u32 = 2 * USUAL;

/// Lifts the limit for new connections. Most tests may run meanwhile, because their connections ask for the usual limit.
/// .config/nextest.toml has the exception.
fn lift_frame_max() -> Changed {
    let set = |bytes: u32| format!("application:set_env(rabbit, frame_max, {bytes}).");
    change(&["-q", "eval", &set(0)], &["-q", "eval", &set(USUAL)])
}

#[tokio::test(flavor = "multi_thread")]
async fn headers_larger_than_a_usual_frame_do_not_stop_a_partition() {
    let world = World::new("limits_frames", "").await;
    let lifted = lift_frame_max();
    let publisher = world.publisher().await;
    let url = world.config.amqp.url.expose();
    let mut model = Model::default();
    // The first daemon uses the usual limit. The other daemons use the limits of their configurations, where zero stands
    // for no limit. Without any limit, the library would allocate 256 GiB.
    let configured = |limit: &str| format!("{url}?frame_max={limit}");
    for (from, limited, is_lifted) in
        [(1, url.to_owned(), true), (100, configured("65536"), true), (200, configured("0"), false)]
    {
        let events = likes(from, 3);
        publish_with_large_headers(&world, &events).await;
        let daemon = world.daemon_with(&[("TALLYD__AMQP__URL", &limited)]);
        world.drained(&publisher).await;
        events.iter().for_each(|event| model.apply(event));
        assert_eq!(world.counters().await, model.counters());
        assert_eq!(daemon.log().contains("frame too large"), is_lifted, "{}", daemon.log());
        assert_eq!(daemon.stop().code(), Some(0));
    }
    drop(lifted);
}

async fn publish_with_large_headers(world: &World, events: &[LikeEvent]) {
    let mut amqp = world.config.amqp.clone();
    amqp.url = ServerUrl::from(format!("{}?frame_max={HIGHER}", amqp.url.expose()).as_str());
    let channel = Broker::new(&amqp).unwrap().connect("test").await.unwrap().channel;
    channel.confirm_select(ConfirmSelectOptions::default()).await.unwrap();
    let mut headers = FieldTable::default();
    headers.insert("x-large".into(), AMQPValue::LongString("x".repeat(200_000).into()));
    let properties = BasicProperties::default().with_headers(headers).with_delivery_mode(2);
    let options = BasicPublishOptions { mandatory: true, ..BasicPublishOptions::default() };
    for event in events {
        let (exchange, (user, body)) = (world.broker.exchange(), body(event));
        let (exchange, key) = (exchange.as_str().into(), user.to_string().as_str().into());
        let sent = channel.basic_publish(exchange, key, options, &body, properties.clone()).await.unwrap();
        assert!(matches!(sent.await.unwrap(), Confirmation::Ack(None)));
    }
}
