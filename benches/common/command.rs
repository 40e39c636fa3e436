//! Runs a command of the real binary to its end, and measures its time and memory.

use std::process::{Output, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use tokio::process::Command;

use super::cpu::peak_rss_mib;
use super::world::World;

/// Maximum duration of a command. A command that takes longer waits for something that does not happen.
const LONGEST: Duration = Duration::from_mins(30);

/// Time between two measurements of the process's memory.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// The result of the command.
pub struct Ended {
    pub output: Output,
    pub seconds: f64,
    pub peak_rss_mib: f64,
}

/// Runs `tallyd` with `arguments`.
///
/// # Errors
/// Fails if the command fails, or does not end within half an hour. If the command failed, the returned error contains
/// the command's log.
pub async fn tallyd(world: &World, arguments: &[&str]) -> Result<Ended> {
    let began = Instant::now();
    let child = Command::new(tallyd_testkit::program())
        .arg("--config")
        .arg(world.config_path())
        .args(arguments)
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
        ensure!(began.elapsed() < LONGEST, "tallyd {} has not ended after {LONGEST:?}", arguments.join(" "));
        tokio::select! {
            output = &mut ended => break output?,
            () = tokio::time::sleep(LOOK_EVERY) => peak = peak.max(peak_rss_mib(pid).unwrap_or(0.0)),
        }
    };
    let seconds = began.elapsed().as_secs_f64();
    if !output.status.success() {
        let log = String::from_utf8_lossy(&output.stderr);
        bail!("tallyd {} exited with {}:\n{log}", arguments.join(" "), output.status);
    }
    Ok(Ended { output, seconds, peak_rss_mib: peak })
}
