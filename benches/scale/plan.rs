//! Plans a site for a rate: the number of partitions, and the number of cores of each kind.

use anyhow::Result;
use serde::Serialize;

use crate::common::preload::message;
use crate::common::report::{number, print_table};
use crate::common::workload::Workload;
use crate::measured::Measured;
use crate::model::{Cores, Costs, simulate};

/// The highest allowed load of each part in the busiest hour.
const BUSY_MAX: f64 = 0.6;

/// RabbitMQ stores each message three times, because each quorum queue has three members.
const COPIES: f64 = 3.0;

/// The plan uses the average size of this number of events.
const SAMPLE: usize = 10_000;

/// A number of cores that is always enough.
const PLENTY: f64 = 1e6;

/// A site for one rate.
#[derive(Debug, Serialize)]
pub struct Plan {
    events_per_second: f64,
    partitions: usize,
    /// The load of the busiest connection or queue with this number of partitions.
    busiest_thread_percent: f64,
    rabbitmq_cores: f64,
    daemon_cores: f64,
    mysql_cores: f64,
    needs_most: &'static str,
    events_per_batch: f64,
    lag_p50_ms: f64,
    lag_p99_ms: f64,
    committed_per_second: f64,
    /// RabbitMQ's traffic in megabytes a second. Each message is transferred three times for the three copies, and once
    /// to a daemon.
    rabbitmq_mb_per_second: f64,
    mysql_mb_per_second: f64,
    /// Size of a day's new rows, if each event makes a new row.
    mysql_gb_per_day: f64,
}

/// Plans sites for these rates, with separate machines for each server.
pub fn plans(costs: Costs, measured: &Measured, rates: &[f64]) -> Result<Vec<Plan>> {
    let (noop, floor, tallyd) = (measured.of("noop")?, measured.of("floor")?, measured.of("tallyd")?);
    let body = body_bytes();
    let plans: Vec<Plan> = rates
        .iter()
        .map(|rate| {
            // The load of a queue is 100 percent if the queue can't deliver events faster. The load of a connection is
            // 100 percent if the connection can't write events faster.
            let thread = noop.events_per_second.min(floor.events_per_second);
            let partitions = (rate / (thread * BUSY_MAX)).ceil().max(1.0) as usize;
            let partitions = partitions.next_power_of_two();
            let ample = Cores::Own { rabbitmq: PLENTY, daemons: PLENTY, mysql: PLENTY };
            let at = |cores| {
                simulate(&crate::model::Site { arrivals: Some(*rate), ..crate::site(costs, cores, partitions) })
            };
            let per_batch = at(ample).events_per_batch;
            let cores = |us: f64| (rate * us / 1e6 / BUSY_MAX).ceil();
            let rabbitmq = cores(costs.publish + costs.deliver);
            let (daemons, mysql) = (cores(costs.consume), cores(costs.row + costs.batch / per_batch));
            let outcome = at(Cores::Own { rabbitmq, daemons, mysql });
            let needs = [("RabbitMQ", rabbitmq), ("the daemons", daemons), ("MySQL", mysql)];
            let (needs_most, _) =
                needs.into_iter().fold(("", 0.0), |most, next| if next.1 > most.1 { next } else { most });
            Plan {
                events_per_second: *rate,
                partitions,
                busiest_thread_percent: rate / partitions as f64 / thread * 100.0,
                rabbitmq_cores: rabbitmq,
                daemon_cores: daemons,
                mysql_cores: mysql,
                needs_most,
                events_per_batch: outcome.events_per_batch,
                lag_p50_ms: outcome.lag_p50_ms,
                lag_p99_ms: outcome.lag_p99_ms,
                committed_per_second: outcome.events_per_second,
                rabbitmq_mb_per_second: rate * body * (COPIES + 1.0) / 1e6,
                mysql_mb_per_second: rate * tallyd.mysql_bytes / 1e6,
                mysql_gb_per_day: rate * 86_400.0 * floor.row_bytes / 1e9,
            }
        })
        .collect();
    print(&plans);
    Ok(plans)
}

/// Returns the body of a like, as a producer publishes it.
fn body_bytes() -> f64 {
    let bodies = Workload::new(1).take(SAMPLE).map(|event| message(&event).1.len());
    bodies.sum::<usize>() as f64 / SAMPLE as f64
}

fn print(plans: &[Plan]) {
    let row = |title: &str, value: &dyn Fn(&Plan) -> String| {
        std::iter::once(title.to_owned()).chain(plans.iter().map(value)).collect::<Vec<String>>()
    };
    let rows = vec![
        row("partitions", &|plan| plan.partitions.to_string()),
        row("a queue or connection is busy, percent", &|plan| number(plan.busiest_thread_percent)),
        row("cores of RabbitMQ, for each copy", &|plan| number(plan.rabbitmq_cores)),
        row("cores of daemons", &|plan| number(plan.daemon_cores)),
        row("cores of MySQL", &|plan| number(plan.mysql_cores)),
        row("needs the most", &|plan| plan.needs_most.to_owned()),
        row("events/batch", &|plan| number(plan.events_per_batch)),
        row("committed/s", &|plan| number(plan.committed_per_second)),
        row("lag p50, ms", &|plan| number(plan.lag_p50_ms)),
        row("lag p99, ms", &|plan| number(plan.lag_p99_ms)),
        row("MB/s of RabbitMQ, three copies", &|plan| number(plan.rabbitmq_mb_per_second)),
        row("MB/s of MySQL", &|plan| number(plan.mysql_mb_per_second)),
        row("GB of new rows a day, at most", &|plan| number(plan.mysql_gb_per_day)),
    ];
    let rates: Vec<String> = plans.iter().map(|plan| format!("{}/s", number(plan.events_per_second))).collect();
    let titles: Vec<&str> = std::iter::once("").chain(rates.iter().map(String::as_str)).collect();
    println!(
        "\nEach server has its own machines, and is {} percent busy in the busiest hour. Computed, not measured.",
        BUSY_MAX * 100.0
    );
    print_table(&titles, &rows);
}
