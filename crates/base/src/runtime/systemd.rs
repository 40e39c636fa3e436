//! Notifies systemd, if it runs this process (`Type=notify`).

use std::time::Duration;

use sd_notify::NotifyState;
use tallyd_connect::pace::pace;
use tokio_util::sync::CancellationToken;
use tracing::{error, warn};

use super::liveness::Liveness;

/// Age of a stuck loop's last heartbeat. Each call of a loop must be shorter.
pub const STUCK_AFTER: Duration = Duration::from_secs(60);

/// The configuration is valid and the loops run, or wait for an unreachable server.
pub fn ready() {
    notify(&[NotifyState::Ready]);
}

pub fn reloading() {
    match NotifyState::monotonic_usec_now() {
        Ok(now) => notify(&[NotifyState::Reloading, now]),
        Err(error) => warn!(event = "notify-failed", "systemd could not be notified: {error}"),
    }
}

pub fn stopping() {
    notify(&[NotifyState::Stopping]);
}

pub fn status(line: &str) {
    notify(&[NotifyState::Status(line)]);
}

/// If a loop is stuck, says nothing, so systemd restarts the process.
pub async fn watchdog(liveness: Liveness, stop: CancellationToken) {
    let Some(limit) = sd_notify::watchdog_enabled() else { return };
    let mut tick = tokio::time::interval(limit / 3);
    while stop.run_until_cancelled(tick.tick()).await.is_some() {
        let stuck = liveness.stuck(pace(STUCK_AFTER));
        if stuck.is_empty() {
            notify(&[NotifyState::Watchdog]);
        } else {
            error!(
                event = "stuck",
                loops = stuck.join(", "),
                "a loop has made no progress for {} s: the watchdog is not fed, so systemd restarts the process",
                STUCK_AFTER.as_secs()
            );
        }
    }
}

fn notify(states: &[NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(states) {
        warn!(event = "notify-failed", "systemd could not be notified: {error}");
    }
}
