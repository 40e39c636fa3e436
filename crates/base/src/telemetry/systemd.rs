//! Sends systemd the line that `systemctl status` shows.

use std::fmt::Write;
use std::time::{Duration, Instant};

use tokio_util::sync::CancellationToken;

use super::{ConsumerState, DaemonState, Telemetry, telemetry};
use crate::runtime::systemd;
use crate::runtime::waits::waits;

const STATUS_EVERY: Duration = Duration::from_secs(5);

pub async fn report_status(end: CancellationToken) {
    if std::env::var_os("NOTIFY_SOCKET").is_none() {
        return;
    }
    let (mut sent, mut before, mut at) = (String::new(), telemetry().written(), Instant::now());
    while end.run_until_cancelled(tokio::time::sleep(STATUS_EVERY)).await.is_some() {
        let (committed, lag) = telemetry().written();
        let rate = (committed - before.0) as f64 / at.elapsed().as_secs_f64();
        let line = line(telemetry(), rate, lag.since(&before.1).quantile(0.99));
        at = Instant::now();
        before = (committed, lag);
        if line != sent {
            systemd::status(&line);
            sent = line;
        }
    }
}

fn line(telemetry: &Telemetry, events_s: f64, lag_s: Option<f64>) -> String {
    let partitions = telemetry.consumer.partitions();
    let written = partitions.iter().filter(|(_, partition)| partition.state() == ConsumerState::Writing).count();
    let mut line = match telemetry.state() {
        DaemonState::Draining => "stopping, writing the open batches".to_owned(),
        DaemonState::Starting => "starting".to_owned(),
        DaemonState::Running => {
            format!("running, {events_s:.0} events/s, {written} of {} partitions written here", partitions.len())
        }
    };
    // Writing to a String can't fail.
    if let Some(lag_s) = lag_s {
        let _ = write!(line, ", 99 % of events committed within {lag_s:.2} s");
    }
    if let Some(wait) = waits().open().first() {
        let _ = write!(line, "; retrying: {} failed: {}", wait.what, wait.reason);
    }
    line.replace(char::is_control, " ")
}
