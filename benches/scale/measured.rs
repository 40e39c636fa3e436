//! Reads the measurements of `dev/bench ingest`. The model is made from some of these measurements, and is compared
//! with the other measurements.

use std::collections::BTreeMap;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde::Deserialize;

use crate::Arguments;
use crate::model::Costs;

/// The name of the result file under target/bench.
const NAME: &str = "scale-measured";

/// tallyd is measured with one, two and four partitions.
pub const POINTS: [(usize, &str); 3] = [(1, "tallyd"), (2, "tallyd-2"), (4, "tallyd-4")];

/// The part of the result file that the model uses.
#[derive(Deserialize)]
pub struct Measured {
    pub machine: Machine,
    results: BTreeMap<String, Standing>,
}

#[derive(Deserialize)]
pub struct Machine {
    pub cpu: String,
    pub cores: f64,
}

#[derive(Deserialize)]
struct Standing {
    median: Run,
}

/// A run. Values in microseconds are CPU time per event.
#[derive(Clone, Copy, Debug, Deserialize)]
pub struct Run {
    pub events: f64,
    pub events_per_second: f64,
    pub consumer_us: f64,
    pub mysql_us: f64,
    pub rabbitmq_us: f64,
    pub published_us: f64,
    pub batches: f64,
    pub mysql_bytes: f64,
    pub mysql_statements: f64,
    pub row_bytes: f64,
}

impl Run {
    pub fn events_per_batch(&self) -> f64 {
        self.events / self.batches.max(1.0)
    }
}

impl Measured {
    /// Runs the measurement, unless the caller uses an earlier result.
    pub fn take(arguments: &Arguments) -> Result<Self> {
        let root = tallyd_testkit::root();
        if !arguments.measured {
            let names: Vec<&str> = POINTS.iter().map(|(_, name)| *name).collect();
            let status = Command::new(root.join("dev/bench"))
                .args(["ingest", "--results", NAME, "--rounds", &arguments.rounds.to_string()])
                .args(["--events", &arguments.events.to_string()])
                .args(["--only", &format!("noop,floor,floor-1000,{}", names.join(","))])
                .status()
                .context("start dev/bench ingest")?;
            ensure!(status.success(), "dev/bench ingest exited with {status}");
        }
        let path = root.join("target/bench").join(format!("{NAME}.json"));
        let text = std::fs::read(&path)
            .with_context(|| format!("read {}: run dev/bench scale without --measured first", path.display()))?;
        serde_json::from_slice(&text).with_context(|| format!("read {}", path.display()))
    }

    pub fn of(&self, name: &str) -> Result<Run> {
        Ok(self.results.get(name).with_context(|| format!("{name} was not measured"))?.median)
    }

    /// Returns the costs of the parts. Each cost comes from a measurement in which no other part ran. The runs whose
    /// rates the model predicts are never used to calculate costs.
    pub fn costs(&self) -> Result<Costs> {
        let (noop, large, small) = (self.of("noop")?, self.of("floor")?, self.of("floor-1000")?);
        // The time of a batch is a + b * events. The code calculates a and b twice: once for MySQL's CPU time, and once
        // for the time that the connection takes.
        let (far, near) = (large.events_per_batch(), small.events_per_batch());
        ensure!(
            far > near * 2.0,
            "batches of {near:.0} and {far:.0} events are too similar to fit a line: use more --events"
        );
        let (batch, row) = line(&large, &small, |run| run.mysql_us * run.events_per_batch());
        let (batch_s, row_s) = line(&large, &small, |run| 1e6 / run.events_per_second * run.events_per_batch());
        let build = large.consumer_us;
        Ok(Costs {
            publish: noop.published_us,
            deliver: noop.rabbitmq_us,
            consume: noop.consumer_us + build,
            row,
            batch,
            // The writer builds its statements before it sends them. The consumer's cost already includes the time for
            // building them.
            row_wait: (row_s - row - build).max(0.0),
            batch_wait: (batch_s - batch).max(0.0),
        })
    }
}

/// Returns the intercept and slope of the line through two runs with batches of different sizes.
fn line(large: &Run, small: &Run, time: impl Fn(&Run) -> f64) -> (f64, f64) {
    let (far, near) = (large.events_per_batch(), small.events_per_batch());
    let slope = (time(large) - time(small)) / (far - near);
    ((time(small) - slope * near).max(0.0), slope.max(0.0))
}
