//! Publishes events at steady rates, and measures how long an event takes from the producer to its commit in MySQL.

mod measure;
mod publisher;

use std::collections::BTreeMap;

use anyhow::{Result, ensure};
use clap::Parser;
use serde::Serialize;

use common::contender::{Contender, Keeps, Runs};
use common::lineup::line_up;
use common::machine::Machine;
use common::peers::Runtime;
use common::report::{Aim, Results, median, number, print_figures, print_table};
use common::world::{Peers, Setup};
use measure::{Load, Measured, Quantiles, measure};
use publisher::Publishes;
use tallyd_benches as common;
use tallyd_core::rules::Writes;

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

const AIMS: [(&str, Aim); 5] = [
    ("p99_ms_at_1000", Aim::AtMost(25.0)),
    ("exact_peer_cpu_ratio_at_1000", Aim::AtMost(1.0)),
    ("commits_per_s_at_1000", Aim::AtMost(100.0)),
    ("p99_ms_at_10000", Aim::AtMost(30.0)),
    ("exact_peer_p99_ratio_at_10000", Aim::AtMost(1.0)),
];

/// Publish at steady rates, and read the times of the commits in the contenders' logs.
#[derive(Debug, Parser)]
struct Arguments {
    /// Comma-separated rates, in events per second.
    #[arg(long, value_delimiter = ',', default_values_t = [100, 1_000, 4_000, 10_000])]
    rates: Vec<u64>,

    /// Number of seconds for which each rate is measured, after a warm-up of two seconds.
    #[arg(long, default_value_t = 20)]
    seconds: u64,

    /// Number of runs of each contender. Each figure is the median of these runs.
    #[arg(long, default_value_t = 3)]
    rounds: usize,

    /// Run only these comma-separated contenders, for example tallyd,go-batch.
    #[arg(long, value_delimiter = ',')]
    only: Vec<String>,

    /// Run tallyd with each of these comma-separated values of linger_ms [default: tallyd's].
    #[arg(long, value_name = "MS", value_delimiter = ',')]
    linger_ms: Vec<u64>,

    /// How long peers wait for a batch to fill, from its first event [default: tallyd's default linger_ms].
    #[arg(long, value_name = "MS")]
    peer_linger_ms: Option<u64>,

    /// Publish through one client, which sends lists. This needs --only tallyd, because peers can't read lists.
    #[arg(long)]
    client: bool,

    /// Set by cargo.
    #[arg(long, hide = true)]
    bench: bool,
}

/// A contender with its settings.
struct Entrant {
    name: String,
    contender: Contender,
    setup: Setup,
}

impl Arguments {
    /// Returns the contender once, or once for each value of linger_ms.
    fn entrants(&self, contender: Contender) -> Vec<Entrant> {
        let peers = Peers { linger_ms: self.peer_linger_ms, ..Peers::default() };
        let setup = Setup { likes_by: contender.likes_by, peers, ..Setup::default() };
        if !matches!(contender.runs, Runs::Tallyd) || self.linger_ms.is_empty() {
            return vec![Entrant { name: contender.name.to_owned(), contender, setup }];
        }
        let with = |linger_ms: &u64| Entrant {
            name: format!("{} with {linger_ms} ms", contender.name),
            contender,
            setup: Setup { linger_ms: *linger_ms, ..setup },
        };
        self.linger_ms.iter().map(with).collect()
    }
}

/// The runs of each contender at each rate.
type Standings = BTreeMap<(u64, String), Standing>;

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
    let read_lists = lineup.contenders.iter().all(|it| matches!(it.runs, Runs::Tallyd) && it.likes_by != Writes::Api);
    ensure!(!arguments.client || read_lists, "--client needs --only {TALLYD}: peers can't read lists");
    let entrants: Vec<Entrant> = lineup.contenders.iter().flat_map(|it| arguments.entrants(*it)).collect();
    let mut runs: BTreeMap<(u64, String), Vec<Measured>> = BTreeMap::new();
    for round in 0..arguments.rounds {
        for rate in &arguments.rates {
            for Entrant { name, contender, setup } in &entrants {
                let by = if arguments.client { Publishes::Client } else { Publishes::Messages };
                let load = Load { rate: *rate, seconds: arguments.seconds, by };
                let Some(measured) = measure(contender, *setup, load).await? else {
                    println!("round {}: {name} at {rate}/s: too slow for this rate", round + 1);
                    continue;
                };
                println!("round {}: {name} at {rate}/s: p99 {} ms", round + 1, number(measured.latency_ms.p99));
                runs.entry((*rate, name.clone())).or_default().push(measured);
            }
        }
    }
    let standings: Standings =
        runs.into_iter().map(|(place, runs)| (place, Standing { median: medians(&runs), runs })).collect();
    print_standings(&standings);
    lineup.print_missing();
    let figures = figures(&standings);
    print_figures(&figures, &AIMS);
    let results: BTreeMap<String, Standing> =
        standings.into_iter().map(|((rate, name), standing)| (format!("{name} at {rate}"), standing)).collect();
    let arguments = std::env::args().skip(1).collect();
    Results { figures, machine, arguments, missing: lineup.missing, results }.write("latency")
}

fn figures(standings: &Standings) -> BTreeMap<String, f64> {
    let mut figures = BTreeMap::new();
    for ((rate, name), Standing { median: run, .. }) in standings {
        let Some(suffix) = name.strip_prefix(TALLYD) else { continue };
        let suffix = suffix.replace(['-', ' '], "_");
        let Quantiles { p50, p99, max } = run.latency_ms;
        let commits_per_s = *rate as f64 / run.events_per_batch;
        let own = [("p50_ms", p50), ("p99_ms", p99), ("max_ms", max), ("commits_per_s", commits_per_s)];
        let peer = standings.get(&(*rate, EXACT_PEER.to_owned())).map(|Standing { median: peer, .. }| {
            [
                ("exact_peer_p99_ratio", p99 / peer.latency_ms.p99),
                ("exact_peer_cpu_ratio", run.cpu_us() / peer.cpu_us()),
            ]
        });
        for (name, value) in own.into_iter().chain([("cpu_us", run.cpu_us())]).chain(peer.into_iter().flatten()) {
            figures.insert(format!("{name}_at_{rate}{suffix}"), value);
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

fn print_standings(standings: &Standings) {
    let rows: Vec<Vec<String>> = standings
        .iter()
        .map(|((rate, name), Standing { median: run, .. })| {
            let latency = [run.latency_ms.p50, run.latency_ms.p99, run.latency_ms.max];
            let cost = [run.events_per_batch, run.consumer_us, run.mysql_us, run.rabbitmq_us, run.redis_us];
            let rest = [run.cpu_us(), run.others_cores];
            let cells = latency.into_iter().chain([run.late_ms.p99]).chain(cost).chain(rest).map(number);
            [rate.to_string(), name.clone()].into_iter().chain(cells).collect()
        })
        .collect();
    println!(
        "\nPublish to commit in ms, medians over the rounds. Microseconds are CPU time per event. RabbitMQ's include the \
         publisher's part."
    );
    let titles = [
        "events/s",
        "contender",
        "p50",
        "p99",
        "max",
        "late p99",
        "events/batch",
        "consumer us",
        "MySQL us",
        "RabbitMQ us",
        "Redis us",
        "all us",
        "others",
    ];
    print_table(&titles, &rows);
}
