//! Measures three jobs on 100 million counters: a full reconcile, a reconcile of changed counters, and a reload. Also
//! measures these jobs with 2^23 nearly empty buckets.

#[path = "../reconcile/child.rs"]
mod child;
mod site;
mod slow;

use std::collections::BTreeMap;

use anyhow::{Context, Result, ensure};
use child::Ran;
use clap::Parser;
use common::machine::Machine;
use common::report::{Aim, Results, print_figures};
use serde::Serialize;
use site::Site;
use slow::Statement;
use tallyd_benches as common;

/// The default site: the number of rows in the table `counter`, and a number of buckets that suits these rows.
const ROWS: u64 = 100_000_000;
const BUCKET_BITS: u32 = 20;

/// The second site: the number of additional bits for its buckets, and its number of rows.
const WIDE_BITS: u32 = 3;
const WIDE_ROWS: u64 = 10_000;

/// The value of `memory_max` that docs/operations/install.md gives for one partition.
const MEMORY_MAX_MIB: f64 = 256.0;

/// The value of `[mysql] transaction_timeout_ms`. A longer statement is aborted, and its run fails.
const STATEMENT_MAX_MS: f64 = 30_000.0;

const AIMS: [(&str, Aim); 4] = [
    ("peak_rss_mib", Aim::AtMost(MEMORY_MAX_MIB)),
    ("wide_peak_rss_mib", Aim::AtMost(MEMORY_MAX_MIB)),
    ("longest_statement_ms", Aim::AtMost(STATEMENT_MAX_MS / 10.0)),
    ("changed_rows_read_per_target", Aim::AtMost(4.0)),
];

/// Fill MySQL in bulk, then run the real binary on this data. There are two kinds and three metrics. One kind has no
/// rows of one metric. Needs 20 GB of disk space and about 90 minutes.
#[derive(Clone, Copy, Debug, Parser)]
struct Arguments {
    /// Number of rows in the table `counter`. The number of like records is a fifth of this number. The number of
    /// buckets suits the number of rows.
    #[arg(long, default_value_t = ROWS, value_parser = clap::value_parser!(u64).range(100_000..=1_000_000_000))]
    rows: u64,

    /// Number of likes that arrive each second while Redis is reloaded.
    #[arg(long, default_value_t = 2_000, value_parser = clap::value_parser!(u32).range(50..=50_000))]
    rate: u32,

    /// Set by cargo.
    #[arg(long, hide = true)]
    bench: bool,
}

impl Arguments {
    /// Returns the `bucket_bits` for this number of rows. If a run has fewer rows, it has fewer buckets, so each bucket
    /// has as many targets as in the default run.
    fn bucket_bits(self) -> u32 {
        BUCKET_BITS.saturating_sub((ROWS / self.rows).checked_ilog2().unwrap_or(0))
    }

    /// Estimates time and disk from a measurement with a million rows.
    fn announce(self) {
        let part = self.rows as f64 / ROWS as f64;
        println!(
            "{} rows in 2^{} buckets, then {WIDE_ROWS} rows in 2^{}: about {:.0} minutes, and {:.1} GB of disk for MySQL",
            self.rows,
            self.bucket_bits(),
            self.bucket_bits() + WIDE_BITS,
            (80.0 * part).max(3.0),
            (20.0 * part).max(1.0),
        );
    }
}

/// Details that the result file contains in addition to the figures.
#[derive(Serialize)]
struct Seen {
    rows: u64,
    /// The full run. The previous run loaded Redis, but could compare only the data that was in Redis at that time.
    full: Ran,
    changed: Ran,
    reloaded: Ran,
    daemon_peak_rss_mib: f64,
    wide_full: Ran,
    wide_reloaded: Ran,
    longest: Vec<Statement>,
}

#[tokio::main]
async fn main() -> Result<()> {
    let arguments = Arguments::parse();
    arguments.announce();
    let machine = Machine::look().await?;
    let site = Site::open("large", arguments.rows, arguments.bucket_bits()).await?;
    let log = slow::Log::start(&site).await?;
    let measured = large(&site, arguments.rate).await.context("the large table");
    let longest = log.end().await;
    let (full, changed, reloaded, daemon_peak_rss_mib) = site.close(measured).await?;
    let longest = longest?;
    let site = Site::open("wide", WIDE_ROWS, arguments.bucket_bits() + WIDE_BITS).await?;
    let measured = wide(&site).await.context("many buckets");
    let (wide_full, wide_reloaded) = site.close(measured).await?;
    let seen =
        Seen { rows: arguments.rows, full, changed, reloaded, daemon_peak_rss_mib, wide_full, wide_reloaded, longest };
    let figures = figures(&seen);
    print_figures(&figures, &AIMS);
    let arguments = std::env::args().skip(1).collect();
    Results { figures, machine, arguments, missing: BTreeMap::new(), results: seen }.write("large")
}

/// Measures a full reconcile, a reconcile of changed counters, a reload, and the daemon's peak memory during the
/// reload.
async fn large(site: &Site, rate: u32) -> Result<(Ran, Ran, Ran, f64)> {
    let full = tell("full", exact(site.reconcile(&["--full"]).await?)?);
    let rows = site.change().await?;
    let changed = tell("changed", exact(site.reconcile(&["--changed"]).await?)?);
    ensure!(changed.checked == rows, "{rows} rows have changed, but {} were compared", changed.checked);
    let (reloaded, daemon_peak_rss_mib) = site.reload_under_load(rate).await?;
    tell("reload", reloaded.clone());
    // If the broker delivered a click twice around the time of the loss, Redis counts that click twice until the next
    // reconcile.
    site.reconcile(&["--changed", "--force", "--yes"]).await?;
    exact(site.reconcile(&["--changed", "--force", "--yes"]).await?)?;
    Ok((full, changed, reloaded, daemon_peak_rss_mib))
}

async fn wide(site: &Site) -> Result<(Ran, Ran)> {
    let full = tell("full, many buckets", exact(site.reconcile(&["--full"]).await?)?);
    site.flush().await?;
    Ok((full, tell("reload, many buckets", exact(site.reconcile(&["--changed", "--force", "--yes"]).await?)?)))
}

fn tell(what: &str, ran: Ran) -> Ran {
    println!(
        "{what}: {:.1} s, {:.1} of them loading, {} checked, {} rows read, {:.0} MiB",
        ran.seconds, ran.rebuild_s, ran.checked, ran.rows_read, ran.peak_rss_mib
    );
    ran
}

/// Fails unless all compared targets were right.
fn exact(ran: Ran) -> Result<Ran> {
    ensure!(ran.checked == ran.exact, "{} checked, {} exact", ran.checked, ran.exact);
    Ok(ran)
}

fn figures(seen: &Seen) -> BTreeMap<String, f64> {
    let Seen { rows, full, changed, reloaded, daemon_peak_rss_mib, wide_full, wide_reloaded, longest } = seen;
    let most = |runs: &[&Ran]| runs.iter().map(|ran| ran.peak_rss_mib).fold(0.0, f64::max);
    let figures = [
        ("peak_rss_mib", most(&[full, changed, reloaded]).max(*daemon_peak_rss_mib)),
        ("longest_statement_ms", longest.first().map_or(0.0, |statement| statement.ms)),
        ("reload_per_s", *rows as f64 / reloaded.rebuild_s),
        ("reload_s", reloaded.rebuild_s),
        ("changed_rows_read_per_target", changed.rows_read as f64 / changed.checked as f64),
        ("changed_s", changed.seconds),
        ("full_s", full.seconds - full.rebuild_s),
        ("wide_peak_rss_mib", most(&[wide_full, wide_reloaded])),
        ("wide_full_s", wide_full.seconds - wide_full.rebuild_s),
        ("wide_reload_s", wide_reloaded.rebuild_s),
    ];
    figures.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
}
