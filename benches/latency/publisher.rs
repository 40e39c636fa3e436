//! Publishes at a steady rate. Each event's `at` is the time of its publish.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use lapin::options::{BasicPublishOptions, ConfirmSelectOptions};
use lapin::{BasicProperties, Connection, ConnectionProperties};
use tallyd_client::Clicked;
use tallyd_core::event::LikeEvent;
use tallyd_testkit::client_of;
use tokio::time::{Instant, Interval, MissedTickBehavior};

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
pub async fn publish(world: &World, rate: u64, count: u64, by: Publishes) -> Result<Published> {
    match by {
        Publishes::Messages => publish_messages(world, rate, count).await,
        Publishes::Client => publish_through_client(world, rate, count).await,
    }
}

/// How events are published.
#[derive(Clone, Copy, Debug)]
pub enum Publishes {
    /// Each event is a message, as the peers' consumers read them.
    Messages,
    /// One client's calls, which it sends in lists.
    Client,
}

/// When each event is due.
struct Schedule {
    rate: u64,
    began: Instant,
    tick: Interval,
    late_ms: Vec<f64>,
}

impl Schedule {
    fn begin(rate: u64) -> Self {
        let mut tick = tokio::time::interval(TICK);
        tick.set_missed_tick_behavior(MissedTickBehavior::Skip);
        Self { rate, began: Instant::now(), tick, late_ms: Vec::new() }
    }

    async fn due(&mut self) {
        let turn = Duration::from_nanos(self.late_ms.len() as u64 * 1_000_000_000 / self.rate);
        while self.began.elapsed() < turn {
            self.tick.tick().await;
        }
        self.late_ms.push((self.began.elapsed() - turn).as_secs_f64() * 1e3);
    }
}

async fn publish_messages(world: &World, rate: u64, count: u64) -> Result<Published> {
    let url = world.config.amqp.url.expose();
    let connection = Connection::connect(url, ConnectionProperties::default()).await.context("connect to RabbitMQ")?;
    let mut channels = Vec::new();
    for _ in 0..CHANNELS {
        let channel = connection.create_channel().await?;
        channel.confirm_select(ConfirmSelectOptions::default()).await?;
        channels.push(channel);
    }
    let exchange = world.broker.exchange();
    let (mut schedule, mut events) = (Schedule::begin(rate), Vec::new());
    for ((_, event), channel) in (0..count).zip(Workload::new(2)).zip(channels.iter().cycle()) {
        schedule.due().await;
        let event = LikeEvent { at: tallyd_base::runtime::clock::now(), ..event };
        let (key, body) = message(&event);
        let properties = BasicProperties::default().with_content_type("application/json".into()).with_delivery_mode(2);
        let options = BasicPublishOptions::default();
        let publish = channel.basic_publish(exchange.as_str().into(), key.as_str().into(), options, &body, properties);
        // The publisher does not wait for each confirm separately, because each wait would wake a thread.
        drop(publish.await?);
        events.push(event);
    }
    for channel in &channels {
        let returned = channel.wait_for_confirms().await?;
        ensure!(returned.is_empty(), "the broker returned {} messages", returned.len());
    }
    Ok(Published { events, late_ms: schedule.late_ms })
}

async fn publish_through_client(world: &World, rate: u64, count: u64) -> Result<Published> {
    let client = Arc::new(client_of(&world.config));
    let (mut schedule, mut clicks) = (Schedule::begin(rate), Vec::new());
    for (_, LikeEvent { target, user, liked, .. }) in (0..count).zip(Workload::new(2)) {
        schedule.due().await;
        let client = Arc::clone(&client);
        clicks.push(tokio::spawn(async move {
            if liked { client.like(target, user).await } else { client.unlike(target, user).await }
        }));
    }
    let mut events = Vec::with_capacity(clicks.len());
    for click in clicks {
        match click.await?? {
            Clicked::Published(event) => events.push(event),
            other => bail!("a like should only be published, but the result is {other:?}"),
        }
    }
    Ok(Published { events, late_ms: schedule.late_ms })
}
