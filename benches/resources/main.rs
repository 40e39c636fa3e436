//! Measures a daemon's memory under heavy load: a backlog, an unreachable MySQL, a large table.

mod away;
#[path = "../reconcile/child.rs"]
mod child;
#[expect(dead_code, reason = "the benchmark that owns this module uses all of it")]
#[path = "../reconcile/site.rs"]
mod site;

use std::collections::BTreeMap;

use anyhow::{Context, Result, ensure};
use clap::{Parser, ValueEnum};
use common::contender::Contender;
use common::cpu::peak_rss_mib;
use common::machine::Machine;
use common::model::Model;
use common::preload;
use common::report::{Aim, Results, print_figures};
use common::workload::{USERS, Workload};
use common::world::{Setup, World};
use serde::Serialize;
use site::Site;
use tallyd_benches as common;

/// The value of `memory_max` that docs/operations/install.md gives for one partition.
const MEMORY_MAX_MIB: f64 = 256.0;

const AIMS: [(&str, Aim); 3] = [
    ("backlog_peak_rss_mib", Aim::AtMost(MEMORY_MAX_MIB)),
    ("away_peak_rss_mib", Aim::AtMost(MEMORY_MAX_MIB)),
    ("reconcile_peak_rss_mib", Aim::AtMost(MEMORY_MAX_MIB)),
];

/// The number of rows in the small table with which the large table is compared. Memory must not grow with the number
/// of rows.
const SMALL_ROWS: u64 = 1_000_000;

/// Run the real binary under heavy load, and measure its peak memory.
#[derive(Clone, Debug, Parser)]
struct Arguments {
    /// Parts to measure.
    #[arg(long, value_delimiter = ',', default_values = ["backlog", "away", "reconcile"])]
    parts: Vec<Part>,

    /// Number of messages in the queue when the daemon starts.
    #[arg(long, default_value_t = 1_000_000)]
    backlog: usize,

    /// Minutes without MySQL.
    #[arg(long, default_value_t = 10)]
    away_minutes: u64,

    /// Number of messages that arrive each second while MySQL is unreachable.
    #[arg(long, default_value_t = 2_000)]
    rate: u64,

    /// Number of like records that a reconcile recounts.
    #[arg(long, default_value_t = 100_000_000)]
    rows: u64,

    /// Set by cargo.
    #[arg(long, hide = true)]
    bench: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Part {
    Backlog,
    Away,
    Reconcile,
}

/// Details that the result file contains in addition to the figures.
#[derive(Default, Serialize)]
struct Seen {
    away: Option<away::Seen>,
    reconcile: Vec<child::Ran>,
}

#[tokio::main]
async fn main() -> Result<()> {
    let arguments = Arguments::parse();
    let machine = Machine::look().await?;
    let (mut figures, mut seen) = (BTreeMap::new(), Seen::default());
    for part in &arguments.parts {
        match part {
            Part::Backlog => {
                let peak = backlog(arguments.backlog).await.context("the backlog")?;
                figures.insert("backlog_peak_rss_mib".to_owned(), peak);
            }
            Part::Away => {
                let away =
                    away::measure(arguments.away_minutes, arguments.rate).await.context("MySQL is unreachable")?;
                figures.insert("away_peak_rss_mib".to_owned(), away.peak_rss_mib);
                figures.insert("away_rss_mib_before".to_owned(), away.before_rss_mib);
                figures.insert("away_caught_up_s".to_owned(), away.caught_up_s);
                seen.away = Some(away);
            }
            Part::Reconcile => {
                for (figure, rows) in
                    [("reconcile_peak_rss_mib_small", SMALL_ROWS), ("reconcile_peak_rss_mib", arguments.rows)]
                {
                    let ran = reconcile(rows).await.context("the reconcile")?;
                    figures.insert(figure.to_owned(), ran.peak_rss_mib);
                    seen.reconcile.push(ran);
                }
            }
        }
    }
    print_figures(&figures, &AIMS);
    let arguments = std::env::args().skip(1).collect();
    Results { figures, machine, arguments, missing: BTreeMap::new(), results: seen }.write("resources")
}

/// Returns the peak memory of a daemon that starts with this number of messages in its queue.
async fn backlog(messages: usize) -> Result<f64> {
    let world = World::new("resources-backlog", Setup::default()).await?;
    let peak = async {
        let events = || Workload::new(1).take(messages);
        preload::preload(&world, events()).await?;
        let tallyd = Contender::tallyd("tallyd", 1);
        let mut running = tallyd.start(&world, &[])?;
        running.consuming(1).await?;
        running.committed(messages as u64).await?;
        let peak = peak_rss_mib(running.pid()?)?;
        tallyd.end(running, &world, &Model::of(events()), USERS).await?;
        Ok::<f64, anyhow::Error>(peak)
    }
    .await;
    let peak = world.close(peak).await?;
    println!("{messages} messages: {peak:.0} MiB");
    Ok(peak)
}

/// Fails unless MySQL has every row of the published events and the queues are empty.
async fn exact(world: &World, events: impl Iterator<Item = tallyd_core::event::LikeEvent>) -> Result<()> {
    world.assert_drained().await?;
    let model = Model::of(events);
    model.assert_rows(&world.pool, USERS).await?;
    model.assert_counters(&world.pool).await
}

/// Measures a full reconcile of `rows` rows, after Redis was loaded.
async fn reconcile(rows: u64) -> Result<child::Ran> {
    let site = Site::open("resources", rows).await?;
    let ran = async {
        let loaded = site.reconcile(&["--full"]).await?;
        let ran = site.reconcile(&["--full"]).await?;
        ensure!((ran.checked, ran.exact) == (site.targets, site.targets), "{} of {} exact", ran.exact, ran.checked);
        let peak_rss_mib = ran.peak_rss_mib.max(loaded.peak_rss_mib);
        Ok(child::Ran { peak_rss_mib, ..ran })
    }
    .await;
    let ran = site.close(ran).await?;
    println!("{rows} rows: {:.0} MiB, {:.0} s", ran.peak_rss_mib, ran.seconds);
    Ok(ran)
}
