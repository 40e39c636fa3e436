//! Builds what the tasks stand on, runs the tasks, supervises and drains them.
//!
//! A task that ends before it was told to ends all the others in order, and the process with a failing exit code;
//! systemd starts it again (invariant 8).

mod reload;
mod servers;
mod start;
mod tasks;

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use tracing::{error, info};

pub use servers::Servers;

use crate::admin::Admin;
use crate::config::{Config, ConfigHandle};
use crate::runtime::liveness::Liveness;
use crate::runtime::{shutdown, systemd};
use crate::telemetry::{telemetry, tell_status};
use reload::Reloader;
use tasks::Task;

/// How long those who are looked at may take to end, once all else has.
const LASTING_MAX: Duration = Duration::from_secs(5);

/// The daemon: runs until SIGTERM or SIGINT, with the configuration that was read from `path`, and is read there again at SIGHUP.
///
/// # Errors
/// The schema or the meaning of a code is wrong, the admin port is taken, a task ended early, or the drain took longer than
/// `[daemon] drain_max_s`.
pub async fn run(path: &Path, config: Config) -> Result<()> {
    let stop = CancellationToken::new();
    shutdown::on_signals(&stop)?;
    let hangups = shutdown::hangups()?;
    let servers = Servers::new(&config)?;
    let (sender, live) = ConfigHandle::new(config);
    let liveness = Liveness::default();
    let (mut tasks, mut lasting): (JoinSet<String>, JoinSet<String>) = Default::default();
    // The watchdog is fed, and whoever asks is told how the daemon stands, until the drain has ended.
    let drained = CancellationToken::new();
    let ends = drained.clone().drop_guard();
    if let Some((admin, observer)) = Admin::bind(&live, &servers.broker, &servers.owner, &liveness).await? {
        lasting.spawn(admin.run(liveness.register("admin"), drained.clone()));
        lasting.spawn(observer.run(liveness.register("observer"), drained.clone()));
    }
    let reloader = Reloader { path: path.to_owned(), sender, store: servers.store.clone(), hangups };
    tasks.spawn(reloader.run(stop.clone()));
    tokio::spawn(systemd::watchdog(liveness.clone(), drained.clone()));
    tokio::spawn(tell_status(drained));
    let ended = tokio::select! {
        ready = start::servers_are_ready(&servers, &live) => match ready {
            Ok(()) => work(Task { live: live.clone(), servers: servers.clone(), stop: stop.clone() }, &liveness, &mut tasks).await,
            wrong => wrong,
        },
        ended = supervise(&mut tasks, &stop) => ended,
        // While it works, these are watched here.
        ended = supervise(&mut lasting, &stop), if !lasting.is_empty() => ended,
    };
    // A start that failed was not told to stop.
    stop.cancel();
    telemetry().drains();
    systemd::stopping();
    let drain_max = Duration::from_secs(live.current().daemon.drain_max_s);
    let drained = drain(&mut tasks, drain_max).await;
    drop(ends);
    let told = drain(&mut lasting, LASTING_MAX).await;
    if drained.is_ok() {
        servers.store.close().await;
    }
    ended.and(drained).and(told)?;
    info!(event = "stopped", "tallyd has stopped, nothing is open");
    Ok(())
}

/// Starts the tasks that stand on the servers, and waits for the stop.
async fn work(task: Task, liveness: &Liveness, tasks: &mut JoinSet<String>) -> Result<()> {
    let (partitions, owner, stop) =
        (task.live.current().amqp.partitions, task.servers.owner.clone(), task.stop.clone());
    task.start_all(liveness, tasks).await?;
    systemd::ready();
    telemetry().works();
    info!(
        event = "started",
        version = env!("CARGO_PKG_VERSION"),
        owner,
        partitions,
        "tallyd {} started, partitions: {partitions}",
        env!("CARGO_PKG_VERSION")
    );
    supervise(tasks, &stop).await
}

/// Waits for the stop. Any task that ends before it is a fault, and stops the others.
async fn supervise(tasks: &mut JoinSet<String>, stop: &CancellationToken) -> Result<()> {
    let ended = tokio::select! {
        () = stop.cancelled() => return Ok(()),
        ended = tasks.join_next() => ended,
    };
    if stop.is_cancelled() {
        return Ok(());
    }
    stop.cancel();
    let reason = match ended {
        Some(Ok(name)) => format!("the {name} ended without being told to"),
        Some(Err(error)) => format!("a task panicked: {error}"),
        None => "there is no task".to_owned(),
    };
    error!(event = "task-ended", reason, "stopping: {reason}");
    Err(anyhow!(reason))
}

/// Waits for all tasks, but no longer than `limit`.
async fn drain(tasks: &mut JoinSet<String>, limit: Duration) -> Result<()> {
    let all = async {
        while let Some(ended) = tasks.join_next().await {
            ended.context("a task panicked while stopping")?;
        }
        Ok(())
    };
    match tokio::time::timeout(limit, all).await {
        Ok(result) => result,
        Err(_) => bail!(
            "the stop took longer than [daemon] drain_max_s = {} s: what is open goes back to the broker",
            limit.as_secs()
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn supervised(task: impl Future<Output = String> + Send + 'static) -> (Result<()>, bool) {
        let stop = CancellationToken::new();
        let mut tasks = JoinSet::new();
        let told = stop.clone();
        tasks.spawn(async move {
            told.cancelled().await;
            "patient".to_owned()
        });
        tasks.spawn(task);
        let ended = supervise(&mut tasks, &stop).await;
        assert!(drain(&mut tasks, Duration::from_secs(10)).await.is_ok(), "the others were told to stop");
        (ended, stop.is_cancelled())
    }

    #[tokio::test]
    async fn a_task_that_ends_early_stops_the_others_and_is_a_failure() {
        let (ended, stopped) = supervised(async { "hasty".to_owned() }).await;
        assert!(stopped);
        assert_eq!(ended.unwrap_err().to_string(), "the hasty ended without being told to");
    }

    #[tokio::test]
    async fn a_task_that_panics_stops_the_others_and_is_a_failure() {
        let (ended, stopped) = supervised(async { panic!("as the test wants") }).await;
        assert!(stopped);
        assert!(ended.unwrap_err().to_string().starts_with("a task panicked"));
    }

    #[tokio::test]
    async fn a_drain_that_takes_too_long_is_given_up() {
        let mut tasks = JoinSet::new();
        tasks.spawn(std::future::pending());
        let error = drain(&mut tasks, Duration::from_millis(10)).await.unwrap_err();
        assert!(error.to_string().contains("drain_max_s"), "{error}");
    }
}
