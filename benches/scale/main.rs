//! Uses a model to calculate the resources that a site needs for a rate of events. Compares the model with measurements
//! of 1, 2 and 4 partitions.

mod measured;
mod model;
mod plan;

use std::collections::BTreeMap;

use anyhow::Result;
use clap::Parser;
use serde::Serialize;
use tallyd_base::config::Config;

use common::machine::Machine;
use common::report::{Aim, Results, number, print_figures, print_table};
use measured::{Measured, POINTS};
use model::{Cores, Costs, Outcome, Site, simulate};
use tallyd_benches as common;

/// Allowed difference between the model and the measurement.
const AIMS: [(&str, Aim); 3] = [
    ("error_percent_1", Aim::AtMost(25.0)),
    ("error_percent_2", Aim::AtMost(25.0)),
    ("error_percent_4", Aim::AtMost(25.0)),
];

/// Measure the separate costs of broker and database, predict tallyd's rate with 1, 2 and 4 partitions from these
/// costs, and compare the prediction with the measured rate. Then use the same costs to plan larger sites.
#[derive(Clone, Debug, Parser)]
struct Arguments {
    /// Number of events that each run drains.
    #[arg(long, default_value_t = 500_000)]
    events: u64,

    /// Rounds. The model uses medians.
    #[arg(long, default_value_t = 3)]
    rounds: usize,

    /// Use the last measurement instead of a new one.
    #[arg(long)]
    measured: bool,

    /// Comma-separated rates for which sites are planned, in events a second.
    #[arg(long, value_delimiter = ',', default_value = "10000,100000,1000000")]
    rates: Vec<f64>,

    /// Set by cargo.
    #[arg(long, hide = true)]
    bench: bool,
}

/// A rate of tallyd, measured and predicted.
#[derive(Debug, Serialize)]
struct Point {
    partitions: usize,
    measured_per_second: f64,
    predicted_per_second: f64,
    measured_per_batch: f64,
    predicted_per_batch: f64,
}

#[tokio::main]
async fn main() -> Result<()> {
    let arguments = Arguments::parse();
    let machine = Machine::look().await?;
    let measured = Measured::take(&arguments)?;
    println!("\nMeasured on {} ({} cores).", measured.machine.cpu, measured.machine.cores);
    let costs = measured.costs()?;
    print_costs(&costs, &measured)?;
    let mut figures = BTreeMap::new();
    let mut points = Vec::new();
    for (partitions, name) in POINTS {
        let (ran, outcome) = (measured.of(name)?, drained(costs, measured.machine.cores, partitions));
        let error = (outcome.events_per_second / ran.events_per_second - 1.0) * 100.0;
        figures.insert(format!("error_percent_{partitions}"), error.abs());
        points.push(Point {
            partitions,
            measured_per_second: ran.events_per_second,
            predicted_per_second: outcome.events_per_second,
            measured_per_batch: ran.events_per_batch(),
            predicted_per_batch: outcome.events_per_batch,
        });
    }
    print_points(&points);
    print_figures(&figures, &AIMS);
    let plans = plan::plans(costs, &measured, &arguments.rates)?;
    let arguments = std::env::args().skip(1).collect();
    let results = BTreeMap::from([("points", serde_json::to_value(points)?), ("plans", serde_json::to_value(plans)?)]);
    Results { figures, machine, arguments, missing: BTreeMap::new(), results }.write("scale")
}

/// Returns a site with the daemon's defaults.
fn site(costs: Costs, cores: Cores, partitions: usize) -> Site {
    let config = Config::default();
    Site {
        costs,
        cores,
        partitions,
        batch_events_max: config.consumer.batch_events_max as f64,
        prefetch: f64::from(config.amqp.prefetch),
        linger_us: config.consumer.linger_ms as f64 * 1e3,
        arrivals: None,
        seconds: 5.0,
    }
}

/// Returns the model's result for full queues on one machine.
fn drained(costs: Costs, cores: f64, partitions: usize) -> Outcome {
    simulate(&site(costs, Cores::Shared(cores), partitions))
}

fn print_costs(costs: &Costs, measured: &Measured) -> Result<()> {
    let (floor, tallyd) = (measured.of("floor")?, measured.of("tallyd")?);
    let rows = [
        ("RabbitMQ, to take an event with a confirm", costs.publish, "us of a core"),
        ("RabbitMQ, to hand an event over", costs.deliver, "us of a core"),
        ("the daemon, for an event", costs.consume, "us of a core"),
        ("MySQL, for an event", costs.row, "us of a core"),
        ("MySQL, for a batch", costs.batch, "us of a core"),
        ("the connection to MySQL waits, for an event", costs.row_wait, "us"),
        ("the connection to MySQL waits, for a batch", costs.batch_wait, "us"),
        ("between daemon and MySQL, for an event", tallyd.mysql_bytes, "bytes"),
        ("statements of a batch", tallyd.mysql_statements, ""),
        ("like_record on disk, for a row", floor.row_bytes, "bytes"),
    ];
    let rows: Vec<Vec<String>> =
        rows.iter().map(|(what, cost, unit)| vec![(*what).to_owned(), number(*cost), (*unit).to_owned()]).collect();
    print_table(&["cost", "", ""], &rows);
    Ok(())
}

fn print_points(points: &[Point]) {
    let rows: Vec<Vec<String>> = points
        .iter()
        .map(|point| {
            let numbers = [point.measured_per_second, point.predicted_per_second];
            let batches = [point.measured_per_batch, point.predicted_per_batch];
            std::iter::once(point.partitions.to_string())
                .chain(numbers.into_iter().chain(batches).map(number))
                .collect()
        })
        .collect();
    println!("\nA full queue on one machine.");
    print_table(&["partitions", "events/s", "the model says", "events/batch", "the model says"], &rows);
}
