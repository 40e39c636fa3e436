//! Measures how fast count events are written, compared with likes and with single statements. Also measures the cost
//! of the ledger (the table of applied events) and of a hot target.

mod drain;
mod writes;

use std::collections::BTreeMap;

use anyhow::Result;
use clap::Parser;
use serde::Serialize;

use common::machine::Machine;
use common::report::{Aim, Results, median, number, print_figures, print_table};
use drain::Queue;
use tallyd_benches as common;
use writes::Write;

/// Drain queues of likes and queues of count events. Then write count events to MySQL in several ways, without a
/// broker. The counters of every run are compared with a model.
#[derive(Clone, Debug, Parser)]
struct Arguments {
    /// Number of events in each queue.
    #[arg(long, default_value_t = 300_000)]
    events: u64,

    /// Number of events that are written one by one.
    #[arg(long, default_value_t = 20_000)]
    single_events: u64,

    /// Number of rounds. Each figure is the median of all rounds.
    #[arg(long, default_value_t = 3)]
    rounds: usize,

    /// Set by cargo.
    #[arg(long, hide = true)]
    bench: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Case {
    Queue(Queue),
    Write(Write),
}

#[derive(Clone, Copy, Debug, Serialize)]
struct Ran {
    events_per_second: f64,
    events_per_batch: f64,
    /// The bytes that the ledger needs for each event, if the case writes a ledger.
    ledger_bytes: Option<f64>,
}

#[derive(Debug, Serialize)]
struct Standing {
    median: Ran,
    runs: Vec<Ran>,
}

/// Each figure about count events has a minimum or a maximum.
const AIMS: [(&str, Aim); 4] = [
    ("like_ratio", Aim::AtLeast(1.0)),
    ("row_by_row_ratio", Aim::AtLeast(10.0)),
    ("ledger_cost_percent", Aim::AtMost(35.0)),
    ("outbox_ratio", Aim::AtLeast(0.92)),
];

#[tokio::main]
async fn main() -> Result<()> {
    let arguments = Arguments::parse();
    let machine = Machine::look().await?;
    let cases: Vec<Case> =
        Queue::ALL.into_iter().map(Case::Queue).chain(Write::ALL.into_iter().map(Case::Write)).collect();
    let mut runs: BTreeMap<Case, Vec<Ran>> = BTreeMap::new();
    for round in 0..arguments.rounds {
        for case in &cases {
            let ran = match case {
                Case::Queue(queue) => queue.run(arguments.events).await?,
                Case::Write(write) => write.run(&arguments).await?,
            };
            println!("round {}: {} {} events/s", round + 1, case.name(), number(ran.events_per_second));
            runs.entry(*case).or_default().push(ran);
        }
    }
    let standings: BTreeMap<Case, Standing> =
        runs.into_iter().map(|(case, runs)| (case, Standing { median: medians(&runs), runs })).collect();
    let row = |(case, Standing { median, .. }): (&Case, &Standing)| {
        let bytes = median.ledger_bytes.map_or_else(|| "-".to_owned(), number);
        vec![case.name().to_owned(), number(median.events_per_second), number(median.events_per_batch), bytes]
    };
    println!("\nMedians.");
    print_table(&["case", "events/s", "events/batch", "ledger bytes"], &standings.iter().map(row).collect::<Vec<_>>());
    let figures = figures(&standings);
    print_figures(&figures, &AIMS);
    let arguments = std::env::args().skip(1).collect();
    let results: BTreeMap<&str, Standing> = standings.into_iter().map(|(case, it)| (case.name(), it)).collect();
    Results { figures, machine, arguments, missing: BTreeMap::new(), results }.write("counters")
}

impl Case {
    fn name(self) -> &'static str {
        match self {
            Self::Queue(queue) => queue.name(),
            Self::Write(write) => write.name(),
        }
    }
}

fn medians(runs: &[Ran]) -> Ran {
    let bytes: Vec<f64> = runs.iter().filter_map(|run| run.ledger_bytes).collect();
    Ran {
        events_per_second: median(runs.iter().map(|run| run.events_per_second)),
        events_per_batch: median(runs.iter().map(|run| run.events_per_batch)),
        ledger_bytes: (!bytes.is_empty()).then(|| median(bytes)),
    }
}

fn figures(standings: &BTreeMap<Case, Standing>) -> BTreeMap<String, f64> {
    let rate = |case: Case| standings.get(&case).map_or(f64::NAN, |standing| standing.median.events_per_second);
    let (queue, write) = (|queue| rate(Case::Queue(queue)), |it| rate(Case::Write(it)));
    let bytes = standings.get(&Case::Write(Write::WithLedger)).and_then(|standing| standing.median.ledger_bytes);
    // The ledger's share of the time that MySQL needs for a count event.
    let cost = 100.0 * (1.0 - write(Write::WithLedger) / write(Write::WithoutLedger));
    [
        ("like_ratio", queue(Queue::Counts) / queue(Queue::Likes)),
        ("hot_ratio", queue(Queue::HotCounts) / queue(Queue::Likes)),
        ("outbox_ratio", queue(Queue::CountsByDaemon) / queue(Queue::Counts)),
        ("row_by_row_ratio", queue(Queue::Counts) / write(Write::RowByRow)),
        ("ledger_cost_percent", cost),
        ("ledger_bytes_per_event", bytes.unwrap_or(f64::NAN)),
        ("hot_4_slots_ratio", write(Write::Hot4) / write(Write::Hot1)),
        ("hot_8_slots_ratio", write(Write::Hot8) / write(Write::Hot1)),
    ]
    .into_iter()
    .map(|(name, value)| (name.to_owned(), value))
    .collect()
}
