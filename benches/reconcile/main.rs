//! Measures a full reconcile, a reconcile of changed targets, and a reload after Redis lost its data. Also measures how
//! much these runs slow down the consumer. The daemon counts the likes.

mod child;
mod site;

use std::collections::BTreeMap;

use anyhow::{Context, Result};
use clap::Parser;
use common::machine::Machine;
use common::report::{Aim, Results, median, print_figures};
use serde::Serialize;
use tallyd_benches as common;

use child::Ran;
use site::Site;

const AIMS: [(&str, Aim); 5] = [
    ("full_ratio", Aim::AtMost(0.9)),
    ("rebuild_ratio", Aim::AtLeast(0.85)),
    ("rebuild_ratio_under_load", Aim::AtLeast(0.85)),
    ("consumer_loss_percent", Aim::AtMost(10.0)),
    ("full_beside_ratio", Aim::AtMost(3.0)),
];

/// The share of changed targets, in thousandths of all targets.
const CHANGED: [u64; 3] = [1, 10, 100];

/// Fill MySQL with like records, then run the real binary on them. There is one target for forty records, and the
/// popularity of the targets is Zipf 1.0.
#[derive(Clone, Copy, Debug, Parser)]
struct Arguments {
    /// Like records.
    #[arg(long, default_value_t = 20_000_000)]
    rows: u64,

    /// Rows of the second, smaller table. The run on the large table must not need more memory than the run on this
    /// table.
    #[arg(long, default_value_t = 5_000_000)]
    small_rows: u64,

    /// Number of runs of each kind. Each figure is the median of these runs.
    #[arg(long, default_value_t = 3)]
    rounds: usize,

    /// Number of events that the consumer drains, with and without reconciles at the same time. Only reconciles that end
    /// meanwhile count.
    #[arg(long, default_value_t = 1_500_000)]
    events: u64,

    /// Set by cargo.
    #[arg(long, hide = true)]
    bench: bool,
}

/// Details that the result file contains in addition to the figures.
#[derive(Default, Serialize)]
struct Seen {
    targets: u64,
    bare_s: Vec<f64>,
    full: Vec<Ran>,
    bare_hset_s: Vec<f64>,
    rebuild: Vec<Ran>,
    bare_hset_under_load_s: Vec<f64>,
    rebuild_under_load: Vec<Ran>,
    changed: BTreeMap<String, Vec<Ran>>,
    alone_events_per_second: Vec<f64>,
    beside_events_per_second: Vec<f64>,
    /// The full reconciles that ran only while the consumer had events.
    full_beside: Vec<Ran>,
    small: Vec<Ran>,
}

#[tokio::main]
async fn main() -> Result<()> {
    let arguments = Arguments::parse();
    let machine = Machine::look().await?;
    let mut seen = Seen::default();
    let small = Site::open("small", arguments.small_rows).await?;
    let ran = load_and_run(&small, &mut seen).await.context("the small table");
    small.close(ran).await?;
    let site = Site::open("large", arguments.rows).await?;
    seen.targets = site.targets;
    let result = measure(&site, arguments, &mut seen).await;
    site.close(result).await?;
    let figures = figures(&seen);
    print_figures(&figures, &AIMS);
    let arguments = std::env::args().skip(1).collect();
    Results { figures, machine, arguments, missing: BTreeMap::new(), results: seen }.write("reconcile")
}

/// Loads Redis from MySQL, then compares all targets.
async fn load_and_run(site: &Site, seen: &mut Seen) -> Result<()> {
    site.reconcile(&["--full"]).await?.expect_exact(site.targets)?;
    let ran = site.reconcile(&["--full"]).await?.expect_exact(site.targets)?;
    seen.small.push(ran);
    Ok(())
}

async fn measure(site: &Site, arguments: Arguments, seen: &mut Seen) -> Result<()> {
    for round in 1..=arguments.rounds {
        let bare_s = site.bare_hset().await?;
        site.lose().await?;
        let rebuilt = site.reconcile(&["--full"]).await?.expect_exact(site.targets)?;
        println!("round {round}: HSET {bare_s:.2} s, rebuild {:.2} s", rebuilt.rebuild_s);
        seen.bare_hset_s.push(bare_s);
        seen.rebuild.push(rebuilt);
    }
    for round in 1..=arguments.rounds {
        let bare_s = site.bare_recount().await?;
        let full = site.reconcile(&["--full"]).await?.expect_exact(site.targets)?;
        println!("round {round}: recount {bare_s:.2} s, full {:.2} s, {:.0} MiB", full.seconds, full.peak_rss_mib);
        seen.bare_s.push(bare_s);
        seen.full.push(full);
    }
    for part in CHANGED {
        for round in 1..=arguments.rounds {
            let changed = site.change(part).await?;
            let ran = site.reconcile(&["--changed"]).await?.expect_exact(changed)?;
            println!("round {round}: {changed} changed, {:.2} s, {} rows read", ran.seconds, ran.rows_read);
            seen.changed.entry(format!("{}_percent", part as f64 / 10.0)).or_default().push(ran);
        }
    }
    for round in 1..=arguments.rounds {
        let (alone, _) = site.drain(arguments.events, None).await?;
        let (beside, runs) = site.drain(arguments.events, Some("--full")).await?;
        if runs.is_empty() {
            println!("no reconcile ended before the consumer: use more --events");
        }
        let seconds: Vec<f64> = runs.iter().map(|ran| ran.seconds).collect();
        println!(
            "round {round}: consumer {alone:.0} events/s alone, {beside:.0} beside full reconciles of {seconds:.2?} s"
        );
        seen.alone_events_per_second.push(alone);
        seen.beside_events_per_second.push(beside);
        seen.full_beside.extend(runs);
    }
    for _ in 0..arguments.rounds {
        let (bare_s, rebuilt) = site.rebuild_under_load().await?;
        println!("under load: HSET {bare_s:.2} s, rebuild {:.2} s", rebuilt.rebuild_s);
        seen.bare_hset_under_load_s.push(bare_s);
        seen.rebuild_under_load.push(rebuilt);
    }
    Ok(())
}

fn figures(seen: &Seen) -> BTreeMap<String, f64> {
    let of = |runs: &[Ran], number: fn(&Ran) -> f64| median(runs.iter().map(number));
    let full_s = of(&seen.full, |ran| ran.seconds);
    let hset_s = median(seen.bare_hset_s.iter().copied());
    let alone = median(seen.alone_events_per_second.iter().copied());
    let beside = median(seen.beside_events_per_second.iter().copied());
    let mut figures = BTreeMap::from([
        ("full_s".to_owned(), full_s),
        ("full_ratio".to_owned(), full_s / median(seen.bare_s.iter().copied())),
        ("rebuild_ratio".to_owned(), hset_s / of(&seen.rebuild, |ran| ran.rebuild_s)),
        (
            "rebuild_ratio_under_load".to_owned(),
            median(seen.bare_hset_under_load_s.iter().copied()) / of(&seen.rebuild_under_load, |ran| ran.rebuild_s),
        ),
        ("rebuild_counters_per_second".to_owned(), seen.targets as f64 / of(&seen.rebuild, |ran| ran.rebuild_s)),
        ("consumer_loss_percent".to_owned(), (1.0 - beside / alone) * 100.0),
        ("full_cpu_s".to_owned(), of(&seen.full, |ran| ran.cpu_s)),
        ("peak_rss_mib".to_owned(), of(&seen.full, |ran| ran.peak_rss_mib)),
        ("peak_rss_mib_small".to_owned(), of(&seen.small, |ran| ran.peak_rss_mib)),
    ]);
    if !seen.full_beside.is_empty() {
        figures.insert("full_beside_ratio".to_owned(), of(&seen.full_beside, |ran| ran.seconds) / full_s);
    }
    for (part, runs) in &seen.changed {
        figures.insert(format!("changed_{part}_ratio"), of(runs, |ran| ran.seconds) / full_s);
        figures.insert(format!("changed_{part}_rows_read"), of(runs, |ran| ran.rows_read as f64));
    }
    figures
}
