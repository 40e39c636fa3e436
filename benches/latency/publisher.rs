//! Publishes at a steady rate. Each event's `at` is the time of its publish.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use lapin::options::{BasicPublishOptions, ConfirmSelectOptions};
use lapin::{BasicProperties, Connection, ConnectionProperties};
use tallyd_core::event::LikeEvent;
use tallyd_core::model::{Kind, Micros, Target, TargetId, UserId};
use tokio::time::{Instant, MissedTickBehavior};

use crate::common::preload::message;
use crate::common::workload::{USERS, Workload, counted};
use crate::common::world::World;

/// The target of the samples. No other event has this target. The users of the samples have higher ids than all other
/// users.
pub const SAMPLED: Target = Target { kind: Kind(1), id: TargetId(999_999) };

/// Every tenth event is a sample.
pub const SAMPLE_EVERY: u64 = 10;

/// The number of channels. The channels publish in turn. RabbitMQ blocks a channel with 32 unconfirmed messages to a
/// quorum queue (the soft limit of `rabbit_fifo_client`). With a single channel, the benchmark would measure only this
/// limit. A site with this rate has more than one channel.
const CHANNELS: usize = 8;

/// The publisher wakes up at this interval to send due events.
const TICK: Duration = Duration::from_millis(1);

/// The published samples.
pub struct Published {
    pub events: Vec<LikeEvent>,
    /// Maps a sample's number to the time when the sample was published.
    pub samples: Vec<Micros>,
    /// How much later than planned each sample was published, in ms.
    pub late_ms: Vec<f64>,
}

/// Each sample has a different user. Returns the index of the sample that has this user.
pub fn sample_of(user: u64) -> Option<usize> {
    usize::try_from(user.checked_sub(USERS + 1)?).ok()
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
    let mut published = Published { events: Vec::new(), samples: Vec::new(), late_ms: Vec::new() };
    let mut tick = tokio::time::interval(TICK);
    tick.set_missed_tick_behavior(MissedTickBehavior::Skip);
    let began = Instant::now();
    for ((number, (event, said)), channel) in (0..count).zip(counted(Workload::new(2))).zip(channels.iter().cycle()) {
        let turn = Duration::from_nanos(number * 1_000_000_000 / rate);
        while began.elapsed() < turn {
            tick.tick().await;
        }
        let stamped = stamped(event, number, &mut published, (began.elapsed() - turn).as_secs_f64() * 1e3);
        let (key, body) = message(&stamped, said.filter(|_| stamped.target == event.target));
        let event = stamped;
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

/// Returns the event with the current time as its `at`. Every [`SAMPLE_EVERY`]th event is replaced by a sample.
fn stamped(event: LikeEvent, number: u64, published: &mut Published, late_ms: f64) -> LikeEvent {
    let at = tallyd::runtime::clock::now();
    if !number.is_multiple_of(SAMPLE_EVERY) {
        return LikeEvent { at, ..event };
    }
    published.samples.push(at);
    published.late_ms.push(late_ms);
    let user = UserId(USERS + published.samples.len() as u64);
    LikeEvent { target: SAMPLED, user, at, liked: true }
}
