//! Connects the servers, runs the daemon's tasks, supervises them and drains them.
//!
//! If a task ends before the stop, all other tasks are stopped cleanly, and the process exits with a failure code.
//! systemd then restarts the process (invariant 8).

mod card;
mod reload;
mod startup;
mod tasks;

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use tokio_util::sync::CancellationToken;
use tracing::{error, info};

use crate::admin::Admin;
use crate::admin::control::ControlSocket;
use reload::Reloader;
use tallyd_base::config::{Config, ConfigHandle};
use tallyd_base::runtime::liveness::Liveness;
use tallyd_base::runtime::{shutdown, systemd};
use tallyd_base::servers::Servers;
use tallyd_base::telemetry::{report_status, telemetry};
use tallyd_base::version;
use tasks::{Running, TaskName, Tasks};

/// For the admin port and the observer, after all other tasks.
const LASTING_MAX: Duration = Duration::from_secs(5);

/// Until SIGTERM or SIGINT. SIGHUP reads the configuration from `path` again.
pub async fn run(path: PathBuf, config: Config) -> Result<()> {
    let stop = shutdown::on_signals()?;
    let hangups = shutdown::hangups()?;
    let servers = Servers::new(&config)?;
    let (sender, live) = ConfigHandle::new(config);
    let liveness = Liveness::default();
    // The watchdog is fed and the admin port answers until the drain has ended.
    let drained = CancellationToken::new();
    let ends = drained.clone().drop_guard();
    let mut lasting = Running::new(&liveness);
    if let Some((admin, observer)) = Admin::new(&live, &servers.broker, &servers.owner, &liveness)? {
        lasting.start(TaskName::Admin, admin.run(liveness.register("admin"), drained.clone()));
        lasting.start_loop(TaskName::Observer, |beat| observer.run(beat, drained.clone()));
    }
    if let Some(path) = live.current().admin.control().context("read [admin] control")? {
        let socket = ControlSocket::new(path, &servers);
        lasting.start_loop(TaskName::ControlSocket, |beat| socket.run(beat, drained.clone()));
    }
    let mut running = Running::new(&liveness);
    let reloader = Reloader { path, sender, store: servers.store.clone(), hangups };
    running.start(TaskName::Reloader, reloader.run(stop.clone()));
    tokio::spawn(systemd::watchdog(liveness.clone(), drained.clone()));
    tokio::spawn(report_status(drained));
    let tasks = Tasks { live: live.clone(), servers: servers.clone(), stop: stop.clone() };
    let ended = tokio::select! {
        ready = startup::servers_are_ready(&servers, &live) => match ready {
            Ok(()) => work(tasks, &mut running).await,
            wrong => wrong,
        },
        ended = supervise(&mut running, &stop) => ended,
        ended = supervise(&mut lasting, &stop), if !lasting.is_empty() => ended,
    };
    // If the start failed, the token is not cancelled yet.
    stop.cancel();
    telemetry().drains();
    systemd::stopping();
    let drain_max = Duration::from_secs(live.current().daemon.drain_max_s);
    let drained = drain(&mut running, drain_max).await;
    drop(ends);
    let lasting_drained = drain(&mut lasting, LASTING_MAX).await;
    if drained.is_ok() {
        servers.store.close().await;
    }
    ended.and(drained).and(lasting_drained)?;
    info!(event = "stopped", "tallyd has stopped, and no work is open");
    Ok(())
}

async fn work(tasks: Tasks, running: &mut Running) -> Result<()> {
    let partitions = tasks.live.current().partitions();
    let owner = tasks.servers.owner.clone();
    let stop = tasks.stop.clone();
    tasks.start_all(running).await?;
    systemd::ready();
    telemetry().works();
    let (version, revision, long) = (version::VERSION, version::REVISION, version::LONG);
    info!(event = "started", version, revision, owner, partitions, "tallyd {long} started, partitions: {partitions}");
    supervise(running, &stop).await
}

/// If a task ends before the stop, this is a failure, and all other tasks are stopped.
async fn supervise(running: &mut Running, stop: &CancellationToken) -> Result<()> {
    let ended = tokio::select! {
        () = stop.cancelled() => return Ok(()),
        ended = running.next_end() => ended,
    };
    if stop.is_cancelled() {
        return Ok(());
    }
    stop.cancel();
    let reason = match ended {
        Some(Ok(name)) => format!("the {name} ended unexpectedly"),
        Some(Err(error)) => format!("a task panicked: {error}"),
        None => "no task is running".to_owned(),
    };
    error!(event = "task-ended", reason, "stopping: {reason}");
    Err(anyhow!(reason))
}

async fn drain(running: &mut Running, limit: Duration) -> Result<()> {
    let all = async {
        while let Some(ended) = running.next_end().await {
            ended.context("a task panicked while stopping")?;
        }
        Ok(())
    };
    match tokio::time::timeout(limit, all).await {
        Ok(result) => result,
        Err(_) => bail!(
            "the stop took longer than [daemon] drain_max_s = {} s: the broker requeues unacknowledged messages",
            limit.as_secs()
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn supervised(task: impl Future<Output = ()> + Send + 'static) -> (Result<()>, bool) {
        let stop = CancellationToken::new();
        let mut running = Running::new(&Liveness::default());
        running.start(TaskName::Outbox, stop.clone().cancelled_owned());
        running.start(TaskName::Ledger, task);
        let ended = supervise(&mut running, &stop).await;
        assert!(drain(&mut running, Duration::from_secs(10)).await.is_ok(), "the other task was stopped");
        (ended, stop.is_cancelled())
    }

    #[tokio::test]
    async fn a_task_that_ends_early_stops_the_others_and_is_a_failure() {
        let (ended, stopped) = supervised(async {}).await;
        assert!(stopped);
        assert_eq!(ended.unwrap_err().to_string(), "the ledger ended unexpectedly");
    }

    #[tokio::test]
    async fn a_task_that_panics_stops_the_others_and_is_a_failure() {
        let (ended, stopped) = supervised(async { panic!("as the test wants") }).await;
        assert!(stopped);
        assert!(ended.unwrap_err().to_string().starts_with("a task panicked"));
    }

    #[tokio::test]
    async fn a_drain_that_takes_too_long_is_given_up() {
        let mut running = Running::new(&Liveness::default());
        running.start(TaskName::Outbox, std::future::pending());
        let error = drain(&mut running, Duration::from_millis(10)).await.unwrap_err();
        assert!(error.to_string().contains("drain_max_s"), "{error}");
    }
}
