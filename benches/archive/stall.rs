//! Measures the longest Redis call of another client while some work runs.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use crate::common::world::World;

/// Between two calls.
const EVERY: Duration = Duration::from_millis(1);

/// The durations of the other client's calls.
#[derive(Clone, Copy, Debug, Default)]
pub struct Stalls {
    pub longest_ms: f64,
}

/// Runs `work`. While `work` runs, another client constantly adds members to another board.
pub async fn beside<T>(world: &World, work: impl Future<Output = Result<T>>) -> Result<(T, Stalls)> {
    let mut redis = world.redis().await?;
    let key = format!("{}:other", world.name);
    let mut stalls = Stalls::default();
    let mut work = std::pin::pin!(work);
    let done = loop {
        tokio::select! {
            biased;
            done = &mut work => break done?,
            () = tokio::time::sleep(EVERY) => {}
        }
        let began = Instant::now();
        let () = redis::cmd("ZINCRBY")
            .arg(&key)
            .arg(1)
            .arg("m")
            .query_async(&mut redis)
            .await
            .context("another client's ZINCRBY")?;
        stalls.longest_ms = stalls.longest_ms.max(began.elapsed().as_secs_f64() * 1e3);
    };
    let () = redis::cmd("UNLINK").arg(&key).query_async(&mut redis).await?;
    Ok((done, stalls))
}
