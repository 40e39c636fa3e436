//! Measures how fast a full queue is written to MySQL: by tallyd, by other consumers, and at the servers' own limits.

mod chart;
mod contenders;
mod curve;
mod drain;
mod figures;
mod roles;
mod rounds;
mod traffic;

use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::{Parser, ValueEnum};
use tallyd_core::event::LikeEvent;

use common::workload::Workload;
use tallyd_benches as common;

/// Drain a preloaded queue with each contender in turn, and check every row and counter after each run.
#[derive(Clone, Debug, Parser)]
struct Arguments {
    /// Number of events that each run drains.
    #[arg(long, default_value_t = 500_000)]
    events: u64,

    /// Number of runs of each contender. Each figure is the median of these runs.
    #[arg(long, default_value_t = 3)]
    rounds: usize,

    /// Run only these comma-separated contenders, for example tallyd,floor,go-batch. The result then lacks the figures
    /// that need other contenders.
    #[arg(long, value_delimiter = ',')]
    only: Vec<String>,

    /// tallyd's batch_events_max [default: tallyd's default].
    #[arg(long, value_name = "EVENTS")]
    batch: Option<usize>,

    /// tallyd's prefetch [default: tallyd's default, but at least two batches].
    #[arg(long, value_name = "MESSAGES")]
    prefetch: Option<u16>,

    /// How long peers wait for a batch to fill [default: same as tallyd].
    #[arg(long, value_name = "MS")]
    peer_linger_ms: Option<u64>,

    /// Number of events in a peer's batch, and in a batch of floor-exact [default: same as tallyd].
    #[arg(long, value_name = "EVENTS")]
    peer_batch: Option<usize>,

    /// Number of messages that a peer has not acknowledged [default: same as tallyd].
    #[arg(long, value_name = "MESSAGES")]
    peer_prefetch: Option<u16>,

    /// Also run tallyd once with this many events, to measure its peak memory.
    #[arg(long, value_name = "EVENTS")]
    backlog: Option<u64>,

    /// Instead of all contenders, run only tallyd: with batches of 100 to 20,000 events, with a hot target, and on a
    /// large table.
    #[arg(long)]
    curve: bool,

    /// Number of rows in the table before the run that measures the last point of the curve.
    #[arg(long, default_value_t = 20_000_000, value_name = "ROWS")]
    preloaded_rows: u64,

    /// Give half of all events to one target.
    #[arg(long)]
    hot: bool,

    /// Name of the result file under target/bench.
    #[arg(long, default_value = "ingest", value_name = "NAME")]
    results: String,

    /// The task of this process, if a benchmark started it.
    #[arg(long, hide = true)]
    role: Option<Role>,

    /// The configuration of the benchmark that started this process.
    #[arg(long, hide = true)]
    config: Option<PathBuf>,

    /// Set by cargo.
    #[arg(long, hide = true)]
    bench: bool,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Role {
    Noop,
    Floor,
    FloorExact,
}

#[tokio::main]
async fn main() -> Result<()> {
    let arguments = Arguments::parse();
    match arguments.role {
        None if arguments.curve => curve::run(&arguments).await,
        None => rounds::run(&arguments).await,
        Some(role) => {
            let path = arguments.config.context("a role needs --config")?;
            let config = tallyd_base::config::load(&path)?;
            match role {
                Role::Noop => roles::noop(&config).await,
                Role::Floor | Role::FloorExact => {
                    let reads_first = matches!(role, Role::FloorExact);
                    roles::floor(&config, reads_first, events(arguments.events, arguments.hot)).await
                }
            }
        }
    }
}

/// Returns the events. The events are the same in all runs and processes.
fn events(count: u64, hot: bool) -> impl Iterator<Item = LikeEvent> {
    let workload = Workload::new(1);
    let workload = if hot { workload.with_hot_target() } else { workload };
    workload.take(usize::try_from(count).unwrap_or(usize::MAX))
}
