//! What systemd is told, where it runs us (`Type=notify`); nothing otherwise.

use std::fmt::Write;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use sd_notify::NotifyState;
use tokio_util::sync::CancellationToken;
use tracing::{error, warn};

use super::liveness::Liveness;
use crate::telemetry::{Standing, Telemetry, telemetry};

/// A loop that hasn't beaten for so long is stuck: longer than any single call may take.
pub const STUCK_AFTER: Duration = Duration::from_secs(60);

/// How often the line for `systemctl status` is looked at. It is sent when it has changed.
const STATUS_EVERY: Duration = Duration::from_secs(5);

/// The configuration is valid and the loops run. Not "all servers are up": a server that is away is waited for.
pub fn ready() {
    tell(&[NotifyState::Ready]);
}

/// The configuration is being read again; [`ready`] says that it is done.
pub fn reloading() {
    match NotifyState::monotonic_usec_now() {
        Ok(now) => tell(&[NotifyState::Reloading, now]),
        Err(error) => warn!(event = "notify-failed", "systemd could not be told: {error}"),
    }
}

/// Open work is being finished.
pub fn stopping() {
    tell(&[NotifyState::Stopping]);
}

/// The line that `systemctl status` shows.
pub fn status(line: &str) {
    tell(&[NotifyState::Status(line)]);
}

/// Keeps the line that `systemctl status` shows, where systemd runs us.
pub async fn tell_status(end: CancellationToken) {
    if std::env::var_os("NOTIFY_SOCKET").is_none() {
        return;
    }
    let (mut told, mut before) = (String::new(), (Instant::now(), telemetry().committed.get(), telemetry().lag.get()));
    while end.run_until_cancelled(tokio::time::sleep(STATUS_EVERY)).await.is_some() {
        let now = (Instant::now(), telemetry().committed.get(), telemetry().lag.get());
        let rate = (now.1 - before.1) as f64 / now.0.duration_since(before.0).as_secs_f64();
        let line = line(telemetry(), rate, now.2.since(&before.2).quantile(0.99));
        before = now;
        if line != told {
            status(&line);
            told = line;
        }
    }
}

/// One line: what it does, and what it waits for.
fn line(vitals: &Telemetry, events_s: f64, lag_s: Option<f64>) -> String {
    let partitions = vitals.partitions();
    let written = partitions.iter().filter(|(_, partition)| partition.standing() == Standing::Writing).count();
    let mut line = match () {
        () if vitals.draining.load(Ordering::Relaxed) => "stopping, what is open is written".to_owned(),
        () if !vitals.working.load(Ordering::Relaxed) => "starting".to_owned(),
        () => format!("running, {events_s:.0} events/s, {written} of {} partitions are written here", partitions.len()),
    };
    // A String can't fail.
    if let Some(lag_s) = lag_s {
        let _ = write!(line, ", 99 % within {lag_s:.2} s");
    }
    if let Some(wait) = vitals.waits.open().first() {
        let _ = write!(line, "; waiting: {} failed: {}", wait.what, wait.reason);
    }
    line.replace(char::is_control, " ")
}

/// Feeds the watchdog while every loop beats. A loop that is stuck is logged, and systemd restarts the process.
pub async fn watchdog(liveness: Liveness, stop: CancellationToken) {
    let Some(limit) = sd_notify::watchdog_enabled() else { return };
    let mut tick = tokio::time::interval(limit / 3);
    while stop.run_until_cancelled(tick.tick()).await.is_some() {
        let stuck = liveness.stuck(STUCK_AFTER);
        if stuck.is_empty() {
            tell(&[NotifyState::Watchdog]);
        } else {
            error!(
                event = "stuck",
                loops = stuck.join(", "),
                "no progress for {} s: the watchdog is not fed",
                STUCK_AFTER.as_secs()
            );
        }
    }
}

fn tell(states: &[NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(states) {
        warn!(event = "notify-failed", "systemd could not be told: {error}");
    }
}
