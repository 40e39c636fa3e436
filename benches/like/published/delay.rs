//! Measures the delay from a publish to the count in Redis, at 1,000 likes a second. One in ten likes is for a sampled
//! target, whose counter is read in a loop.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde::Serialize;
use tallyd_client::Client;
use tallyd_core::event::LikeEvent;
use tallyd_core::model::{Kind, Target, TargetId, UserId};
use tallyd_redis::Cache;
use tallyd_testkit::client_of;
use tokio::task::JoinSet;
use tokio::time::MissedTickBehavior;

use super::{click, consuming, exact, settled};
use crate::common::report::quantile;
use crate::common::workload::Workload;
use crate::common::world::World;

/// Likes a second.
const RATE: u64 = 1_000;

/// The duration of the measurement in seconds, after the time for connections and warm-up.
const SECONDS: u64 = 12;
const WARM_UP_S: u64 = 2;

/// Every tenth like is for the sampled target.
const SAMPLE_EVERY: u64 = 10;

/// The sampled target. The likes in between have other targets.
const SAMPLED: Target = Target { kind: Kind(1), id: TargetId(999_998) };

/// Pause between two reads of this target's counter. The thread sleeps, because the runtime's timer rounds up to
/// milliseconds.
const PAUSE: Duration = Duration::from_micros(100);

/// Time limit for the last samples.
const SILENCE_MAX: Duration = Duration::from_secs(10);

/// The delays of likes, in milliseconds.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct Delays {
    pub p50: f64,
    pub p99: f64,
    pub max: f64,
    /// Time from one read of the counter to the next. A measured delay can be too high by up to the time between two
    /// reads.
    pub poll_p99: f64,
    /// How much later than planned the likes were published.
    pub late_p99: f64,
    pub samples: usize,
}

/// A separate connection that reads a target's like count.
pub(super) struct Counter {
    connection: redis::Connection,
    key: String,
    field: u64,
}

impl Counter {
    pub(super) fn of(world: &World, target: Target) -> Result<Self> {
        let keys = Cache::new(&world.config.redis, &world.config.metrics)?.keys;
        Ok(Self {
            connection: redis::Client::open(world.config.redis.url.expose())?.get_connection()?,
            key: keys.counters("video", keys.bucket(target)),
            field: target.id.0,
        })
    }

    pub(super) fn read(&mut self) -> Result<usize> {
        let mut hget = redis::cmd("HGET");
        let text: Option<String> = hget.arg(&self.key).arg(self.field).query(&mut self.connection)?;
        let number = text.as_deref().unwrap_or("0").split(',').next().unwrap_or_default().parse();
        number.context("read the counter")
    }
}

/// All published events, and the times of the samples.
#[derive(Default)]
struct Published {
    events: Vec<LikeEvent>,
    samples: Vec<Instant>,
    late_ms: Vec<f64>,
}

pub(super) async fn measure(world: &World, seed: u64) -> Result<Delays> {
    let client = Arc::new(client_of(&world.config));
    let daemon = consuming(world).await?;
    settled().await?;
    let count = RATE * (WARM_UP_S + SECONDS);
    let samples = usize::try_from(count.div_ceil(SAMPLE_EVERY))?;
    let counter = Counter::of(world, SAMPLED)?;
    let polling = tokio::task::spawn_blocking(move || poll(counter, samples));
    let published = publish(&client, count, seed).await?;
    let (seen, gaps_ms) = polling.await??;
    exact(world, published.events).await?;
    drop(daemon);
    let warm = usize::try_from(RATE * WARM_UP_S / SAMPLE_EVERY)?;
    let pairs = published.samples.iter().zip(&seen).skip(warm);
    let delays = sorted(pairs.map(|(published, seen)| seen.duration_since(*published).as_secs_f64() * 1e3));
    Ok(Delays {
        p50: quantile(&delays, 0.5),
        p99: quantile(&delays, 0.99),
        max: quantile(&delays, 1.0),
        poll_p99: quantile(&sorted(gaps_ms.into_iter()), 0.99),
        late_p99: quantile(&sorted(published.late_ms.into_iter()), 0.99),
        samples: delays.len(),
    })
}

fn sorted(values: impl Iterator<Item = f64>) -> Vec<f64> {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values
}

/// Publishes at the rate `RATE`, each like in its own task, and waits until all are confirmed.
async fn publish(client: &Arc<Client>, count: u64, seed: u64) -> Result<Published> {
    let (mut published, mut clicks) = (Published::default(), JoinSet::new());
    let mut tick = tokio::time::interval(Duration::from_millis(1));
    tick.set_missed_tick_behavior(MissedTickBehavior::Skip);
    let began = Instant::now();
    for (number, wish) in (0..count).zip(Workload::new(seed)) {
        let turn = began + Duration::from_micros(number * 1_000_000 / RATE);
        while Instant::now() < turn {
            tick.tick().await;
        }
        let now = Instant::now();
        published.late_ms.push(now.duration_since(turn).as_secs_f64() * 1e3);
        let (target, user, liked) = if number.is_multiple_of(SAMPLE_EVERY) {
            published.samples.push(now);
            (SAMPLED, UserId(1 + number), true)
        } else {
            (wish.target, wish.user, wish.liked)
        };
        let client = Arc::clone(client);
        clicks.spawn(async move { click(&client, target, user, liked).await });
        while let Some(clicked) = clicks.try_join_next() {
            published.events.push(clicked??);
        }
    }
    while let Some(clicked) = clicks.join_next().await {
        published.events.push(clicked??);
    }
    Ok(published)
}

/// Reads the counter until all samples are counted. Returns the time when each sample was counted, and the milliseconds
/// between successive reads of the counter.
fn poll(mut counter: Counter, samples: usize) -> Result<(Vec<Instant>, Vec<f64>)> {
    let (mut seen, mut gaps_ms) = (Vec::with_capacity(samples), Vec::new());
    let (mut before, mut progress) = (Instant::now(), Instant::now());
    while seen.len() < samples {
        ensure!(progress.elapsed() < SILENCE_MAX, "only {} of {samples} samples were counted", seen.len());
        std::thread::sleep(PAUSE);
        let start = Instant::now();
        let counted = counter.read()?;
        let now = Instant::now();
        gaps_ms.push(now.duration_since(before).as_secs_f64() * 1e3);
        before = start;
        if counted > seen.len() {
            seen.resize(counted, now);
            progress = now;
        }
    }
    Ok((seen, gaps_ms))
}
