//! Measures one contender at one rate.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};
use serde::Serialize;
use tallyd_core::model::Micros;

use crate::common::contender::{Contender, Running, Said};
use crate::common::cpu::{Processes, Used};
use crate::common::model::Model;
use crate::common::preload::rest;
use crate::common::report::quantile;
use crate::common::world::{Setup, World, stack};
use crate::publisher::{self, Published, Publishes};

/// Seconds for connections and warm-up. Events in these seconds are published but not measured.
const WARM_UP_S: u64 = 2;

/// How long the benchmark waits for the last commits.
const SILENCE_MAX: Duration = Duration::from_secs(10);

/// A distribution, as three percentiles.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Quantiles {
    pub p50: f64,
    pub p99: f64,
    pub max: f64,
}

/// The result of a run.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Measured {
    pub latency_ms: Quantiles,
    /// How much later than planned the events were published.
    pub late_ms: Quantiles,
    pub events_per_batch: f64,
    pub consumer_us: f64,
    pub mysql_us: f64,
    pub rabbitmq_us: f64,
    pub redis_us: f64,
    pub others_cores: f64,
}

impl Measured {
    /// CPU time of the contender and the servers together, per event.
    pub fn cpu_us(&self) -> f64 {
        self.consumer_us + self.mysql_us + self.rabbitmq_us + self.redis_us
    }
}

/// What is published for one measurement.
#[derive(Clone, Copy, Debug)]
pub struct Load {
    /// Events per second.
    pub rate: u64,
    /// After the warm-up.
    pub seconds: u64,
    pub by: Publishes,
}

/// Measures the latencies. Returns `None` if the contender can't keep up with the rate.
pub async fn measure(contender: &Contender, setup: Setup, load: Load) -> Result<Option<Measured>> {
    let world = World::new(contender.name, setup).await?;
    let measured = measure_in(&world, contender, load).await.with_context(|| contender.name);
    world.close(measured).await
}

async fn measure_in(world: &World, contender: &Contender, load: Load) -> Result<Option<Measured>> {
    let Load { rate, seconds, by } = load;
    let servers = Processes::of_stack(Path::new(&stack("DIR")?))?;
    rest(servers).await?;
    let mut running = contender.start(world, &[])?;
    let pid = running.pid()?;
    while running.next().await? != Said::Consuming {}
    let count = rate * (WARM_UP_S + seconds);
    let before = servers.used(Some(pid))?;
    let began = tokio::time::Instant::now();
    let published = publisher::publish(world, rate, count, by);
    let (published, commits) = tokio::try_join!(published, commits(&mut running, count))?;
    let took = began.elapsed().as_secs_f64();
    let used = servers.used(Some(pid))?.since(before);
    // The contender kept up with the rate if every event was committed soon after its publish.
    let committed: u64 = commits.iter().map(|commit| commit.events).sum();
    if committed < count || took > (WARM_UP_S + seconds) as f64 * 1.1 {
        return Ok(None);
    }
    let model = Model::of(published.events.iter().copied());
    contender.end(running, world, &model, u64::MAX).await?;
    Ok(Some(summary(&published, &commits, rate, used, took)))
}

/// A batch that a contender has committed.
struct Commit {
    at: Micros,
    events: u64,
}

/// Reads the contender's log until `count` events are committed, or until it has logged no commit for ten seconds.
async fn commits(running: &mut Running, count: u64) -> Result<Vec<Commit>> {
    let (mut commits, mut committed) = (Vec::new(), 0);
    while committed < count {
        let Ok(said) = tokio::time::timeout(SILENCE_MAX, running.next()).await else { break };
        if let Said::Committed { events, at, .. } = said? {
            commits.push(Commit { at: at.context("the contender logs no times")?, events });
            committed += events;
        }
    }
    Ok(commits)
}

/// Each commit has the events that were published next, because a queue keeps the order of its messages.
fn summary(published: &Published, commits: &[Commit], rate: u64, used: Used, took: f64) -> Measured {
    let warm = usize::try_from(rate * WARM_UP_S).unwrap_or(0);
    let batches = commits.len();
    let commits = commits.iter().flat_map(|commit| (0..commit.events).map(|_| commit.at));
    let pairs = published.events.iter().zip(commits).skip(warm);
    let latencies = pairs.map(|(event, committed)| (committed.0 - event.at.0) as f64 / 1e3).collect();
    let events = published.events.len() as f64;
    let per_event = |us: u64| us as f64 / events;
    Measured {
        latency_ms: quantiles(latencies),
        late_ms: quantiles(published.late_ms[warm..].to_vec()),
        events_per_batch: events / batches.max(1) as f64,
        consumer_us: per_event(used.consumer),
        mysql_us: per_event(used.mysql),
        rabbitmq_us: per_event(used.rabbitmq),
        redis_us: per_event(used.redis),
        others_cores: used.others() as f64 / 1e6 / took,
    }
}

fn quantiles(mut values: Vec<f64>) -> Quantiles {
    values.sort_by(f64::total_cmp);
    Quantiles { p50: quantile(&values, 0.5), p99: quantile(&values, 0.99), max: quantile(&values, 1.0) }
}
