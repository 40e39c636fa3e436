//! The tasks of a daemon, and the schedules that wake them. Each asks [`Live`] for the configuration when it begins something.

use std::sync::Arc;

use anyhow::Result;
use tokio::sync::{Notify, watch};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use tracing::error;

use super::Servers;
use crate::archiver::clock::SnapshotClock;
use crate::archiver::{self, Scope};
use crate::config::{Config, Live};
use crate::consumer::Partition;
use crate::consumer::forget::forget;
use crate::filters;
use crate::job::{self, Next, Pattern, Ran, Timetable};
use crate::outbox::Outbox;
use crate::reconciler::lookout::Lookout;
use crate::reconciler::{self, Mode, Order};
use crate::runtime::progress::{Beat, Progress};
use crate::runtime::schedule::Bells;
use crate::runtime::show::Show;

/// What every task is given.
#[derive(Clone)]
pub(super) struct Task {
    pub live: Live,
    pub servers: Servers,
    pub stop: CancellationToken,
}

/// Who is woken by which schedule.
type Ringing = Vec<(Pattern, Arc<Notify>)>;

impl Task {
    /// Starts all of them.
    pub async fn start_all(self, progress: &Progress, tasks: &mut JoinSet<String>) -> Result<()> {
        let bell = watch::Sender::default();
        self.start_outbox(&bell, progress, tasks)?;
        // The outbox ends with the last of those who ring.
        self.start_consumers(bell, progress, tasks);
        let mut ringing = self.start_reconciler(progress, tasks);
        ringing.extend(self.start_archiver(progress, tasks));
        ringing.extend(self.start_filters(progress, tasks));
        // Patterns that can't be used end the start.
        let rung = patterns(&self.live.now(), &ringing);
        let bells = Bells::start(with_bells(&rung, &ringing)).await?;
        tasks.spawn(self.ring(bells, ringing, rung));
        Ok(())
    }

    /// The task that adds to Redis what only the daemon counts.
    fn start_outbox(&self, bell: &watch::Sender<()>, progress: &Progress, tasks: &mut JoinSet<String>) -> Result<()> {
        let config = self.live.now();
        let Servers { store, cache, owner, .. } = self.servers.clone();
        let also = cache.also(&config.redis, &config.metrics)?;
        let outbox =
            Outbox { store, caches: [cache].into_iter().chain(also).collect(), live: self.live.clone(), owner };
        let (beat, bell) = (progress.register("outbox"), bell.subscribe());
        tasks.spawn(async move {
            outbox.run(bell, beat).await;
            "outbox".to_owned()
        });
        Ok(())
    }

    fn start_consumers(&self, bell: watch::Sender<()>, progress: &Progress, tasks: &mut JoinSet<String>) {
        let Self { live, servers, stop } = self;
        for number in 0..live.now().amqp.partitions {
            let name = format!("consumer {number}");
            let Servers { store, broker, owner, .. } = servers.clone();
            let partition = Partition::new(number, live, broker, store, &owner, stop.clone(), progress.register(&name));
            let partition = partition.ringing(bell.clone());
            tasks.spawn(async move {
                partition.run().await;
                name
            });
        }
        let (store, beat) = (servers.store.clone(), progress.register("ledger"));
        let (live, stop) = (live.clone(), stop.clone());
        tasks.spawn(async move {
            forget(store, live, beat, stop).await;
            "ledger".to_owned()
        });
    }

    fn start_reconciler(&self, progress: &Progress, tasks: &mut JoinSet<String>) -> Ringing {
        let Self { live, servers, stop } = self;
        let patterns: [(Mode, Pattern); 4] = [
            (Mode::Rebuild, |_| ""),
            (Mode::Full, |config| &config.reconcile.full_cron),
            (Mode::Scrub, |config| &config.reconcile.scrub_cron),
            (Mode::Changed, |config| &config.reconcile.changed_cron),
        ];
        let timetable =
            |(mode, pattern): &(Mode, Pattern)| Timetable::new(reconciler::JOB, mode.name(), live, *pattern);
        let timetables: Vec<Timetable> = patterns.iter().map(timetable).collect();
        let bell = Arc::new(Notify::new());
        let lookout = Lookout {
            cache: servers.cache.clone(),
            live: live.clone(),
            asked: timetables.first().map(|rebuild| Arc::clone(&rebuild.asked)).unwrap_or_default(),
            bell: Arc::clone(&bell),
        };
        let (beat, stopped) = (progress.register("lookout"), stop.clone());
        tasks.spawn(async move {
            lookout.run(beat, stopped).await;
            "lookout".to_owned()
        });
        tasks.spawn(self.clone().reconcile(timetables, Arc::clone(&bell), progress.register("reconciler")));
        patterns.into_iter().map(|(_, pattern)| (pattern, Arc::clone(&bell))).collect()
    }

    fn start_archiver(&self, progress: &Progress, tasks: &mut JoinSet<String>) -> Ringing {
        let Self { live, servers, stop } = self;
        let bell = Arc::new(Notify::new());
        let pattern: Pattern = |config| &config.archive.cron;
        let timetables = vec![
            Timetable::new(archiver::JOB, archiver::MODE, live, pattern),
            Timetable::new(archiver::JOB, archiver::SNAPSHOT_MODE, live, |_| ""),
        ];
        let clock = SnapshotClock {
            live: live.clone(),
            store: servers.store.clone(),
            cache: servers.cache.clone(),
            asked: timetables.last().map(|snapshot| Arc::clone(&snapshot.asked)).unwrap_or_default(),
            bell: Arc::clone(&bell),
        };
        let (beat, stopped) = (progress.register("snapshot clock"), stop.clone());
        tasks.spawn(async move {
            clock.run(beat, stopped).await;
            "snapshot clock".to_owned()
        });
        tasks.spawn(self.clone().archive(timetables, Arc::clone(&bell), progress.register("archiver")));
        vec![(pattern, bell)]
    }

    /// The task that keeps filters, or the one that sees to it that none is trusted later.
    fn start_filters(&self, progress: &Progress, tasks: &mut JoinSet<String>) -> Ringing {
        let beat = progress.register("filters");
        if !self.live.now().filter.is_on() {
            let Self { servers, stop, .. } = self.clone();
            tasks.spawn(async move {
                filters::stay_off(servers.store, beat, stop).await;
                "filters".to_owned()
            });
            return Ringing::new();
        }
        let bell = Arc::new(Notify::new());
        let pattern: Pattern = |config| config.filter.schedule();
        let timetables = vec![Timetable::new(filters::JOB, filters::MODE, &self.live, pattern)];
        tasks.spawn(self.clone().filters(timetables, Arc::clone(&bell), beat));
        vec![(pattern, bell)]
    }

    async fn reconcile(self, timetables: Vec<Timetable>, bell: Arc<Notify>, beat: Beat) -> String {
        let orders = [Mode::Rebuild, Mode::Full, Mode::Scrub, Mode::Changed].map(Order::scheduled);
        let Self { live, servers, stop } = &self;
        job::serve(&servers.store, &timetables, &bell, &beat, stop, |place| {
            let order = orders.get(place);
            async move {
                let Some(order) = order else { return Next::Bell };
                next(servers.reconcile(&live.now(), order, Show::Log, stop).await)
            }
        })
        .await;
        "reconciler".to_owned()
    }

    async fn archive(self, timetables: Vec<Timetable>, bell: Arc<Notify>, beat: Beat) -> String {
        let Self { live, servers, stop } = &self;
        job::serve(&servers.store, &timetables, &bell, &beat, stop, |place| async move {
            if place == 0 {
                return next(servers.archive(&live.now(), &Scope::default(), Show::Log, stop).await);
            }
            match servers.snapshot(&live.now(), None, false, Show::Log, stop).await {
                // Whatever became of it: the clock says when the next one is due.
                Ok(Ran::Ended(_)) => Next::Bell,
                failed => next(failed),
            }
        })
        .await;
        "archiver".to_owned()
    }

    async fn filters(self, timetables: Vec<Timetable>, bell: Arc<Notify>, beat: Beat) -> String {
        let Self { live, servers, stop } = &self;
        job::serve(&servers.store, &timetables, &bell, &beat, stop, |_| async move {
            next(servers.filters(&live.now(), stop).await)
        })
        .await;
        "filters".to_owned()
    }

    /// Rings bells by the patterns that are in force, until the stop.
    async fn ring(mut self, mut bells: Bells, ringing: Ringing, mut rung: Vec<String>) -> String {
        while self.stop.run_until_cancelled(self.live.changed()).await.is_some() {
            let wanted = patterns(&self.live.now(), &ringing);
            if wanted == rung {
                continue;
            }
            match Bells::start(with_bells(&wanted, &ringing)).await {
                Ok(new) => std::mem::replace(&mut bells, new).stop().await,
                Err(error) => {
                    let error = format!("{error:#}");
                    error!(event = "schedules-kept", error, "schedules stay as they were: {error}");
                    continue;
                }
            }
            rung = wanted;
            // A run may be due by the new pattern already.
            ringing.iter().for_each(|(_, bell)| bell.notify_one());
        }
        bells.stop().await;
        "schedules".to_owned()
    }
}

fn patterns(config: &Config, ringing: &Ringing) -> Vec<String> {
    ringing.iter().map(|(pattern, _)| pattern(config).to_owned()).collect()
}

fn with_bells(patterns: &[String], ringing: &Ringing) -> Vec<(String, Arc<Notify>)> {
    patterns.iter().cloned().zip(ringing.iter().map(|(_, bell)| Arc::clone(bell))).collect()
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
