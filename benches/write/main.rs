//! Measures how fast one connection writes batches, for each method to find the old state of a row.

mod ways;

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context, Result};
use clap::{Parser, ValueEnum};
use serde::Serialize;
use sqlx::{Connection, MySqlConnection};
use tallyd_core::event::LikeEvent;
use tokio::time::Instant;

use common::cpu::Processes;
use common::machine::Machine;
use common::model::Model;
use common::preload::rest;
use common::report::{Results, median, number, print_figures, print_table};
use common::workload::{USERS, Workload};
use common::world::{Setup, World, stack};
use tallyd_benches as common;
use ways::Way;

/// Write the same events with every method, in batches of each size, and check every row and counter after each run.
/// There is no broker, so only MySQL is measured.
#[derive(Debug, Parser)]
struct Arguments {
    /// Number of events that each run writes. If a run uses the smallest batches, it writes only a tenth of these
    /// events.
    #[arg(long, default_value_t = 200_000)]
    events: usize,

    /// Number of runs of each method. Each figure is the median of these runs.
    #[arg(long, default_value_t = 3)]
    rounds: usize,

    /// Comma-separated numbers of events in a batch.
    #[arg(long, value_delimiter = ',', default_values_t = [100, 1_000, 10_000])]
    batches: Vec<usize>,

    /// Run only these comma-separated methods.
    #[arg(long, value_enum, value_delimiter = ',')]
    only: Vec<Way>,

    /// Set by cargo.
    #[arg(long, hide = true)]
    bench: bool,
}

/// The result of a run.
#[derive(Clone, Copy, Serialize)]
struct Written {
    events_per_second: f64,
    /// CPU time of the server per event.
    mysql_us: f64,
    /// CPU time of the client per event, including the conversion of events to rows.
    client_us: f64,
}

/// The runs of one method with batches of one size.
#[derive(Serialize)]
struct Standing {
    exact: bool,
    median: Written,
    runs: Vec<Written>,
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<()> {
    let arguments = Arguments::parse();
    let machine = Machine::look().await?;
    let ways = if arguments.only.is_empty() { Way::value_variants() } else { &arguments.only };
    let mut runs: BTreeMap<(usize, Way), Vec<Written>> = BTreeMap::new();
    for round in 0..arguments.rounds {
        for &batch in &arguments.batches {
            let events: Vec<LikeEvent> = Workload::new(1).take(events_of(arguments.events, batch)).collect();
            for &way in ways {
                let written = run(way, &events, batch).await.with_context(|| format!("{way:?} by {batch}"))?;
                println!("round {}: {way:?} by {batch}: {} events/s", round + 1, number(written.events_per_second));
                runs.entry((batch, way)).or_default().push(written);
            }
        }
    }
    let standings: BTreeMap<(usize, Way), Standing> = runs
        .into_iter()
        .map(|(key, runs)| (key, Standing { exact: key.1.keeps_counters(), median: medians(&runs), runs }))
        .collect();
    let rows: Vec<Vec<String>> = standings
        .iter()
        .map(|((batch, way), Standing { exact, median, .. })| {
            let cells = [median.events_per_second, median.mysql_us, median.client_us].map(number);
            let kept = if *exact { "rows, counters" } else { "rows" };
            [vec![name(*way), batch.to_string(), kept.to_owned()], cells.to_vec()].concat()
        })
        .collect();
    println!("\nMedians. Values in microseconds are CPU time per event.");
    print_table(&["way", "events/batch", "writes", "events/s", "MySQL us", "client us"], &rows);
    let figures = figures(&standings);
    print_figures(&figures, &[]);
    let arguments = std::env::args().skip(1).collect();
    let results = standings.into_iter().map(|((batch, way), standing)| (format!("{}_{batch}", name(way)), standing));
    Results { figures, machine, arguments, missing: BTreeMap::new(), results: results.collect::<BTreeMap<_, _>>() }
        .write("write")
}

/// Returns the number of events of a run. Small batches are slow, so their runs write fewer events.
fn events_of(events: usize, batch: usize) -> usize {
    if batch < 1_000 { events / 10 } else { events }
}

async fn run(way: Way, events: &[LikeEvent], batch: usize) -> Result<Written> {
    let world = World::new(&format!("write-{}-{batch}", name(way)), Setup::default()).await?;
    let written = run_in(&world, way, events, batch).await;
    world.close(written).await
}

async fn run_in(world: &World, way: Way, events: &[LikeEvent], batch: usize) -> Result<Written> {
    let servers = Processes::of_stack(Path::new(&stack("DIR")?))?;
    let mut connection = MySqlConnection::connect(world.config.mysql.url.expose()).await?;
    way.prepare(&mut connection).await?;
    rest(servers).await?;
    let (began, before) = (Instant::now(), servers.used(None)?);
    for batch in events.chunks(batch) {
        way.write(&mut connection, batch).await?;
    }
    let seconds = began.elapsed().as_secs_f64();
    let used = servers.used(None)?.since(before);
    connection.close().await?;
    let model = Model::of(events.iter().copied());
    model.assert_rows(&world.pool, USERS).await?;
    if way.keeps_counters() {
        model.assert_counters(&world.pool).await?;
    }
    let per_event = |us: u64| us as f64 / events.len() as f64;
    Ok(Written {
        events_per_second: events.len() as f64 / seconds,
        mysql_us: per_event(used.mysql),
        client_us: per_event(used.bench),
    })
}

fn medians(runs: &[Written]) -> Written {
    let of = |number: fn(&Written) -> f64| median(runs.iter().map(number));
    Written {
        events_per_second: of(|run| run.events_per_second),
        mysql_us: of(|run| run.mysql_us),
        client_us: of(|run| run.client_us),
    }
}

/// Compares tallyd's method with every other method, for each size of the batches.
fn figures(standings: &BTreeMap<(usize, Way), Standing>) -> BTreeMap<String, f64> {
    let ours = |batch| standings.get(&(batch, Way::Noted)).map(|standing| standing.median.events_per_second);
    let others = standings.iter().filter(|((_, way), _)| *way != Way::Noted);
    others
        .filter_map(|((batch, way), standing)| {
            let ratio = ours(*batch)? / standing.median.events_per_second;
            Some((format!("noted_to_{}_{batch}", name(*way)), ratio))
        })
        .collect()
}

fn name(way: Way) -> String {
    way.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default()
}
