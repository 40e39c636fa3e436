//! Runs the contenders in turn, so that other load on the machine affects all of them.

use std::collections::BTreeMap;

use anyhow::Result;
use serde::Serialize;

use crate::Arguments;
use crate::chart;
use crate::common::contender::{Contender, Keeps};
use crate::common::lineup::line_up;
use crate::common::machine::{Machine, cores};
use crate::common::model::Model;
use crate::common::report::{Results, median, number, print_figures, print_table, write_picture};
use crate::common::world::{Peers, Setup};
use crate::contenders::{ALL, TALLYD};
use crate::drain::{self, Drained, Load};
use crate::figures;

/// The runs of a contender, and their medians.
#[derive(Debug, Serialize)]
pub struct Standing {
    pub counters: bool,
    pub median: Drained,
    pub runs: Vec<Drained>,
}

pub async fn run(arguments: &Arguments) -> Result<()> {
    let machine = Machine::look().await?;
    let lineup = line_up(&ALL, &arguments.only).await?;
    let contenders = &lineup.contenders;
    let model = Model::of(crate::events(arguments.events, arguments.hot));
    let load = Load { events: arguments.events, hot: arguments.hot, rows_before: 0, model: &model };
    let peers =
        Peers { batch: arguments.peer_batch, prefetch: arguments.peer_prefetch, linger_ms: arguments.peer_linger_ms };
    let mut setup = Setup { prefetch: arguments.prefetch, peers, ..Setup::default() };
    setup.batch_events_max = arguments.batch.unwrap_or(setup.batch_events_max);
    let mut runs: BTreeMap<&str, Vec<Drained>> = BTreeMap::new();
    for round in 0..arguments.rounds {
        for place in 0..contenders.len() {
            // Each round begins with another contender, so no contender is always the first.
            let Some(contender) = contenders.get((place + round) % contenders.len()) else { continue };
            let drained = drain::run(contender, setup, load).await?;
            print_run(round, contender, &drained);
            runs.entry(contender.name).or_default().push(drained);
        }
    }
    let standings: BTreeMap<&str, Standing> = contenders
        .iter()
        .filter_map(|contender| {
            let runs = runs.remove(contender.name)?;
            let counters = contender.keeps == Keeps::RowsAndCounters;
            Some((contender.name, Standing { counters, median: medians(&runs), runs }))
        })
        .collect();
    let mut figures = figures::compute(&standings, cores());
    if let Some(events) = arguments.backlog {
        figures.insert("backlog_events".to_owned(), events as f64);
        figures.insert("backlog_peak_rss_mib".to_owned(), backlog(arguments, events).await?.peak_rss_mib);
    }
    print_standings(contenders, &standings);
    lineup.print_missing();
    print_figures(&figures, &figures::AIMS);
    let results = arguments.results.clone();
    if let Some(picture) = chart::svg(&standings) {
        write_picture(&results, &picture)?;
    }
    let arguments = std::env::args().skip(1).collect();
    Results { figures, machine, arguments, missing: lineup.missing, results: standings }.write(&results)
}

/// Runs the contender once with a long queue, because memory must not grow with the length of the queue.
async fn backlog(arguments: &Arguments, events: u64) -> Result<Drained> {
    let model = Model::of(crate::events(events, arguments.hot));
    let load = Load { events, hot: arguments.hot, rows_before: 0, model: &model };
    let contender = Contender::tallyd(TALLYD, 1);
    let drained = drain::run(&contender, Setup::default(), load).await?;
    print_run(0, &contender, &drained);
    Ok(drained)
}

fn print_run(round: usize, contender: &Contender, drained: &Drained) {
    println!(
        "round {}: {} {} events/s, {} cores, other processes {} cores",
        round + 1,
        contender.name,
        number(drained.events_per_second),
        number(drained.cores),
        number(drained.others_cores),
    );
}

/// Returns the median of each figure.
pub fn medians(runs: &[Drained]) -> Drained {
    let of = |number: fn(&Drained) -> f64| median(runs.iter().map(number));
    Drained {
        events: runs.first().map_or(0, |run| run.events),
        seconds: of(|run| run.seconds),
        events_per_second: of(|run| run.events_per_second),
        consumer_us: of(|run| run.consumer_us),
        mysql_us: of(|run| run.mysql_us),
        rabbitmq_us: of(|run| run.rabbitmq_us),
        redis_us: of(|run| run.redis_us),
        published_us: of(|run| run.published_us),
        cores: of(|run| run.cores),
        others_cores: of(|run| run.others_cores),
        peak_rss_mib: of(|run| run.peak_rss_mib),
        batches: of(|run| run.batches as f64) as u64,
        writing: of(|run| run.writing),
        mysql_bytes: of(|run| run.mysql_bytes),
        mysql_statements: of(|run| run.mysql_statements),
        row_bytes: of(|run| run.row_bytes),
    }
}

fn print_standings(contenders: &[Contender], standings: &BTreeMap<&str, Standing>) {
    let rows: Vec<Vec<String>> = contenders
        .iter()
        .filter_map(|contender| Some((contender, standings.get(contender.name)?)))
        .map(|(contender, standing)| {
            let kept = match contender.keeps {
                Keeps::Nothing => "no",
                Keeps::Rows => "rows",
                Keeps::RowsAndCounters => "rows, counters",
            };
            [vec![contender.name.to_owned(), kept.to_owned()], cells(&standing.median)].concat()
        })
        .collect();
    println!("\nMedians. Values in microseconds are CPU time per event.");
    print_table(&[["contender", "writes"].as_slice(), &CELLS].concat(), &rows);
}

/// The titles of the columns that [`cells`] fills.
pub const CELLS: [&str; 11] = [
    "events/s",
    "consumer us",
    "MySQL us",
    "RabbitMQ us",
    "Redis us",
    "all us",
    "cores",
    "peak MiB",
    "events/batch",
    "writing",
    "others",
];

/// Formats a run as a row of the table.
pub fn cells(run: &Drained) -> Vec<String> {
    let batch = run.events as f64 / run.batches.max(1) as f64;
    let values = [run.events_per_second, run.consumer_us, run.mysql_us, run.rabbitmq_us, run.redis_us, run.all_us()];
    values.into_iter().chain([run.cores, run.peak_rss_mib, batch, run.writing, run.others_cores]).map(number).collect()
}
