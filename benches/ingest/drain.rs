//! One measurement: a consumer (tallyd, or a program that is compared with tallyd) reads a full queue until the last
//! event is committed.

use std::path::Path;

use anyhow::{Context, Result};
use serde::Serialize;
use tokio::time::Instant;

use crate::common::contender::{Contender, Runs};
use crate::common::cpu::{Processes, Used, peak_rss_mib};
use crate::common::model::Model;
use crate::common::preload;
use crate::common::workload::USERS;
use crate::common::world::{Setup, World, stack};
use crate::contenders::{FLOOR, FLOOR_EXACT};
use crate::traffic::{Traffic, row_bytes};

/// The load of a run.
#[derive(Clone, Copy)]
pub struct Load<'a> {
    pub events: u64,
    pub hot: bool,
    /// Number of rows that the table has before the run.
    pub rows_before: u64,
    pub model: &'a Model,
}

/// The result of a run. Values in microseconds are CPU time per event.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Drained {
    pub events: u64,
    pub seconds: f64,
    pub events_per_second: f64,
    pub consumer_us: f64,
    pub mysql_us: f64,
    pub rabbitmq_us: f64,
    pub redis_us: f64,
    /// RabbitMQ's CPU time per event while the queue was filled. The events were published with confirms, with up to
    /// 10,000 messages in flight.
    pub published_us: f64,
    /// Number of cores that the consumer and the servers used together.
    pub cores: f64,
    /// Number of cores that other processes used during the run. Other processes disturb the measurement.
    pub others_cores: f64,
    pub peak_rss_mib: f64,
    pub batches: u64,
    /// The mean number of transactions in flight, or 0 if the contender doesn't log this number. If this number is
    /// close to the number of partitions, the contender waits for the database.
    pub writing: f64,
    /// Bytes that the consumer and MySQL exchange for each event.
    pub mysql_bytes: f64,
    /// The number of SQL statements for each batch. The number includes the statements at the start of the session.
    pub mysql_statements: f64,
    /// Bytes of `like_record` on disk, for each row.
    pub row_bytes: f64,
}

impl Drained {
    pub fn all_us(&self) -> f64 {
        self.consumer_us + self.mysql_us + self.rabbitmq_us + self.redis_us
    }
}

/// Fills the queue of a new world, drains it, and compares the tables with the model.
///
/// # Errors
/// Fails if the contender failed or wrote wrong data.
pub async fn run(contender: &Contender, setup: Setup, load: Load<'_>) -> Result<Drained> {
    let batch_events_max = match contender.runs {
        Runs::Role(FLOOR_EXACT) => setup.peers.batch,
        _ => contender.batch_events_max,
    };
    let batch_events_max = batch_events_max.unwrap_or(setup.batch_events_max);
    let setup = Setup { partitions: contender.partitions, likes_by: contender.likes_by, batch_events_max, ..setup };
    let world = World::new(contender.name, setup).await?;
    let drained = run_in(&world, contender, load).await.with_context(|| contender.name);
    world.close(drained).await
}

async fn run_in(world: &World, contender: &Contender, load: Load<'_>) -> Result<Drained> {
    let servers = Processes::of_stack(Path::new(&stack("DIR")?))?;
    if load.rows_before > 0 {
        crate::curve::fill_table(world, load.rows_before).await?;
    }
    let before = servers.used(None)?;
    // These contenders generate their events themselves.
    if !matches!(contender.runs, Runs::Role(FLOOR | FLOOR_EXACT)) {
        let events = crate::events(load.events, load.hot);
        match contender.per_message {
            1 => preload::preload(world, events).await?,
            many => preload::preload_messages(world, preload::arrays(events, many, contender.groups)).await?,
        }
    }
    preload::rest(servers).await?;
    let published = servers.used(None)?.since(before);
    Ok(Drained {
        published_us: published.rabbitmq as f64 / load.events as f64,
        ..drain(world, contender, load, servers).await?
    })
}

/// Measures the time from the moment when the contender begins to consume until the last event is committed.
async fn drain(world: &World, contender: &Contender, load: Load<'_>, servers: Processes) -> Result<Drained> {
    let mut arguments = vec!["--events".to_owned(), load.events.to_string()];
    arguments.extend(load.hot.then(|| "--hot".to_owned()));
    let mut running = contender.start(world, &arguments)?;
    let pid = running.pid()?;
    running.consuming(1).await?;
    let asked = Traffic::of_server(&world.pool).await?;
    let (began, before) = (Instant::now(), servers.used(Some(pid))?);
    let (batches, writing_ms) = running.committed(load.events).await?;
    let seconds = began.elapsed().as_secs_f64();
    let used = servers.used(Some(pid))?.since(before);
    let peak_rss_mib = peak_rss_mib(pid)?;
    let traffic = Traffic::of_server(&world.pool).await?;
    contender.end(running, world, load.model, USERS).await?;
    Ok(Drained {
        peak_rss_mib,
        batches,
        writing: writing_ms / 1e3 / seconds,
        mysql_bytes: traffic.since(asked, load.events).bytes,
        mysql_statements: traffic.since(asked, batches).statements,
        row_bytes: row_bytes(&world.pool, "like_record").await?,
        ..summary(load.events, seconds, used)
    })
}

fn summary(events: u64, seconds: f64, used: Used) -> Drained {
    let per_event = |us: u64| us as f64 / events as f64;
    let cores = |us: u64| us as f64 / 1e6 / seconds;
    Drained {
        events,
        seconds,
        events_per_second: events as f64 / seconds,
        consumer_us: per_event(used.consumer),
        mysql_us: per_event(used.mysql),
        rabbitmq_us: per_event(used.rabbitmq),
        redis_us: per_event(used.redis),
        cores: cores(used.together()),
        others_cores: cores(used.others()),
        ..Drained::default()
    }
}
