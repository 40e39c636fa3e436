//! The first SIGTERM or SIGINT stops the process cleanly. The second signal stops it immediately. SIGHUP does not stop
//! it.

use anyhow::{Context, Result};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

/// 128 + SIGINT, as in shells.
const ABORTED: i32 = 130;

pub fn hangups() -> Result<Signal> {
    signal(SignalKind::hangup()).context("listen for SIGHUP")
}

/// The first signal cancels the token. The second one ends the process.
pub fn on_signals() -> Result<CancellationToken> {
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
                    "second signal: exiting immediately, the broker requeues unacknowledged messages"
                );
                std::process::exit(ABORTED);
            }
            info!(
                event = "stop-asked",
                signal = name,
                "stopping after the open work is written; a second signal exits immediately"
            );
            first.cancel();
        }
    });
    Ok(stop)
}
