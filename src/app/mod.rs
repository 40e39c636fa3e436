//! Builds what the tasks stand on, runs the tasks, supervises and drains them.
//!
//! A task that ends before it was told to ends all the others in order, and the process with a failing exit code;
//! systemd starts it again (invariant 8).

mod servers;

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use tokio::sync::{Notify, watch};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use tracing::{error, info, warn};

pub use servers::Servers;

use crate::archiver::clock::SnapshotClock;
use crate::archiver::{self, Archiver, Scope};
use crate::cache::keys::KindNames;
use crate::config::{Config, ConfigError};
use crate::consumer::Partition;
use crate::consumer::forget::forget;
use crate::filters::{self};
use crate::job::{self, Next, Ran, Timetable};
use crate::outbox::Outbox;
use crate::reconciler::lookout::Lookout;
use crate::reconciler::{self, Mode, Order};
use crate::runtime::progress::{Beat, Progress};
use crate::runtime::schedule::Bells;
use crate::runtime::show::Show;
use crate::runtime::{shutdown, systemd};

/// How long the start waits for Redis: systemd gives up on one that takes minutes.
const REDIS_LOOK_MAX: Duration = Duration::from_secs(5);

/// The daemon: runs until SIGTERM or SIGINT.
///
/// # Errors
/// The schema is wrong, a task ended early, or the drain took longer than `[daemon] drain_max_s`.
pub async fn run(config: Config) -> Result<()> {
    let stop = CancellationToken::new();
    shutdown::on_signals(&stop)?;
    let servers = Servers::new(&config)?;
    look_at_mysql(&servers).await?;
    look_at_redis(&servers).await?;
    let config = Arc::new(config);
    let progress = Progress::default();
    let mut tasks: JoinSet<String> = JoinSet::new();
    let bells = start_tasks(&config, &servers, &progress, &stop, &mut tasks).await?;
    // Fed until the drain has ended.
    let drained = CancellationToken::new();
    let _fed = drained.clone().drop_guard();
    tokio::spawn(systemd::watchdog(progress, drained));
    systemd::ready();
    let partitions = config.amqp.partitions;
    systemd::status(&format!("running, partitions: {partitions}"));
    info!(
        event = "started",
        version = env!("CARGO_PKG_VERSION"),
        owner = servers.owner,
        partitions,
        "tallyd {} started, partitions: {partitions}",
        env!("CARGO_PKG_VERSION")
    );
    let ended = supervise(&mut tasks, &stop).await;
    systemd::stopping();
    bells.stop().await;
    let drained = drain(&mut tasks, Duration::from_secs(config.daemon.drain_max_s)).await;
    if drained.is_ok() {
        servers.store.close().await;
    }
    ended.and(drained)?;
    info!(event = "stopped", "tallyd has stopped, nothing is open");
    Ok(())
}

/// A schema that is wrong ends the start; a server that is away doesn't: the tasks wait for it.
async fn look_at_mysql(servers: &Servers) -> Result<()> {
    match servers.check_schema().await {
        Err(error) if error.is::<ConfigError>() => return Err(error),
        Err(error) => {
            warn!(
                event = "mysql-away",
                error = format!("{error:#}"),
                "MySQL is away, starting all the same: {error:#}"
            );
            return Ok(());
        }
        Ok(()) => {}
    }
    let (version, warnings) = servers.store.durability().await?;
    info!(event = "mysql", version, "MySQL is {version}");
    for warning in warnings {
        warn!(event = "mysql-not-durable", "{warning}");
    }
    Ok(())
}

/// A Cluster that is configured as one server, or the other way round, ends the start; a Redis that is away doesn't.
async fn look_at_redis(servers: &Servers) -> Result<()> {
    match tokio::time::timeout(REDIS_LOOK_MAX, servers.cache.ping()).await {
        Ok(Err(error)) if error.is_of_the_configuration() => Err(error.into()),
        _ => Ok(()),
    }
}

async fn start_tasks(
    config: &Arc<Config>,
    servers: &Servers,
    progress: &Progress,
    stop: &CancellationToken,
    tasks: &mut JoinSet<String>,
) -> Result<Bells> {
    let outbox_bell = watch::Sender::default();
    start_outbox(config, servers, progress, outbox_bell.subscribe(), tasks)?;
    for number in 0..config.amqp.partitions {
        let name = format!("consumer {number}");
        let Servers { store, broker, owner, .. } = servers.clone();
        let partition = Partition::new(number, config, broker, store, &owner, stop.clone(), progress.register(&name));
        let partition = partition.ringing(outbox_bell.clone());
        tasks.spawn(async move {
            partition.run().await;
            name
        });
    }
    // The outbox ends with the last of them.
    drop(outbox_bell);
    let (store, keep) = (servers.store.clone(), config.consumer.applied_event_keep.0);
    let (beat, stopped) = (progress.register("ledger"), stop.clone());
    tasks.spawn(async move {
        forget(store, keep, beat, stopped).await;
        "ledger".to_owned()
    });
    let reconcile_bell = Arc::new(Notify::new());
    let archive_bell = Arc::new(Notify::new());
    let task = Task { config: Arc::clone(config), servers: servers.clone(), stop: stop.clone() };
    let timetables = vec![
        Timetable::new(reconciler::JOB, Mode::Rebuild.name(), "")?,
        Timetable::new(reconciler::JOB, Mode::Full.name(), &config.reconcile.full_cron)?,
        Timetable::new(reconciler::JOB, Mode::Scrub.name(), &config.reconcile.scrub_cron)?,
        Timetable::new(reconciler::JOB, Mode::Changed.name(), &config.reconcile.changed_cron)?,
    ];
    let lookout = Lookout {
        cache: servers.cache.clone(),
        kinds: KindNames::new(&config.kinds),
        every: config.reconcile.watch_every.0,
        asked: timetables.first().map(|rebuild| Arc::clone(&rebuild.asked)).unwrap_or_default(),
        bell: Arc::clone(&reconcile_bell),
    };
    let (beat, stopped) = (progress.register("lookout"), stop.clone());
    tasks.spawn(async move {
        lookout.run(beat, stopped).await;
        "lookout".to_owned()
    });
    tasks.spawn(task.clone().reconcile(timetables, Arc::clone(&reconcile_bell), progress.register("reconciler")));
    let timetables = vec![
        Timetable::new(archiver::JOB, archiver::MODE, &config.archive.cron)?,
        Timetable::new(archiver::JOB, archiver::SNAPSHOT_MODE, "")?,
    ];
    let clock = SnapshotClock {
        archiver: Archiver::new(config, servers.store.clone(), servers.cache.clone()),
        asked: timetables.last().map(|snapshot| Arc::clone(&snapshot.asked)).unwrap_or_default(),
        bell: Arc::clone(&archive_bell),
    };
    let (beat, stopped) = (progress.register("snapshot clock"), stop.clone());
    tasks.spawn(async move {
        clock.run(beat, stopped).await;
        "snapshot clock".to_owned()
    });
    tasks.spawn(task.clone().archive(timetables, Arc::clone(&archive_bell), progress.register("archiver")));
    let filter_bell = start_filters(task, progress, tasks)?;
    Bells::start(vec![
        (config.filter.schedule().to_owned(), filter_bell),
        (config.reconcile.full_cron.clone(), Arc::clone(&reconcile_bell)),
        (config.reconcile.scrub_cron.clone(), Arc::clone(&reconcile_bell)),
        (config.reconcile.changed_cron.clone(), reconcile_bell),
        (config.archive.cron.clone(), archive_bell),
    ])
    .await
}

/// The task that adds to Redis what only the daemon counts.
fn start_outbox(
    config: &Config,
    servers: &Servers,
    progress: &Progress,
    bell: watch::Receiver<()>,
    tasks: &mut JoinSet<String>,
) -> Result<()> {
    let also = servers.cache.also(&config.redis, &config.metrics)?;
    let Servers { store, cache, owner, .. } = servers.clone();
    let caches = [cache].into_iter().chain(also).collect();
    let outbox = Outbox { store, caches, kinds: KindNames::new(&config.kinds), owner };
    let beat = progress.register("outbox");
    tasks.spawn(async move {
        outbox.run(bell, beat).await;
        "outbox".to_owned()
    });
    Ok(())
}

/// The task that keeps filters, or the one that sees to it that none is trusted later. Gives its bell.
fn start_filters(task: Task, progress: &Progress, tasks: &mut JoinSet<String>) -> Result<Arc<Notify>> {
    let (bell, beat) = (Arc::new(Notify::new()), progress.register("filters"));
    let filter = &task.config.filter;
    if filter.is_on() {
        let timetables = vec![Timetable::new(filters::JOB, filters::MODE, filter.schedule())?];
        tasks.spawn(task.filters(timetables, Arc::clone(&bell), beat));
    } else {
        let Task { servers, stop, .. } = task;
        tasks.spawn(async move {
            filters::stay_off(servers.store, beat, stop).await;
            "filters".to_owned()
        });
    }
    Ok(bell)
}

/// A job's task.
#[derive(Clone)]
struct Task {
    config: Arc<Config>,
    servers: Servers,
    stop: CancellationToken,
}

impl Task {
    async fn reconcile(self, timetables: Vec<Timetable>, bell: Arc<Notify>, beat: Beat) -> String {
        let orders = [Mode::Rebuild, Mode::Full, Mode::Scrub, Mode::Changed].map(Order::scheduled);
        let Self { config, servers, stop } = &self;
        job::serve(&servers.store, &timetables, &bell, &beat, stop, |place| {
            let order = orders.get(place);
            async move {
                let Some(order) = order else { return Next::Bell };
                next(servers.reconcile(config, order, Show::Log, stop).await)
            }
        })
        .await;
        "reconciler".to_owned()
    }

    async fn archive(self, timetables: Vec<Timetable>, bell: Arc<Notify>, beat: Beat) -> String {
        let Self { config, servers, stop } = &self;
        job::serve(&servers.store, &timetables, &bell, &beat, stop, |place| async move {
            if place == 0 {
                return next(servers.archive(config, &Scope::default(), Show::Log, stop).await);
            }
            match servers.snapshot(config, None, false, Show::Log, stop).await {
                // Whatever became of it: the clock says when the next one is due.
                Ok(Ran::Ended(_)) => Next::Bell,
                failed => next(failed),
            }
        })
        .await;
        "archiver".to_owned()
    }

    async fn filters(self, timetables: Vec<Timetable>, bell: Arc<Notify>, beat: Beat) -> String {
        let Self { config, servers, stop } = &self;
        job::serve(&servers.store, &timetables, &bell, &beat, stop, |_| async move {
            next(servers.filters(config, stop).await)
        })
        .await;
        "filters".to_owned()
    }
}

/// When the loop looks again, after what became of a run.
fn next<R: job::Report>(ran: Result<Ran<R>>) -> Next {
    match ran {
        Ok(Ran::Ended(report)) if report.is_done() || report.is_braked() => Next::Bell,
        Ok(Ran::Ended(_)) => Next::Later,
        Ok(Ran::Held { .. }) => Next::Soon,
        Err(error) => {
            error!(event = "job-failed", error = format!("{error:#}"), "a job failed, trying again soon: {error:#}");
            Next::Soon
        }
    }
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
