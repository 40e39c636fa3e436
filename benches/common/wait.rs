//! Waits for a condition.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};

/// Waits until `fact` is true. Checks `fact` at the interval `every`. Fails after `limit`.
pub async fn until(
    what: &str,
    limit: Duration,
    every: Duration,
    mut fact: impl AsyncFnMut() -> Result<bool>,
) -> Result<()> {
    let began = Instant::now();
    while !fact().await? {
        ensure!(began.elapsed() < limit, "{what}: not within {} s", limit.as_secs());
        tokio::time::sleep(every).await;
    }
    Ok(())
}
