//! Builds what the tasks stand on, runs the tasks, supervises and drains them.
//!
//! A task that ends before it was told to ends all the others in order, and the process with a failing exit code;
//! systemd starts it again (invariant 8).

mod reload;
mod servers;
mod start;
mod tasks;

use std::path::Path;
use std::sync::atomic::Ordering;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use tokio::task::JoinSet;
use tokio_util::sync::{CancellationToken, DropGuard};
use tracing::{error, info};

pub use servers::Servers;

use crate::admin::Admin;
use crate::config::{Config, Live};
use crate::runtime::progress::Progress;
use crate::runtime::{shutdown, systemd};
use crate::vitals::vitals;
use reload::Reloader;
use tasks::Task;

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
    let (sender, live) = Live::new(config);
    let progress = Progress::default();
    let mut tasks: JoinSet<String> = JoinSet::new();
    // The watchdog is fed, and whoever asks is told how the daemon stands, until the drain has ended.
    let drained = CancellationToken::new();
    let ends = drained.clone().drop_guard();
    if let Some((admin, observer)) = Admin::bind(&live, &servers.broker, &servers.owner, &progress).await? {
        tasks.spawn(admin.run(progress.register("admin"), drained.clone()));
        tasks.spawn(observer.run(progress.register("observer"), drained.clone()));
    }
    let lasting = tasks.len();
    let reloader = Reloader { path: path.to_owned(), sender, store: servers.store.clone(), hangups };
    tasks.spawn(reloader.run(stop.clone()));
    tokio::spawn(systemd::watchdog(progress.clone(), drained.clone()));
    tokio::spawn(systemd::tell_status(drained));
    let ended = tokio::select! {
        ready = start::servers_are_ready(&servers, &live) => match ready {
            Ok(()) => work(Task { live: live.clone(), servers: servers.clone(), stop: stop.clone() }, &progress, &mut tasks).await,
            wrong => wrong,
        },
        ended = supervise(&mut tasks, &stop) => ended,
    };
    // A start that failed was not told to stop.
    stop.cancel();
    vitals().draining.store(true, Ordering::Relaxed);
    systemd::stopping();
    let drained = drain(&mut tasks, lasting, ends, Duration::from_secs(live.now().daemon.drain_max_s)).await;
    if drained.is_ok() {
        servers.store.close().await;
    }
    ended.and(drained)?;
    info!(event = "stopped", "tallyd has stopped, nothing is open");
    Ok(())
}

/// Starts the tasks that stand on the servers, and waits for the stop.
async fn work(task: Task, progress: &Progress, tasks: &mut JoinSet<String>) -> Result<()> {
    let (partitions, owner, stop) = (task.live.now().amqp.partitions, task.servers.owner.clone(), task.stop.clone());
    task.start_all(progress, tasks).await?;
    systemd::ready();
    vitals().working.store(true, Ordering::Relaxed);
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

/// Waits for all tasks, but no longer than `limit`. The `lasting` ones among them end after all others, by `ends`.
async fn drain(tasks: &mut JoinSet<String>, lasting: usize, ends: DropGuard, limit: Duration) -> Result<()> {
    let all = async {
        let mut ends = Some(ends);
        loop {
            if tasks.len() <= lasting {
                ends = None;
            }
            let Some(ended) = tasks.join_next().await else { break };
            ended.context("a task panicked while stopping")?;
        }
        drop(ends);
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
        let ends = CancellationToken::new().drop_guard();
        assert!(drain(&mut tasks, 0, ends, Duration::from_secs(10)).await.is_ok(), "the others were told to stop");
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
    async fn what_lasts_ends_after_all_others() {
        let (mut tasks, drained) = (JoinSet::new(), CancellationToken::new());
        let (ended, told) = (std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false)), drained.clone());
        let seen = std::sync::Arc::clone(&ended);
        tasks.spawn(async move {
            told.cancelled().await;
            assert!(seen.load(Ordering::Relaxed), "it ends last");
            "admin port".to_owned()
        });
        tasks.spawn(async move {
            tokio::task::yield_now().await;
            ended.store(true, Ordering::Relaxed);
            "consumer 0".to_owned()
        });
        assert!(drain(&mut tasks, 1, drained.drop_guard(), Duration::from_secs(10)).await.is_ok());
    }

    #[tokio::test]
    async fn a_drain_that_takes_too_long_is_given_up() {
        let mut tasks = JoinSet::new();
        tasks.spawn(std::future::pending());
        let ends = CancellationToken::new().drop_guard();
        let error = drain(&mut tasks, 0, ends, Duration::from_millis(10)).await.unwrap_err();
        assert!(error.to_string().contains("drain_max_s"), "{error}");
    }
}
