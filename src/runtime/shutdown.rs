//! The first SIGTERM or SIGINT stops the process in order, the second one immediately. SIGHUP does not end it.

use anyhow::{Context, Result};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

/// The exit code after a second signal: 128 + SIGINT, as shells have it.
const ABORTED: i32 = 130;

pub(crate) fn hangups() -> Result<Signal> {
    signal(SignalKind::hangup()).context("listen for SIGHUP")
}

/// What the first signal cancels. The second one ends the process.
pub(crate) fn on_signals() -> Result<CancellationToken> {
    let mut terminate = signal(SignalKind::terminate()).context("listen for SIGTERM")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("listen for SIGINT")?;
    let stop = CancellationToken::new();
    let first = stop.clone();
    tokio::spawn(async move {
        for aborts in [false, true] {
            let name = tokio::select! {
                _ = terminate.recv() => "SIGTERM",
                _ = interrupt.recv() => "SIGINT",
            };
            if aborts {
                warn!(
                    event = "abort",
                    signal = name,
                    "second signal: ending at once, unacknowledged messages go back to the queue"
                );
                std::process::exit(ABORTED);
            }
            info!(
                event = "stop-asked",
                signal = name,
                "stopping: what is open is written first; a second signal ends at once"
            );
            first.cancel();
        }
    });
    Ok(stop)
}
