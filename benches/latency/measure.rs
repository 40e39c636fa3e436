//! Measures one contender at one rate.

use std::path::Path;

use anyhow::{Context, Result};
use serde::Serialize;

use crate::common::contender::{Contender, Keeps, Running, Said};
use crate::common::cpu::{Processes, Used};
use crate::common::model::Model;
use crate::common::preload::rest;
use crate::common::report::quantile;
use crate::common::world::{Setup, World, stack};
use crate::poller::{self, Seen};
use crate::publisher::{self, Published, SAMPLE_EVERY};

/// Seconds for connections and warm-up. Events in these seconds are published but not measured.
const WARM_UP_S: u64 = 2;

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
    pub samples: u64,
    /// Time between two polls. A measured latency can be longer than the real latency, but the difference is less than
    /// the time between two polls.
    pub poll_ms: Quantiles,
    /// How much later than planned the events were published.
    pub late_ms: Quantiles,
    pub events_per_batch: f64,
    pub consumer_us: f64,
    pub mysql_us: f64,
    pub rabbitmq_us: f64,
    pub others_cores: f64,
}

/// Measures the latencies. Returns `None` if the contender can't keep up with the rate.
pub async fn measure(contender: &Contender, rate: u64, seconds: u64) -> Result<Option<Measured>> {
    let world = World::new(contender.name, Setup::default()).await?;
    let measured = measure_in(&world, contender, rate, seconds).await.with_context(|| contender.name);
    world.close(measured).await
}

async fn measure_in(world: &World, contender: &Contender, rate: u64, seconds: u64) -> Result<Option<Measured>> {
    let servers = Processes::of_stack(Path::new(&stack("DIR")?))?;
    rest(servers).await?;
    let mut running = contender.start(world, &[])?;
    let pid = running.pid()?;
    while running.next().await? != Said::Consuming {}
    let count = rate * (WARM_UP_S + seconds);
    let samples = usize::try_from(count.div_ceil(SAMPLE_EVERY))?;
    let before = servers.used(Some(pid))?;
    let began = tokio::time::Instant::now();
    let published = publisher::publish(world, rate, count);
    let seen = poller::poll(world, samples);
    let measuring = async { tokio::try_join!(published, seen) };
    let (batches, ended) = listen(&mut running, measuring).await?;
    let (published, seen) = ended?;
    let took = began.elapsed().as_secs_f64();
    let used = servers.used(Some(pid))?.since(before);
    // The contender kept up with the rate if every sample became visible soon after its publish.
    let all = seen.samples.iter().all(Option::is_some) && took < (WARM_UP_S + seconds) as f64 * 1.1;
    if !all {
        return Ok(None);
    }
    running.stop().await?;
    assert_written(world, contender, &published).await?;
    Ok(Some(summary(&published, &seen, rate, batches, used, took)))
}

/// Runs `work` to its end, and counts the batches that are committed until then.
async fn listen<T>(running: &mut Running, work: impl Future<Output = T>) -> Result<(u64, T)> {
    let mut batches = 0;
    tokio::pin!(work);
    loop {
        tokio::select! {
            done = &mut work => return Ok((batches, done)),
            said = running.next() => if let Said::Committed { .. } = said? { batches += 1 },
        }
    }
}

async fn assert_written(world: &World, contender: &Contender, published: &Published) -> Result<()> {
    world.assert_drained().await?;
    let model = Model::of(published.events.iter().copied());
    model.assert_rows(&world.pool, u64::MAX).await?;
    if contender.keeps == Keeps::RowsAndCounters {
        model.assert_counters(&world.pool).await?;
    }
    Ok(())
}

fn summary(published: &Published, seen: &Seen, rate: u64, batches: u64, used: Used, took: f64) -> Measured {
    let warm = usize::try_from(rate * WARM_UP_S / SAMPLE_EVERY).unwrap_or(0);
    let pairs = published.samples.iter().zip(&seen.samples).skip(warm);
    let latencies: Vec<f64> =
        pairs.filter_map(|(published, seen)| Some(((*seen)?.0 - published.0) as f64 / 1e3)).collect();
    let events = published.events.len() as f64;
    let per_event = |us: u64| us as f64 / events;
    Measured {
        samples: latencies.len() as u64,
        latency_ms: quantiles(latencies),
        poll_ms: quantiles(seen.gaps_ms.clone()),
        late_ms: quantiles(published.late_ms.iter().skip(warm).copied().collect()),
        events_per_batch: events / batches.max(1) as f64,
        consumer_us: per_event(used.consumer),
        mysql_us: per_event(used.mysql),
        rabbitmq_us: per_event(used.rabbitmq),
        others_cores: used.others() as f64 / 1e6 / took,
    }
}

fn quantiles(mut values: Vec<f64>) -> Quantiles {
    values.sort_by(f64::total_cmp);
    Quantiles { p50: quantile(&values, 0.5), p99: quantile(&values, 0.99), max: quantile(&values, 1.0) }
}
