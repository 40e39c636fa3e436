//! Compares the figures of two commits. `dev/bench NAME --against COMMIT` runs the benchmark of both commits in turn, and
//! then calls this program.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use common::machine::Machine;
use common::report::{Results, median, number, print_table};
use serde::{Deserialize, Serialize};
use tallyd_benches as common;

/// The part of a benchmark's result file that this program reads.
#[derive(Deserialize)]
struct Measured {
    figures: BTreeMap<String, f64>,
}

/// One figure of both commits.
#[derive(Serialize)]
struct Compared {
    this: f64,
    that: f64,
    /// The median of the ratios `this / that`, one ratio per round.
    ratio: f64,
    lowest: f64,
    highest: f64,
}

fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let (Some(name), Some(commit), None) = (arguments.next(), arguments.next(), arguments.next()) else {
        bail!("run dev/bench NAME --against COMMIT, which calls this program");
    };
    let folder = tallyd_testkit::root().join("target/bench").join(format!("{name}-against"));
    let rounds = rounds(&folder)?;
    let compared = compare(&rounds);
    let row = |(figure, it): (&String, &Compared)| {
        let spread = format!("{} to {}", number(it.lowest), number(it.highest));
        vec![figure.clone(), number(it.this), number(it.that), number(it.ratio), spread]
    };
    println!();
    print_table(&["figure", "this tree", &commit, "ratio", "spread"], &compared.iter().map(row).collect::<Vec<_>>());
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let results = Results {
        figures: compared.iter().map(|(figure, it)| (figure.clone(), it.ratio)).collect(),
        machine: runtime.block_on(Machine::look())?,
        arguments: vec![commit],
        missing: BTreeMap::new(),
        results: compared,
    };
    results.write(&format!("{name}-against"))
}

/// Reads the figures of all rounds: of this tree, and of the other commit.
fn rounds(folder: &Path) -> Result<Vec<(Measured, Measured)>> {
    let read = |side: &str, round: usize| -> Result<Measured> {
        let path = folder.join(format!("{side}-{round}.json"));
        let text = fs::read(&path).with_context(|| format!("read {}", path.display()))?;
        serde_json::from_slice(&text).with_context(|| format!("parse {}", path.display()))
    };
    let count = fs::read_dir(folder).with_context(|| format!("read {}", folder.display()))?.count() / 2;
    ensure!(count > 0, "{} has no results", folder.display());
    (1..=count).map(|round| Ok((read("this", round)?, read("that", round)?))).collect()
}

/// Compares the figures that both commits have. A ratio needs two positive figures: a small difference of two
/// measurements can be zero or less, and then its ratio says nothing.
fn compare(rounds: &[(Measured, Measured)]) -> BTreeMap<String, Compared> {
    let Some((first, _)) = rounds.first() else { return BTreeMap::new() };
    let one = |figure: &String| {
        let pairs: Vec<(f64, f64)> = rounds
            .iter()
            .filter_map(|(this, that)| Some((*this.figures.get(figure)?, *that.figures.get(figure)?)))
            .collect();
        let ratios: Vec<f64> = pairs.iter().map(|(this, that)| this / that).collect();
        let have_ratio = !pairs.is_empty() && pairs.iter().all(|(this, that)| *this > 0.0 && *that > 0.0);
        have_ratio.then(|| Compared {
            this: median(pairs.iter().map(|(this, _)| *this)),
            that: median(pairs.iter().map(|(_, that)| *that)),
            ratio: median(ratios.iter().copied()),
            lowest: ratios.iter().copied().fold(f64::INFINITY, f64::min),
            highest: ratios.iter().copied().fold(f64::NEG_INFINITY, f64::max),
        })
    };
    first.figures.keys().filter_map(|figure| Some((figure.clone(), one(figure)?))).collect()
}
