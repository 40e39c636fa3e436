//! Runs the binary once, and measures how long it runs, how much memory it needs, and how many rows MySQL reads for it.

use std::path::Path;

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

use crate::common::command::{self, Ended};
use crate::common::cpu::Processes;
use crate::common::world::{World, stack};

/// The result of a run.
#[derive(Clone, Debug, Serialize)]
pub struct Ran {
    pub seconds: f64,
    /// CPU seconds of the run, of all servers, and of a consumer beside it, and of the benchmark.
    pub cpu_s: f64,
    pub checked: u64,
    pub exact: u64,
    /// Seconds to reload lost data into Redis, or 0 if no data was lost.
    pub rebuild_s: f64,
    pub peak_rss_mib: f64,
    /// Number of rows that MySQL read during the run (the sum of Handler_read%).
    pub rows_read: u64,
    /// The time of each step.
    pub steps_ms: serde_json::Value,
}

#[derive(Deserialize)]
struct Report {
    checked: u64,
    exact: u64,
    steps_ms: serde_json::Value,
}

#[derive(Deserialize)]
struct Line {
    event: String,
    #[serde(default)]
    seconds: f64,
}

/// Runs `tallyd reconcile` with `arguments` to its end.
pub async fn reconcile(world: &World, arguments: &[&str]) -> Result<Ran> {
    let before = rows_read(world).await?;
    let servers = Processes::of_stack(Path::new(&stack("DIR")?))?;
    let used = servers.used(Some(std::process::id()))?;
    let arguments = [&["reconcile", "--format", "json"], arguments].concat();
    let Ended { output, seconds, peak_rss_mib } = command::tallyd(world, &arguments).await?;
    let log = String::from_utf8_lossy(&output.stderr);
    let Report { checked, exact, steps_ms } = serde_json::from_slice(&output.stdout).context("read the report")?;
    let lines = log.lines().filter_map(|line| serde_json::from_str::<Line>(line).ok());
    let rebuild_s =
        lines.filter(|line| line.event == "redis-loaded").map(|line| line.seconds).fold(0.0, |sum, one| sum + one);
    // The run has ended, so that its time is part of the benchmark's.
    let cpu_s = servers.used(Some(std::process::id()))?.since(used).together() as f64 / 1e6;
    let rows_read = rows_read(world).await?.saturating_sub(before);
    Ok(Ran { seconds, cpu_s, checked, exact, rebuild_s, peak_rss_mib, rows_read, steps_ms })
}

async fn rows_read(world: &World) -> Result<u64> {
    let read: Vec<(String, String)> =
        sqlx::query_as("SHOW GLOBAL STATUS LIKE 'Handler_read%'").fetch_all(&world.pool).await?;
    Ok(read.iter().filter_map(|(_, rows)| rows.parse::<u64>().ok()).sum())
}
