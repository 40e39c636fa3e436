//! One run of the binary: its report, its time, its memory, and what MySQL read for it.

use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};
use tokio::process::Command;

use crate::common::cpu::peak_rss_mib;
use crate::common::world::World;

/// What a run came to.
#[derive(Clone, Debug, Serialize)]
pub struct Ran {
    pub seconds: f64,
    pub checked: u64,
    pub exact: u64,
    /// How long loading what Redis had lost took; 0 where nothing was.
    pub rebuild_s: f64,
    pub peak_rss_mib: f64,
    /// Rows that MySQL read meanwhile (the sum of Handler_read%).
    pub rows_read: u64,
    /// What each step took.
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

/// Between two looks at the process' memory.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// Runs `tallyd reconcile` with `arguments` to its end.
pub async fn reconcile(world: &World, arguments: &[&str]) -> Result<Ran> {
    let before = rows_read(world).await?;
    let began = Instant::now();
    let child = Command::new(env!("CARGO_BIN_EXE_tallyd"))
        .arg("--config")
        .arg(world.config_path())
        .arg("reconcile")
        .args(arguments)
        .args(["--format", "json"])
        .env_remove("RUST_LOG")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .context("start tallyd")?;
    let pid = child.id().context("tallyd has ended")?;
    let mut ended = Box::pin(child.wait_with_output());
    let mut peak: f64 = 0.0;
    let output = loop {
        tokio::select! {
            output = &mut ended => break output?,
            () = tokio::time::sleep(LOOK_EVERY) => peak = peak.max(peak_rss_mib(pid).unwrap_or(0.0)),
        }
    };
    let seconds = began.elapsed().as_secs_f64();
    let log = String::from_utf8_lossy(&output.stderr);
    if !output.status.success() {
        bail!("tallyd reconcile ended with {}:\n{log}", output.status);
    }
    let Report { checked, exact, steps_ms } = serde_json::from_slice(&output.stdout).context("read the report")?;
    let lines = log.lines().filter_map(|line| serde_json::from_str::<Line>(line).ok());
    let rebuild_s = lines.filter(|line| line.event == "redis-loaded").map(|line| line.seconds).sum();
    let rows_read = rows_read(world).await?.saturating_sub(before);
    Ok(Ran { seconds, checked, exact, rebuild_s, peak_rss_mib: peak, rows_read, steps_ms })
}

async fn rows_read(world: &World) -> Result<u64> {
    let read: Vec<(String, String)> =
        sqlx::query_as("SHOW GLOBAL STATUS LIKE 'Handler_read%'").fetch_all(&world.pool).await?;
    Ok(read.iter().filter_map(|(_, rows)| rows.parse::<u64>().ok()).sum())
}
