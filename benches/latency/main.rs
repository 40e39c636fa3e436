//! Publishes events at steady rates, and measures how long an event takes from the producer to its commit in MySQL.

mod measure;
mod publisher;

use std::collections::BTreeMap;

use anyhow::Result;
use clap::Parser;
use serde::Serialize;

use common::contender::{Contender, Keeps};
use common::lineup::line_up;
use common::machine::Machine;
use common::peers::Runtime;
use common::report::{Aim, Results, median, number, print_figures, print_table};
use measure::{Measured, Quantiles, measure};
use tallyd_benches as common;
use tallyd_core::rules::Writes;

/// Events per second.
const RATES: [u64; 2] = [1_000, 10_000];

const TALLYD: &str = "tallyd";
/// tallyd on a site whose API servers count likes in Redis.
const TALLYD_API: &str = "tallyd-api";

/// The peer with the same guarantee as tallyd: counters that are exact.
const EXACT_PEER: &str = "go-exact";

const CONTENDERS: [Contender; 6] = [
    Contender::tallyd(TALLYD, 1),
    Contender { likes_by: Writes::Api, ..Contender::tallyd(TALLYD_API, 1) },
    Contender::peer("node-row", Runtime::Node, "row", Keeps::Rows),
    Contender::peer("node-batch", Runtime::Node, "batch", Keeps::Rows),
    Contender::peer("go-batch", Runtime::Go, "batch", Keeps::Rows),
    Contender::peer(EXACT_PEER, Runtime::Go, "exact", Keeps::RowsAndCounters),
];

const AIMS: [(&str, Aim); 3] = [
    ("p99_ms_at_1000", Aim::AtMost(8.0)),
    ("p99_ms_at_10000", Aim::AtMost(30.0)),
    ("exact_peer_p99_ratio_at_10000", Aim::AtMost(1.0)),
];

/// Publish at 1,000 and 10,000 events per second, and read the times of the commits in the contenders' logs.
#[derive(Debug, Parser)]
struct Arguments {
    /// Number of seconds for which each rate is measured, after a warm-up of two seconds.
    #[arg(long, default_value_t = 20)]
    seconds: u64,

    /// Number of runs of each contender. Each figure is the median of these runs.
    #[arg(long, default_value_t = 3)]
    rounds: usize,

    /// Run only these comma-separated contenders, for example tallyd,go-batch.
    #[arg(long, value_delimiter = ',')]
    only: Vec<String>,

    /// Set by cargo.
    #[arg(long, hide = true)]
    bench: bool,
}

/// A contender's runs at one rate.
#[derive(Serialize)]
struct Standing {
    median: Measured,
    runs: Vec<Measured>,
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<()> {
    let arguments = Arguments::parse();
    let machine = Machine::look().await?;
    let lineup = line_up(&CONTENDERS, &arguments.only).await?;
    let mut runs: BTreeMap<String, Vec<Measured>> = BTreeMap::new();
    for round in 0..arguments.rounds {
        for rate in RATES {
            for contender in &lineup.contenders {
                let name = format!("{} at {rate}", contender.name);
                let Some(measured) = measure(contender, rate, arguments.seconds).await? else {
                    println!("round {}: {name}/s: too slow for this rate", round + 1);
                    continue;
                };
                println!("round {}: {name}/s: p99 {} ms", round + 1, number(measured.latency_ms.p99));
                runs.entry(name).or_default().push(measured);
            }
        }
    }
    let standings: BTreeMap<String, Standing> =
        runs.into_iter().map(|(name, runs)| (name, Standing { median: medians(&runs), runs })).collect();
    print_standings(&standings);
    lineup.print_missing();
    let figures = figures(&standings);
    print_figures(&figures, &AIMS);
    let arguments = std::env::args().skip(1).collect();
    Results { figures, machine, arguments, missing: lineup.missing, results: standings }.write("latency")
}

fn figures(standings: &BTreeMap<String, Standing>) -> BTreeMap<String, f64> {
    let mut figures = BTreeMap::new();
    let modes = [(TALLYD, ""), (TALLYD_API, "_api")];
    for (rate, (mode, suffix)) in RATES.into_iter().flat_map(|rate| modes.map(|mode| (rate, mode))) {
        let Some(standing) = standings.get(&format!("{mode} at {rate}")) else { continue };
        let Quantiles { p50, p99, max } = standing.median.latency_ms;
        for (name, value) in [("p50", p50), ("p99", p99), ("max", max)] {
            figures.insert(format!("{name}_ms_at_{rate}{suffix}"), value);
        }
        if let Some(peer) = standings.get(&format!("{EXACT_PEER} at {rate}")) {
            figures.insert(format!("exact_peer_p99_ratio_at_{rate}{suffix}"), p99 / peer.median.latency_ms.p99);
        }
    }
    figures
}

fn medians(runs: &[Measured]) -> Measured {
    let of = |number: fn(&Measured) -> f64| median(runs.iter().map(number));
    let quantiles = |of_run: fn(&Measured) -> Quantiles| Quantiles {
        p50: median(runs.iter().map(|run| of_run(run).p50)),
        p99: median(runs.iter().map(|run| of_run(run).p99)),
        max: median(runs.iter().map(|run| of_run(run).max)),
    };
    Measured {
        latency_ms: quantiles(|run| run.latency_ms),
        late_ms: quantiles(|run| run.late_ms),
        events_per_batch: of(|run| run.events_per_batch),
        consumer_us: of(|run| run.consumer_us),
        mysql_us: of(|run| run.mysql_us),
        rabbitmq_us: of(|run| run.rabbitmq_us),
        redis_us: of(|run| run.redis_us),
        others_cores: of(|run| run.others_cores),
    }
}

fn print_standings(standings: &BTreeMap<String, Standing>) {
    let rows: Vec<Vec<String>> = standings
        .iter()
        .map(|(name, Standing { median: run, .. })| {
            let latency = [run.latency_ms.p50, run.latency_ms.p99, run.latency_ms.max];
            let cost = [run.events_per_batch, run.consumer_us, run.mysql_us, run.rabbitmq_us];
            let rest = [run.redis_us, run.others_cores];
            let cells = latency.into_iter().chain([run.late_ms.p99]).chain(cost).chain(rest).map(number);
            std::iter::once(name.clone()).chain(cells).collect()
        })
        .collect();
    println!(
        "\nPublish to commit in ms, medians over the rounds. Microseconds are CPU time per event. RabbitMQ's include the \
         publisher's part."
    );
    let titles = [
        "contender and events/s",
        "p50",
        "p99",
        "max",
        "late p99",
        "events/batch",
        "consumer us",
        "MySQL us",
        "RabbitMQ us",
        "Redis us",
        "others",
    ];
    print_table(&titles, &rows);
}
