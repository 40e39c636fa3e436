//! Publishes at a steady rate. Each event's `at` is the time of its publish.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use lapin::options::{BasicPublishOptions, ConfirmSelectOptions};
use lapin::{BasicProperties, Connection, ConnectionProperties};
use tallyd_core::event::LikeEvent;
use tokio::time::{Instant, MissedTickBehavior};

use crate::common::preload::message;
use crate::common::workload::Workload;
use crate::common::world::World;

/// The number of channels. The channels publish in turn. RabbitMQ blocks a channel with 32 unconfirmed messages to a
/// quorum queue (the soft limit of `rabbit_fifo_client`). With a single channel, the benchmark would measure only this
/// limit. A site with this rate has more than one channel.
const CHANNELS: usize = 8;

/// The publisher wakes up at this interval to send due events.
const TICK: Duration = Duration::from_millis(1);

/// The published events.
pub struct Published {
    pub events: Vec<LikeEvent>,
    /// How much later than planned each event was published, in ms.
    pub late_ms: Vec<f64>,
}

/// Publishes `count` events at `rate` per second and waits until the broker has confirmed all of them.
pub async fn publish(world: &World, rate: u64, count: u64) -> Result<Published> {
    let url = world.config.amqp.url.expose();
    let connection = Connection::connect(url, ConnectionProperties::default()).await.context("connect to RabbitMQ")?;
    let mut channels = Vec::new();
    for _ in 0..CHANNELS {
        let channel = connection.create_channel().await?;
        channel.confirm_select(ConfirmSelectOptions::default()).await?;
        channels.push(channel);
    }
    let exchange = world.broker.exchange();
    let mut published = Published { events: Vec::new(), late_ms: Vec::new() };
    let mut tick = tokio::time::interval(TICK);
    tick.set_missed_tick_behavior(MissedTickBehavior::Skip);
    let began = Instant::now();
    for ((number, event), channel) in (0..count).zip(Workload::new(2)).zip(channels.iter().cycle()) {
        let turn = Duration::from_nanos(number * 1_000_000_000 / rate);
        while began.elapsed() < turn {
            tick.tick().await;
        }
        published.late_ms.push((began.elapsed() - turn).as_secs_f64() * 1e3);
        let event = LikeEvent { at: tallyd_base::runtime::clock::now(), ..event };
        let (key, body) = message(&event);
        let properties = BasicProperties::default().with_content_type("application/json".into()).with_delivery_mode(2);
        let options = BasicPublishOptions::default();
        let publish = channel.basic_publish(exchange.as_str().into(), key.as_str().into(), options, &body, properties);
        // The publisher does not wait for each confirm separately, because each wait would wake a thread.
        drop(publish.await?);
        published.events.push(event);
    }
    for channel in &channels {
        let returned = channel.wait_for_confirms().await?;
        ensure!(returned.is_empty(), "the broker returned {} messages", returned.len());
    }
    Ok(published)
}
