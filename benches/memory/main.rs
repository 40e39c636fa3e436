//! Measures Redis's memory for a counter, and its CPU time for a page of counters, by the layout of the keys.

mod counts;
mod layout;
mod server;

use std::collections::BTreeMap;

use anyhow::Result;
use clap::Parser;
use common::machine::Machine;
use common::report::{Aim, Results, median, number, print_figures, print_table};
use counts::{Counts, Ids};
use layout::{Layout, METRICS};
use serde::Serialize;
use server::Server;
use tallyd_benches as common;

const AIMS: [(&str, Aim); 3] =
    [("dense_ratio", Aim::AtLeast(16.0)), ("sparse_ratio", Aim::AtLeast(14.0)), ("page_20_ratio", Aim::AtMost(0.5))];

/// The articles' layout has 512 hashes. With 512 * 512 targets, each hash has 512 entries, and Redis still stores each
/// hash in the compact format. With 512 * 513 targets, each hash has 513 entries.
const CLIFF: [u64; 2] = [512 * 512, 512 * 513];

/// Load counters into a separate Redis, in each layout in turn, and measure the memory that they need.
#[derive(Clone, Debug, Parser)]
struct Arguments {
    /// Comma-separated numbers of targets. Each target has four counters. If a figure's name contains no number, the
    /// figure is for the first number in this list.
    #[arg(long, value_delimiter = ',', default_values_t = [1_000_000, 5_000_000])]
    targets: Vec<u64>,

    /// Number of pages of 20 targets that a measurement of CPU time reads.
    #[arg(long, default_value_t = 2_000)]
    pages: u64,

    /// Number of rounds that read pages. Each figure is the median of all rounds. The memory is the same in every
    /// round.
    #[arg(long, default_value_t = 9)]
    rounds: usize,

    /// Set by cargo.
    #[arg(long, hide = true)]
    bench: bool,
}

/// One layout, filled.
#[derive(Clone, Debug, Serialize)]
struct Filled {
    layout: Layout,
    ids: Ids,
    targets: u64,
    /// The growth of used_memory for each counter.
    bytes: f64,
    /// CPU time of the server for a page of 20 targets, in microseconds: the median, and all rounds.
    page_us: f64,
    page_us_rounds: Vec<f64>,
    /// The CPU time with MGET, if the layout has one key for each counter.
    mget_page_us: Option<f64>,
}

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    let machine = tokio::runtime::Runtime::new()?.block_on(Machine::look())?;
    let mut filled = Vec::new();
    for targets in &arguments.targets {
        for ids in [Ids::Dense, Ids::Snowflake] {
            let counts = Counts::new(ids, *targets);
            for layout in Layout::ALL {
                filled.push(fill(layout, &counts, &arguments)?);
            }
        }
    }
    let mut cliff = Vec::new();
    for targets in CLIFF {
        cliff.push(fill(Layout::Articles, &Counts::new(Ids::Dense, targets), &arguments)?);
    }
    print(&filled);
    print(&cliff);
    let figures = figures(&filled, &cliff, &arguments.targets);
    print_figures(&figures, &AIMS);
    let arguments = std::env::args().skip(1).collect();
    Results { figures, machine, arguments, missing: BTreeMap::new(), results: [filled, cliff] }.write("memory")
}

/// Fills a new server, measures its memory, and reads pages.
fn fill(layout: Layout, counts: &Counts, arguments: &Arguments) -> Result<Filled> {
    let mut server = Server::start()?;
    let before = server.used_memory()?;
    layout.load(counts, &mut server)?;
    let after = server.settled_memory()?;
    layout.check(counts, &mut server)?;
    let (mut page_us_rounds, mut mget) = (Vec::new(), Vec::new());
    for round in 0..arguments.rounds as u64 {
        let pipelines = layout.pages(counts, round, arguments.pages);
        page_us_rounds.push(server.cpu_us_of(&pipelines)? / arguments.pages as f64);
        let pipelines = layout.mget_pages(counts, round, arguments.pages);
        if !pipelines.is_empty() {
            mget.push(server.cpu_us_of(&pipelines)? / arguments.pages as f64);
        }
    }
    let filled = Filled {
        layout,
        ids: counts.ids,
        targets: counts.targets(),
        bytes: (after - before) / (counts.targets() * METRICS as u64) as f64,
        page_us: median(page_us_rounds.iter().copied()),
        page_us_rounds,
        mget_page_us: (!mget.is_empty()).then(|| median(mget)),
    };
    println!(
        "{:>9} targets, {:<9}  {:<9}  {:>6} bytes a counter, {:>5} us a page",
        filled.targets,
        filled.ids.name(),
        layout.name(),
        number(filled.bytes),
        number(filled.page_us)
    );
    Ok(filled)
}

fn find(filled: &[Filled], layout: Layout, ids: Ids, targets: u64) -> Option<&Filled> {
    filled.iter().find(|other| (other.layout, other.ids, other.targets) == (layout, ids, targets))
}

/// Returns the memory of `Layout::String` divided by the memory of the layout in `this`.
fn ratio(filled: &[Filled], this: &Filled) -> Option<f64> {
    Some(find(filled, Layout::String, this.ids, this.targets)?.bytes / this.bytes)
}

fn print(filled: &[Filled]) {
    let row = |this: &Filled| {
        vec![
            format!("{} {}", this.targets, this.ids.name()),
            this.layout.name().to_owned(),
            number(this.bytes),
            ratio(filled, this).map(number).unwrap_or_default(),
            number(this.page_us),
            this.mget_page_us.map(number).unwrap_or_default(),
        ]
    };
    println!();
    print_table(
        &["targets", "layout", "bytes", "ratio", "page us", "by MGET"],
        &filled.iter().map(row).collect::<Vec<_>>(),
    );
}

fn figures(filled: &[Filled], cliff: &[Filled], sizes: &[u64]) -> BTreeMap<String, f64> {
    let mut figures = BTreeMap::new();
    for (place, targets) in sizes.iter().enumerate() {
        // If a figure is for the first number of targets, its name contains no number.
        let size = if place == 0 { String::new() } else { format!("_{targets}") };
        for (ids, name) in [(Ids::Dense, "dense"), (Ids::Snowflake, "sparse")] {
            for layout in Layout::ALL {
                let Some(this) = find(filled, layout, ids, *targets) else { continue };
                figures.insert(format!("{}_{name}_bytes{size}", layout.name()), this.bytes);
                figures.insert(format!("{}_{name}_page_us{size}", layout.name()), this.page_us);
            }
            let of = |layout| find(filled, layout, ids, *targets);
            let (Some(string), Some(packed)) = (of(Layout::String), of(Layout::Packed)) else { continue };
            figures.insert(format!("{name}_ratio{size}"), string.bytes / packed.bytes);
            let page = if ids == Ids::Dense { "page_20_ratio" } else { "page_20_sparse_ratio" };
            figures.insert(format!("{page}{size}"), packed.page_us / string.page_us);
        }
    }
    for this in cliff {
        figures.insert(format!("articles_bytes_at_{}", this.targets), this.bytes);
    }
    figures
}
